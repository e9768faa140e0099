"""A worker that is a rank of a group with data-parallel attention: rank 0 starts the others of its machine, and all
load their parts together."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

import torch

from kvrelay.config.worker import WorkerConfig
from kvrelay.engine.load.checkpoint import read_config
from kvrelay.engine.make import DEFAULT_KV_MEMORY_BYTES, PoolSizing, make_runner
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator, GroupNotFormed
from kvrelay.engine.parallel.shard_plan import check_data_parallel
from kvrelay.engine.run.device import find_device
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.messaging.sockets import tcp_host
from kvrelay.protocol.messages import PeerRef, WakeRank
from kvrelay.ranks.rank_group import RankCommand, RanksFailed
from kvrelay.ranks.rank_process import PARENT_VARIABLE
from kvrelay.step.batch import DeviceLost
from kvrelay.worker.group_workers import END_WITHIN_S, GroupWorkers
from kvrelay.worker.lockstep_runner import LockstepRunner
from kvrelay.worker.rank_main import own_software

PORT_FIELDS = ("port", "transfer_port", "http_port")
EQUAL_FIELDS = (
    *("role", "data_parallel_size", "dtype", "kv_cache_dtype", "block_size", "num_blocks", "max_model_len"),
    *("load_format", "token_budget", "max_running", "chunking", "speculation", "memory_utilization"),
    "prefill_delayer",
)
"""Settings that must be the same on all ranks, since the ranks load, measure and decide together."""


def load_data_parallel(config: WorkerConfig) -> LockstepRunner:
    """Joins the group, which rank 0 starts, and returns once all ranks have loaded their parts.

    Raises RanksFailed, UnsupportedModel and the other errors of `make_runner`. No process is left running then.
    """
    device = find_device(config.device)
    if config.data_parallel_rank:
        try:
            return LockstepRunner(*_load(config, device, None, None))
        except (DeviceLost, GroupNotFormed) as error:
            raise RanksFailed(str(error)) from error
    # Before processes are started for it.
    check_data_parallel(read_config(config.model), config.data_parallel_size)
    family = socket.getaddrinfo(config.rank_host, 1, type=socket.SOCK_STREAM)[0][0]
    try:
        listener = socket.create_server((config.rank_host, config.rank_port), family=family)
    except OSError as error:
        where = f"{config.rank_host} port {config.rank_port}"
        raise RanksFailed(f"cannot listen for ranks on {where}: {os.strerror(error.errno or 0)}") from None
    with listener:
        workers = GroupWorkers(_commands(config, listener.getsockname()[1], device))
        try:
            return LockstepRunner(*_load(config, device, listener, workers))
        except (DeviceLost, GroupNotFormed) as error:
            reason = workers.why_lost(error)
            workers.close(within_s=0.0)
            raise RanksFailed(reason) from error
        except BaseException:
            workers.close(within_s=0.0)
            raise


def _load(
    config: WorkerConfig, device: torch.device, listener: socket.socket | None, workers: GroupWorkers | None
) -> tuple[TransformersRunner, DataParallelGroup]:
    rank, size = config.data_parallel_rank, config.data_parallel_size
    port = config.rank_port if listener is None else listener.getsockname()[1]
    coordinator = GroupCoordinator.connect(
        *(rank, size, f"{tcp_host(config.rank_host)}:{port}", config.rank_timeout_s),
        device if device.type == "cuda" else None,
        listener=listener,
        check=lambda: None if workers is None else workers.check(),
    )
    try:
        _check_equal(coordinator, config)
        runner = _make_part(config, coordinator, device)
        _check_same_model(coordinator, runner.spec.fingerprint)
    except BaseException:
        coordinator.close()
        raise
    return runner, DataParallelGroup(coordinator, workers)


def _check_equal(coordinator: GroupCoordinator, config: WorkerConfig) -> None:
    """Raises RanksFailed, on all ranks, if versions or settings differ."""
    software, every = own_software(), config.model_dump(mode="json")
    own = {"version of kvrelay": software.kvrelay, "version of torch": software.torch}
    own |= {name: every[name] for name in EQUAL_FIELDS}
    told = [json.loads(text) for text in coordinator.all_texts(json.dumps(own))]
    for rank, other in enumerate(told):
        for name, value in told[0].items():
            if other.get(name) != value:
                raise RanksFailed(
                    f"rank 0 has {name} = {value}, and rank {rank} of {coordinator.size} has {other.get(name)}: "
                    f"all ranks of a group need the same"
                )


def _check_same_model(coordinator: GroupCoordinator, fingerprint: str) -> None:
    fingerprints = coordinator.all_texts(fingerprint)
    for rank, other in enumerate(fingerprints):
        if other != fingerprints[0]:
            raise RanksFailed(f"rank {rank} of {coordinator.size} has other weights than rank 0, or another tokenizer")


def _make_part(config: WorkerConfig, coordinator: GroupCoordinator, device: torch.device) -> TransformersRunner:
    sizing = config.pool_sizing
    runner = make_runner(
        config.model,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        memory_bytes=config.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES,
        size_pool=None if sizing is None else PoolSizing(*sizing),
        swap_bytes=config.swap_bytes,
        max_model_len=config.max_model_len,
        device=device,
        num_threads=_threads(config),
        quantization=config.quantization,
        load_format=config.load_format,
        data_parallel=coordinator,
    )
    runner.prepare_grammars()
    return runner


def _threads(config: WorkerConfig) -> int:
    """Threads of each rank on this machine. By default they share its cores."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // (1 + config.num_local_ranks))


