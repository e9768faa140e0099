"""Starts the ranks of a worker, and loads their parts of the model together.

With tensor and pipeline parallelism the worker's process is rank 0 (`load_divided`), and the others only compute
(`run_rank`, the command `kvrelay rank`). With data-parallel attention each rank is a worker of its own
(`load_data_parallel`). All meet at rank 0's `rank_host` and `rank_port`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import metadata
from typing import Any

import msgspec
import torch

from kvrelay.config.ranks import WAIT_FOR_WORKER_S, RankConfig
from kvrelay.config.worker import WorkerConfig
from kvrelay.engine.load.checkpoint import read_config
from kvrelay.engine.make import DEFAULT_KV_MEMORY_BYTES, PoolSizing, make_runner
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator, GroupNotFormed, family_of, host_towards
from kvrelay.engine.parallel.model_part import RankGroups
from kvrelay.engine.parallel.pipeline import PipelineLink
from kvrelay.engine.parallel.shard_plan import check_data_parallel
from kvrelay.engine.run.device import find_device
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.handoff.transports.base import TransferReceiver, TransferSender
from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.handoff.transports.select import make_receivers, make_senders
from kvrelay.logs import setup_logging
from kvrelay.process import deferred_collection, settle_garbage
from kvrelay.protocol.messages import PeerRef, WakeRank
from kvrelay.ranks.local_ranks import (
    END_WITHIN_S,
    LocalRanks,
    RankCommand,
    RanksFailed,
    end_with_starter,
    why_not_divided,
)
from kvrelay.ranks.messages import Meeting
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.ranks.rank_member import RankMember
from kvrelay.ranks.ranked_runner import LockstepRunner, RankedRunner
from kvrelay.step.batch import DeviceLost

log = logging.getLogger(__name__)

RANK_COMMAND = (sys.executable, "-m", "kvrelay.cli.main", "rank")
ADMISSION_WAIT_S = 1.0
"""How long a rank's receiver waits for the call that admits blocks which have come before it."""
READY_S = 60.0
"""How long another rank may be behind rank 0 with its load and its transports."""
PRIVATE_FIELDS = {"redis_url", "redis_password_file", "event_log", "metrics_file"}
"""Settings of a worker that concern its own process alone."""
PORT_FIELDS = ("port", "transfer_port", "http_port")
EQUAL_FIELDS = (
    *("role", "data_parallel_size", "dtype", "kv_cache_dtype", "block_size", "num_blocks", "max_model_len"),
    *("load_format", "token_budget", "max_running", "chunking", "speculation", "memory_utilization"),
    *("prefill_delayer", "batch_invariant"),
)
"""Settings that must be the same on all ranks with data-parallel attention, which load, measure and decide together."""


class _Order(msgspec.Struct, frozen=True):
    """Rank 0's message to the other ranks before the load."""

    meeting: Meeting
    config: dict[str, Any]
    hands_over: bool


def make_part(config: WorkerConfig, device: torch.device, threads: int | None, **others: Any) -> TransformersRunner:
    """Loads the model, or a rank's part of it. `others`: arguments of `make_runner`. All ranks call this at the same
    time."""
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
        num_threads=threads,
        fused_layers=config.fused_layers,
        batch_invariant=config.batch_invariant,
        quantization=config.quantization,
        load_format=config.load_format,
        **others,
    )
    if not runner.follows:
        runner.prepare_grammars()
    return runner


# -- tensor and pipeline parallelism ----------------------------------------------------------------------------------


