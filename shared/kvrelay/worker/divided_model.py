"""The model of a worker whose ranks are several processes: starts the ranks, and loads all parts together."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable

import torch

from kvrelay.config.worker import WorkerConfig
from kvrelay.engine.make import DEFAULT_KV_MEMORY_BYTES, PoolSizing, make_runner
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator, GroupNotFormed
from kvrelay.engine.parallel.stage_link import StageLink
from kvrelay.engine.run.device import find_device
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.messaging.sockets import tcp_host
from kvrelay.ranks.messages import RankSettings
from kvrelay.ranks.model_division import why_not_divided
from kvrelay.ranks.rank_group import GroupOptions, RankCommand, RankGroup, RanksFailed
from kvrelay.ranks.rank_member import facts_of
from kvrelay.ranks.rank_process import PARENT_VARIABLE, RANK_COMMAND
from kvrelay.ranks.ranked_runner import RankedRunner
from kvrelay.ranks.transfer_messages import TransferSettings
from kvrelay.step.batch import DeviceLost
from kvrelay.worker.rank_main import own_software

log = logging.getLogger(__name__)


def load_divided(config: WorkerConfig, *, hands_over: bool) -> RankedRunner:
    """Starts the ranks of `tensor_parallel_size` and `pipeline_parallel_size`, and returns once all have loaded their
    parts. `close` ends them. With `hands_over` the ranks have transports for handoffs.

    Raises RanksFailed, UnsupportedModel and the other errors of `make_runner`. No rank is left running then.
    """
    if why := why_not_divided(config.model, config.tensor_parallel_size, config.pipeline_parallel_size):
        raise RanksFailed(f"{config.model} with {why}")
    device = find_device(config.device)
    group = RankGroup(_options(config), lambda engine: _commands(config, engine, device))
    try:
        group.await_joined()
        with socket.create_server((config.rank_host, 0), family=_family(config.rank_host)) as listener:
            settings = _settings(config, listener.getsockname()[1], hands_over)
            group.start(settings)
            runner, disconnect = _load_own(config, settings, group, device, listener)
        group.await_ready(facts_of(runner.spec))
    except BaseException:
        group.close()
        raise
    return RankedRunner(runner, group, group if hands_over else None, disconnect)


def make_part(
    settings: RankSettings,
    group: GroupCoordinator,
    device: torch.device,
    threads: int | None,
    model: str | None = None,
) -> TransformersRunner:
    """Loads one rank's part. All ranks call this at the same time. `model` is its place on this machine.

    `group` has all ranks. With several stages it is only for the load: the stages are connected by `StageLink`, and the
    ranks of a stage by a group of their own.
    """
    num_stages = settings.num_stages
    link = StageLink.connect(group, num_stages) if num_stages > 1 else None
    stage_size = settings.size // num_stages
    stage_group = group if link is None else group.divide(stage_size) if stage_size > 1 else None
    sizing = settings.pool_sizing
    return make_runner(
        model or settings.model,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        memory_bytes=settings.kv_memory_bytes,
        size_pool=None if sizing is None else PoolSizing(*sizing),
        swap_bytes=settings.swap_bytes,
        max_model_len=settings.max_model_len,
        device=device,
        num_threads=threads,
        fused_layers=settings.fused_layers,
        quantization=settings.quantization,
        load_format=settings.load_format,
        tensor_parallel=stage_group,
        pipeline=link,
    )


def _load_own(
    config: WorkerConfig, settings: RankSettings, group: RankGroup, device: torch.device, listener: socket.socket
) -> tuple[TransformersRunner, Callable[[], None]]:
    """Loads rank 0's part. Returns it with what closes its connections."""
    try:
        connection = GroupCoordinator.connect(
            0,
            settings.size,
            settings.init_address,
            settings.timeout_s,
            device if device.type == "cuda" else None,
            listener=listener,
            check=group.check_start,
        )
        # A rank may be lost without its connection being closed, for example with its machine.
        group.lost.add_done_callback(lambda _: connection.leave())
        try:
            return make_part(settings, connection, device, _threads(config)), connection.close
        except BaseException:
            connection.close()
            raise
    except (DeviceLost, GroupNotFormed) as error:
        # The group knows why: which process ended and how, or what a rank could not load.
        raise RanksFailed(group.fail(str(error))) from error


def _options(config: WorkerConfig) -> GroupOptions:
    return GroupOptions(
        size=config.num_ranks,
        group=secrets.token_hex(8),
        software=own_software(),
        host=config.rank_host,
        port=config.rank_port,
        timeout_s=config.rank_timeout_s,
        curve=config.curve_key(),
    )


def _commands(config: WorkerConfig, engine: str, device: torch.device) -> list[RankCommand]:
    """The ranks that are started here: the first ones."""
    flags = [f"--engine={engine}", f"--log-level={config.log_level}", f"--log-format={config.log_format}"]
    flags += [f"--rank-timeout-s={config.rank_timeout_s:g}", f"--threads={_threads(config)}"]
    if config.curve_key_file is not None:
        flags.append(f"--curve-key-file={config.curve_key_file}")
    flags += [f"--host={config.host}", f"--advertise-host={config.reachable_host}"]
    environ = {PARENT_VARIABLE: str(os.getpid())}
    return [
        RankCommand(rank, [*RANK_COMMAND, *flags, f"--rank={rank}", f"--device={_device_of(device, rank)}"], environ)
        for rank in range(1, 1 + config.num_local_ranks)
    ]


def _threads(config: WorkerConfig) -> int:
    """Threads of each rank on this machine. By default they share its cores."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // (1 + config.num_local_ranks))


def _device_of(device: torch.device, rank: int) -> str:
    """GPUs are used in the order of the ranks, from the worker's own on."""
    return "cpu" if device.type == "cpu" else f"cuda:{(device.index or 0) + rank}"


def _settings(config: WorkerConfig, port: int, hands_over: bool) -> RankSettings:
    transfers = TransferSettings(config.role, config.transfer_choice, config.transfer_checksums, config.max_peers)
    swap_bytes = config.swap_bytes
    return RankSettings(
        model=config.model,
        size=config.num_ranks,
        init_address=f"{tcp_host(config.rank_host)}:{port}",
        timeout_s=config.rank_timeout_s,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        # Not pydantic's ByteSize, a subclass of int: msgspec encodes plain ones alone.
        kv_memory_bytes=int(config.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES),
        pool_sizing=config.pool_sizing,
        swap_bytes=None if swap_bytes is None else int(swap_bytes),
        max_model_len=config.max_model_len,
        fused_layers=config.fused_layers,
        quantization=config.quantization,
        load_format=config.load_format,
        transfers=transfers if hands_over else None,
        num_stages=config.pipeline_parallel_size,
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)[0][0]