def _commands(config: WorkerConfig, port: int, device: torch.device) -> list[RankCommand]:
    """The workers that are started here: the first ranks. They take this process's flags, and some of their own."""
    program = [sys.executable, "-m", f"kvrelay_{config.role}", *sys.argv[1:]]
    flags = [f"--rank-host={config.rank_host}", f"--rank-port={port}", f"--threads={_threads(config)}"]
    environ = {PARENT_VARIABLE: str(os.getpid())}
    commands = []
    for rank in range(1, 1 + config.num_local_ranks):
        own = [f"--data-parallel-rank={rank}", f"--worker-id={config.rank_worker_ids[rank]}"]
        if device.type == "cuda":
            own.append(f"--device=cuda:{(device.index or 0) + rank}")
        for name in PORT_FIELDS:
            if first := getattr(config, name):
                own.append(f"--{name.replace('_', '-')}={first + rank}")
        commands.append(RankCommand(rank, [*program, *flags, *own], environ))
    return commands


class DataParallelGroup:
    """A worker's connection to the other ranks, which are processes. Implements `LockstepGroup`."""

    def __init__(self, coordinator: GroupCoordinator, workers: GroupWorkers | None) -> None:
        """`workers`: the processes of other ranks that this one has started; None on other ranks than the first."""
        self._coordinator = coordinator
        self._workers = workers
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lockstep")
        self._peers: list[PeerRef] = []
        self._send: Callable[[PeerRef, WakeRank], None] = lambda peer, body: None
        self._on_wake: Callable[[int], None] = lambda num_passes: None
        self._lost: asyncio.Future[str] | None = None
        self._is_draining = False
        self._is_lost = False  # without a drain
        if workers is not None:
            # Of a process that has ended the connections close, except if it ends in the middle of a collective in C.
            workers.on_end = lambda reason: self._coordinator.leave()

    @property
    def rank(self) -> int:
        return self._coordinator.rank

    @property
    def size(self) -> int:
        return self._coordinator.size

    def join(self, me: PeerRef, send: Callable[[PeerRef, WakeRank], None], on_wake: Callable[[int], None]) -> None:
        own = json.dumps([me.peer_id, me.incarnation, me.address])
        try:
            peers = [PeerRef(*json.loads(text)) for text in self._coordinator.all_texts(own)]
        except DeviceLost as error:
            raise RanksFailed(str(error) if self._workers is None else self._workers.why_lost(error)) from error
        self._peers = [peer for rank, peer in enumerate(peers) if rank != self.rank]
        self._send, self._on_wake = send, on_wake

    def woken(self, num_passes: int) -> None:
        self._on_wake(num_passes)

    async def exchange(self, numbers: Seq[int]) -> list[list[int]]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, self._coordinator.exchange, numbers)
        except DeviceLost:
            self._is_lost = not self._is_draining
            raise

    def wake_others(self, num_passes: int) -> None:
        for peer in self._peers:
            self._send(peer, WakeRank(num_passes=num_passes))

    def begin_drain(self) -> None:
        self._is_draining = True
        if self._workers is not None:
            self._workers.terminate()

    def peer_lost(self, peer: PeerRef, reason: str) -> None:
        if peer in self._peers and self._lost is not None and not self._lost.done():
            self._lost.set_result(f"{peer.peer_id}, a rank of this group, is lost: {reason}")

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        lost = self._lost = loop.create_future()
        if self._workers is not None:
            ended = asyncio.wrap_future(self._workers.first_end)
            await asyncio.wait([lost, ended], return_when=asyncio.FIRST_COMPLETED)
            reason = lost.result() if lost.done() else ended.result()
        else:
            reason = await lost
        self._is_lost = not self._is_draining
        raise DeviceLost(reason)

    def leave(self) -> None:
        self._coordinator.leave()

    def close(self) -> None:
        self._executor.shutdown(wait=False)
        self._coordinator.close()
        if self._workers is not None:
            # A lost group does not end by itself, and requests wait for the end of this process.
            self._workers.close(within_s=0.0 if self._is_lost else END_WITHIN_S)