def load_divided(config: WorkerConfig, *, hands_over: bool) -> RankedRunner:
    """Starts the ranks of `tensor_parallel_size` and `pipeline_parallel_size`, and returns once all have loaded their
    parts. `close` ends them. With `hands_over` the ranks have transports for handoffs.

    Raises RanksFailed, UnsupportedModel and the other errors of `make_runner`. No rank is left running then.
    """
    if why := why_not_divided(config.model, config.tensor_parallel_size, config.pipeline_parallel_size):
        raise RanksFailed(f"{config.model} with {why}")
    device = find_device(config.device)
    with _listen(config) as listener, ExitStack() as undo:
        local = LocalRanks(_rank_commands(config, listener.getsockname()[1], device))
        undo.callback(local.close, 0.0)
        try:
            coordinator = _connect(config, 0, config.num_ranks, device, local, listener)
            undo.callback(coordinator.close)
            group = RankGroup(config.num_ranks, local, config.rank_host, curve=config.curve_keys())
            undo.callback(group.close)
            undo.callback(local.kill)
            group.lost.add_done_callback(lambda _: coordinator.leave())
            group.on_close = coordinator.close
            _check_equal(coordinator, _versions())
            order = _Order(group.meeting, config.model_dump(mode="json", exclude=PRIVATE_FIELDS), hands_over)
            coordinator.all_texts(msgspec.json.encode(order).decode())
            runner = _make_divided(config, coordinator, device, _threads(config))
            group.await_ready(runner.spec.fingerprint, READY_S)
        except (DeviceLost, GroupNotFormed) as error:
            raise RanksFailed(local.why_lost(str(error))) from error
        undo.pop_all()
    return RankedRunner(runner, group)


def run_rank(config: RankConfig) -> int:
    """Runs a rank until its worker ends. Returns the exit status: 1 if the rank could not go on."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see `worker_main`
    end_with_starter()
    setup_logging(config.log_level, config.log_format, rank=str(config.rank))
    try:
        _follow(config)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        reason = str(error) or type(error).__name__
        log.error("rank %d ends: %s", config.rank, reason, exc_info=log.isEnabledFor(logging.DEBUG))
        return 1
    return 0


def _follow(config: RankConfig) -> None:
    host, _, port = config.engine.rpartition(":")
    host = host.strip("[]")
    device = find_device(config.device)
    coordinator = GroupCoordinator.connect(config.rank, None, (host, int(port)), WAIT_FOR_WORKER_S, device)
    with ExitStack() as closing:
        closing.callback(coordinator.close)
        _check_equal(coordinator, _versions())
        order = msgspec.json.decode(coordinator.all_texts("")[0], type=_Order)
        worker = config_of_rank(config, order.config)
        member = RankMember(config.rank, host, order.meeting, config.curve_keys())
        closing.callback(member.close)
        log.info("loads its part of %s on %s", worker.model, device)
        with deferred_collection():
            runner = _make_divided(worker, coordinator, device, config.threads)
        settle_garbage()
        member.run(runner, make_transports(worker, runner.pool_memory) if order.hands_over else {})


def config_of_rank(config: RankConfig, worker: Mapping[str, Any]) -> WorkerConfig:
    """The worker's configuration with what belongs to this rank's machine."""
    own = {name: getattr(config, name) for name in ("device", "threads", "host", "curve_key_file")}
    own["advertise_host"] = config.reachable_host
    if worker["role"] == "prefill" and "host" not in config.model_fields_set:
        # Only NIXL listens there: at the address by which this machine reaches the worker.
        own["host"] = host_towards(config.engine.rpartition(":")[0].strip("[]"))
    return WorkerConfig.model_validate({**worker, **own, "model": config.model or worker["model"], "transfer_port": 0})


def make_transports(config: WorkerConfig, pool: PoolLike) -> Mapping[str, TransferSender | TransferReceiver]:
    """This rank's ends of handoffs, by name. Raises TransportUnavailable as `make_senders` does."""
    ends: Mapping[str, TransferSender | TransferReceiver]
    if config.role == "prefill":
        ends = make_senders(
            config.transfer_choice,
            pool,
            host=config.host,
            advertise_host=config.reachable_host,
            checksums=config.transfer_checksums,
            curve=config.curve_keys(),
            max_peers=config.max_peers,
        )
    else:
        ends = make_receivers(
            config.transfer_choice,
            pool,
            host=config.host,
            port=0,
            advertise_host=config.reachable_host,
            curve=config.curve_keys(),
            admission_wait_s=ADMISSION_WAIT_S,
        )
    return {name: end for name, end in ends.items() if isinstance(end, TransferSender | TransferReceiver)}


def _make_divided(
    config: WorkerConfig, group: GroupCoordinator, device: torch.device, threads: int | None
) -> TransformersRunner:
    """`group` has all ranks. In a pipeline it is only for the load: its stages are connected by `PipelineLink`, and the
    ranks of a stage by a group of their own."""
    if config.pipeline_parallel_size == 1:
        return make_part(config, device, threads, ranks=RankGroups(group))
    link = PipelineLink.connect(group, config.pipeline_parallel_size)
    stage_group = group.divide(config.tensor_parallel_size) if config.tensor_parallel_size > 1 else None
    return make_part(config, device, threads, ranks=RankGroups(stage_group, link))


def _rank_commands(config: WorkerConfig, port: int, device: torch.device) -> list[RankCommand]:
    """The ranks that are started here: the first ones. GPUs are used in the order of the ranks, from rank 0's on."""
    host = f"[{config.rank_host}]" if ":" in config.rank_host else config.rank_host
    flags = [f"--engine={host}:{port}", f"--log-level={config.log_level}", f"--log-format={config.log_format}"]
    flags += [f"--threads={_threads(config)}", f"--host={config.host}", f"--advertise-host={config.reachable_host}"]
    if config.curve_key_file is not None:
        flags.append(f"--curve-key-file={config.curve_key_file}")
    commands = []
    for rank in range(1, 1 + config.num_local_ranks):
        place = "cpu" if device.type == "cpu" else f"cuda:{(device.index or 0) + rank}"
        command = [*RANK_COMMAND, *flags, f"--rank={rank}", f"--device={place}"]
        commands.append(RankCommand(rank, command))
    return commands


# -- data-parallel attention ------------------------------------------------------------------------------------------


def load_data_parallel(config: WorkerConfig) -> LockstepRunner:
    """Joins the group, whose other ranks rank 0 starts, and returns once all ranks have loaded their parts.

    Raises RanksFailed, UnsupportedModel and the other errors of `make_runner`. No process is left running then.
    """
    rank, size, device = config.data_parallel_rank, config.data_parallel_size, find_device(config.device)
    with ExitStack() as undo:
        listener, commands = None, []
        if rank == 0:
            check_data_parallel(read_config(config.model), size)  # before processes are started for it
            listener = undo.enter_context(_listen(config))
            commands = _worker_commands(config, listener.getsockname()[1], device)
        local = LocalRanks(commands)
        undo.callback(local.close, 0.0)
        try:
            coordinator = _connect(config, rank, size, device, local, listener)
            undo.callback(coordinator.close)
            settings = config.model_dump(mode="json")
            _check_equal(coordinator, _versions() | {name: settings[name] for name in EQUAL_FIELDS})
            runner = make_part(config, device, _threads(config), ranks=RankGroups(data_parallel=coordinator))
            _check_equal(coordinator, {"weights or tokenizer": runner.spec.fingerprint})
        except (DeviceLost, GroupNotFormed) as error:
            raise RanksFailed(local.why_lost(str(error))) from error
        undo.pop_all()
    return LockstepRunner(runner, ProcessRank(coordinator, local))


def _worker_commands(config: WorkerConfig, port: int, device: torch.device) -> list[RankCommand]:
    """The workers that are started here: the first ranks. They take this process's flags, and some of their own."""
    program = [sys.executable, "-m", f"kvrelay_{config.role}", *sys.argv[1:]]
    flags = [f"--rank-host={config.rank_host}", f"--rank-port={port}", f"--threads={_threads(config)}"]
    commands = []
    for rank in range(1, 1 + config.num_local_ranks):
        own = [f"--data-parallel-rank={rank}", f"--worker-id={config.rank_worker_ids[rank]}"]
        if device.type == "cuda":
            own.append(f"--device=cuda:{(device.index or 0) + rank}")
        for name in PORT_FIELDS:
            if first := getattr(config, name):
                own.append(f"--{name.replace('_', '-')}={first + rank}")
        commands.append(RankCommand(rank, [*program, *flags, *own]))
    return commands


class ProcessRank:
    """A rank whose others are processes. Implements `LockstepGroup`."""

    def __init__(self, coordinator: GroupCoordinator, local: LocalRanks) -> None:
        """`local`: the processes of other ranks that this one has started: none on other ranks than the first."""
        self.rank = coordinator.rank
        self.size = coordinator.size
        self._coordinator = coordinator
        self._local = local
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lockstep")
        self._peers: list[PeerRef] = []
        self._send: Callable[[PeerRef, WakeRank], None] = lambda peer, body: None
        self._lost: asyncio.Future[str] | None = None
        self._is_draining = False
        self._is_lost = False  # without a drain
        # Of a process that has ended the connections close, except if it ends in the middle of a collective in C.
        local.first_end.add_done_callback(lambda _: coordinator.leave())

    def join(self, me: PeerRef, send: Callable[[PeerRef, WakeRank], None], on_wake: Callable[[int], None]) -> None:
        own = json.dumps([me.peer_id, me.incarnation, me.address])
        try:
            peers = [PeerRef(*json.loads(text)) for text in self._coordinator.all_texts(own)]
        except DeviceLost as error:
            raise RanksFailed(self._local.why_lost(str(error))) from error
        self._peers = [peer for rank, peer in enumerate(peers) if rank != self.rank]
        self._send = send

    async def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
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
        self._local.terminate()

    def peer_lost(self, peer: PeerRef, reason: str) -> None:
        if peer in self._peers and self._lost is not None and not self._lost.done():
            self._lost.set_result(f"{peer.peer_id}, a rank of this group, is lost: {reason}")

    async def watch(self) -> None:
        lost = self._lost = asyncio.get_running_loop().create_future()
        ended = asyncio.wrap_future(self._local.first_end)
        await asyncio.wait([lost, ended], return_when=asyncio.FIRST_COMPLETED)
        self._is_lost = not self._is_draining
        raise DeviceLost(lost.result() if lost.done() else ended.result())

    def leave(self) -> None:
        self._coordinator.leave()

    def close(self) -> None:
        self._executor.shutdown(wait=False)
        self._coordinator.close()
        # A lost group does not end by itself, and requests wait for the end of this process.
        self._local.close(0.0 if self._is_lost else END_WITHIN_S)


# -- both -------------------------------------------------------------------------------------------------------------


def _listen(config: WorkerConfig) -> socket.socket:
    """Returns the socket at which rank 0 awaits the other ranks. Raises RanksFailed."""
    try:
        return socket.create_server((config.rank_host, config.rank_port), family=family_of(config.rank_host))
    except OSError as error:
        where = f"{config.rank_host} port {config.rank_port}"
        raise RanksFailed(f"cannot listen for ranks on {where}: {os.strerror(error.errno or 0)}") from None


def _connect(
    config: WorkerConfig,
    rank: int,
    size: int,
    device: torch.device,
    local: LocalRanks,
    listener: socket.socket | None,
) -> GroupCoordinator:
    port = config.rank_port if listener is None else listener.getsockname()[1]
    address, timeout_s = (config.rank_host, port), config.rank_timeout_s
    return GroupCoordinator.connect(rank, size, address, timeout_s, device, listener=listener, check=local.check)


def _versions() -> dict[str, Any]:
    return {f"version of {name}": metadata.version(name) for name in ("kvrelay", "torch")}


def _check_equal(coordinator: GroupCoordinator, own: Mapping[str, Any]) -> None:
    """Raises RanksFailed, on all ranks, if these facts differ between them."""
    every = [json.loads(text) for text in coordinator.all_texts(json.dumps(own))]
    for rank, other in enumerate(every):
        for name, value in every[0].items():
            if other.get(name) != value:
                raise RanksFailed(
                    f"rank 0 has {name} = {value}, and rank {rank} of {coordinator.size} has {other.get(name)}: "
                    f"all ranks of a group need the same"
                )


def _threads(config: WorkerConfig) -> int:
    """Threads of each rank on this machine. By default they share its cores."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // (1 + config.num_local_ranks))
