"""`kvrelay size MODEL`: what the workers of a model need and hold, by their own load without weights."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvrelay.config.loader import add_config_flag, add_flags, resolve
from kvrelay.config.worker import WorkerConfig
from kvrelay.device_profiles import DEVICES, MEMORY_SHARE, REACHED_LINK, Device
from kvrelay.flag_parser import CommandFailed, FlagParser, number, whole
from kvrelay.kv.table import blocks_for
from kvrelay.machine_memory import machine_memory_bytes

if TYPE_CHECKING:
    from kvrelay.engine.load.rank_size import RankSize

GIB, MIB = 1 << 30, 1 << 20
PROCESS_BYTES = {"cpu": 600 * MIB, "cuda": 3 * GIB}
"""Host memory of a process without weights, pool and steps. On a CPU 330 MiB were measured with a tokenizer of 2,000
tokens, 440 with 32,000. That beside a GPU is an assumption."""
BESIDE_ON_GPU = GIB
"""GPU memory of a process beside torch's tensors: its context, workspaces and CUDA graphs. An assumption."""
LIMIT_OVER_REQUEST = 1.15
"""For texts of requests, the prefix index and pages of files."""
NCCL_SHM_BYTES, SLOT_BYTES = GIB, MIB
ZMQ_BYTES_S, ENCRYPTED_BYTES_S = 1.5e9, 0.3e9
"""Of a pair of workers: benchmarks/results/handoff.md, and with a CURVE key."""
POOL_FIELDS = ("num_blocks", "kv_memory_bytes", "memory_utilization")
SHOWN = (
    *("dtype", "kv_cache_dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size"),
    *("data_parallel_size", "memory_utilization", "kv_memory_bytes", "swap_space", "token_budget", "max_running"),
)
"""The flags of workers that the short help shows."""


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """Bytes of the largest rank, unless named otherwise. `request`, `limit` and `shm` are host memory of a container
    with all of the worker's processes."""

    role: str
    num_processes: int
    num_gpus: int
    weights: int
    largest_step: int
    kv_per_token: int
    handoff_per_token: int
    kv_per_block: int
    num_blocks: int
    pool: int
    tokens: int
    sequence_tokens: int
    sequences: int
    swap_space: int
    request: int
    limit: int
    shm: int


def size(argv: Sequence[str]) -> int:
    """Prints what each role needs. Returns the exit status. Raises CommandFailed."""
    arguments = size_parser().parse(argv)
    device = None if arguments.gpu is None else DEVICES[arguments.gpu]
    flags = _worker_flags(arguments)
    configs = {role: resolve(WorkerConfig, flags, os.environ, role=role) for role in ("prefill", "decode")}
    found = [_size_worker(config, arguments, device) for config in configs.values()]
    per_prompt = arguments.prompt_tokens * found[0].handoff_per_token
    if arguments.json:
        print(json.dumps({"workers": [asdict(each) for each in found], "handoff_bytes": per_prompt}, indent=2))
        return 0
    print(_headline(configs["decode"], arguments))
    print(_table(found))
    print(f"\nhandoff     {_handoffs(per_prompt, arguments.rate, device)}\n")
    print("\n".join(_resources(each) for each in found))
    return 0


def size_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay size",
        "Prints what the workers of a model need, and how much they hold, from its config alone: no weights are read.",
        usage="kvrelay size MODEL [flags] [flags of kvrelay decode]",
    )
    parser.add_argument("MODEL", help="directory or config.json of the model, or its name on the hub")
    own = parser.add_argument_group("deployment")
    own.add_argument("--gpu", choices=sorted(DEVICES), help="workers on such a GPU (default: on a CPU)")
    own.add_argument(
        "--memory",
        type=_bytes,
        metavar="SIZE",
        help="memory of the GPU, or of a CPU worker's container, as in 80GiB (default: the GPU's, or this machine's)",
    )
    own.add_argument("--prompt-tokens", type=whole(1, 1 << 24), default=4000, metavar="N", help="(default: 4000)")
    own.add_argument("--output-tokens", type=whole(1, 1 << 24), default=500, metavar="N", help="(default: 500)")
    own.add_argument("--rate", type=number(0.001, 1e6), metavar="R", help="requests per second, for the bandwidth")
    own.add_argument("--json", action="store_true", help="print JSON, with all sizes in bytes")
    add_config_flag(own)
    names = frozenset(WorkerConfig.model_fields)
    add_flags(parser.add_argument_group("workers"), WorkerConfig, names - set(SHOWN))
    add_flags(parser.add_further_group("further flags of workers"), WorkerConfig, frozenset((*SHOWN, "model")))
    return parser


def _bytes(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size, as in 80GiB") from None


def _worker_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given values of workers, by field. Raises CommandFailed."""
    path = Path(arguments.MODEL)
    model = str(path.parent) if path.name == "config.json" else arguments.MODEL
    given = {name: value for name, value in vars(arguments).items() if name in WorkerConfig.model_fields}
    flags = {"redis_url": "none", "http_port": 0, **given, "model": model}
    if "config" in arguments:
        flags["config"] = arguments.config
    if arguments.gpu is not None:
        flags.setdefault("device", "cuda")
    return flags


# -- one role ---------------------------------------------------------------------------------------------------------


def _size_worker(config: WorkerConfig, arguments: argparse.Namespace, device: Device | None) -> WorkerSize:
    """Raises CommandFailed for a model that is not served, and if the memory does not hold weights and a pool."""
    from kvrelay.engine.pool_size import PoolDoesNotFit
    from kvrelay.engine.run.attention import UnsupportedModel

    kind: Literal["cpu", "cuda"] = "cuda" if config.device.startswith("cuda") else "cpu"
    total = arguments.memory or (machine_memory_bytes() if device is None else int(device.memory_bytes))
    if kind == "cuda" and device is None and arguments.memory is None:
        raise CommandFailed("the memory of the GPU is not known: name it with --gpu or --memory", 2)
    if (arguments.memory or device) and not any(getattr(config, name) for name in POOL_FIELDS):
        config = config.model_copy(update={"memory_utilization": MEMORY_SHARE})
    try:
        ranks = _ranks_of(config, kind)
        num_blocks = min(_num_blocks(config, each, total, kind) for each in ranks)
    except (UnsupportedModel, PoolDoesNotFit, ValueError, OSError) as error:
        raise CommandFailed(f"{config.role}: {str(error).strip().splitlines()[0]}") from None
    largest = max(ranks, key=lambda each: each.held + num_blocks * each.layout.block_bytes)
    swap = _swap_slots(config, largest, num_blocks) * largest.layout.block_bytes
    pool = num_blocks * largest.layout.block_bytes
    shm, alike = _shm_bytes(config, kind), config.num_processes // len(ranks)
    request = shm + alike * sum(_host_bytes(each, kind, config, num_blocks) for each in ranks)
    is_share = kind == "cpu" and config.pool_sizing is not None  # of the container's limit, which thus is given
    length = arguments.prompt_tokens + (arguments.output_tokens if config.role == "decode" else 0)
    fitting = num_blocks // blocks_for(length, config.block_size)
    return WorkerSize(
        role=config.role,
        num_processes=config.num_processes,
        num_gpus=config.num_processes if kind == "cuda" else 0,
        weights=largest.held,
        largest_step=largest.step,
        kv_per_token=largest.layout.block_bytes // config.block_size,
        handoff_per_token=sum(each.kv_of_all_heads for each in ranks),
        kv_per_block=largest.layout.block_bytes,
        num_blocks=num_blocks,
        pool=pool,
        tokens=num_blocks * config.block_size,
        sequence_tokens=length,
        sequences=min(fitting, config.max_running),
        swap_space=swap,
        request=min(request, total) if is_share else request,
        limit=total if is_share else int(request * LIMIT_OVER_REQUEST),
        shm=shm,
    )


def _ranks_of(config: WorkerConfig, kind: str) -> list[RankSize]:
    from kvrelay.engine.load.model_source import open_source
    from kvrelay.engine.load.rank_size import size_ranks

    source = open_source(
        config.model,
        config.dtype,
        kind,
        config.max_model_len,
        config.load_format,
        config.kv_cache_dtype,
        config.quantization,
    )
    sizing = config.pool_sizing
    whole_prompts = sizing is not None and sizing[3]
    return size_ranks(
        source,
        config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        data_parallel_size=config.data_parallel_size,
        fused_layers=config.fused_layers,
        num_tokens=max(config.token_budget, source.max_model_len) if whole_prompts else config.token_budget,
        num_rows=min(config.max_running, config.token_budget),
    )


def _num_blocks(config: WorkerConfig, rank: RankSize, total: int, kind: str) -> int:
    """As the worker's start does. Raises PoolDoesNotFit, and ValueError for a pool of less than a block."""
    from kvrelay.engine.make import DEFAULT_KV_MEMORY_BYTES, num_blocks_of
    from kvrelay.engine.pool_size import MemoryProfile

    if config.num_blocks is not None:
        return config.num_blocks
    if config.pool_sizing is None:
        return num_blocks_of(rank.layout, config.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES, with_scratch=False)
    resting = rank.held + (BESIDE_ON_GPU if kind == "cuda" else PROCESS_BYTES[kind])
    profile = MemoryProfile(total, resting, rank.step)
    return profile.num_blocks(
        config.pool_sizing[0] / (config.num_processes if kind == "cpu" else 1),
        rank.layout.block_bytes,
        blocks_for(config.token_budget, config.block_size),
        swap_bytes=config.swap_bytes if kind == "cpu" else 0,
    )


def _swap_slots(config: WorkerConfig, rank: RankSize, num_blocks: int) -> int:
    from kvrelay.engine.make import num_swap_slots

    return num_swap_slots(rank.layout, num_blocks, config.swap_bytes)


def _host_bytes(rank: RankSize, kind: str, config: WorkerConfig, num_blocks: int) -> int:
    """The most that a process takes of the host: while it loads, or while it serves."""
    swap = _swap_slots(config, rank, num_blocks) * rank.layout.block_bytes
    serving = 0 if kind == "cuda" else rank.held + rank.step + num_blocks * rank.layout.block_bytes
    return PROCESS_BYTES[kind] + max(rank.loading, serving + swap)


def _shm_bytes(config: WorkerConfig, kind: str) -> int:
    if config.num_processes == 1:
        return 0
    return NCCL_SHM_BYTES if kind == "cuda" else (2 * config.num_processes + 1) * SLOT_BYTES


# -- output -----------------------------------------------------------------------------------------------------------


def _headline(config: WorkerConfig, arguments: argparse.Namespace) -> str:
    where = f"GPU {arguments.gpu}" if arguments.gpu else config.device if config.device != "auto" else "cpu"
    pool = next((name for name in POOL_FIELDS if getattr(config, name)), "")
    sized = f"pools by {pool} = {getattr(config, pool)}" if pool else "pools by the default kv_memory_bytes, 1 GiB"
    if not pool and (arguments.gpu or arguments.memory):
        sized = f"pools by --memory-utilization {MEMORY_SHARE:g}, which workers are to be given"
    return f"{config.model} on {where}, {sized}\n"


def _table(workers: Sequence[WorkerSize]) -> str:
    first = workers[0]
    each = " a rank" if max(worker.num_processes for worker in workers) > 1 else ""
    rows: list[tuple[str, Sequence[str]]] = [
        ("", [worker.role for worker in workers]),
        ("processes", [f"{worker.num_processes}" for worker in workers]),
        (f"weights{each}", [_size(worker.weights) for worker in workers]),
        (f"largest step{each}, about", [_size(worker.largest_step) for worker in workers]),
        (f"KV of a token{each}", [_size(worker.kv_per_token) for worker in workers]),
        (f"KV of a block{each}", [_size(worker.kv_per_block) for worker in workers]),
        (f"pool{each}", [_size(worker.pool) for worker in workers]),
        ("blocks", [f"{worker.num_blocks:,}" for worker in workers]),
        ("tokens", [f"{worker.tokens:,}" for worker in workers]),
        (f"sequences of {first.sequence_tokens:,} and {workers[-1].sequence_tokens:,} tokens", []),
        (f"swap space{each}", [_size(worker.swap_space) for worker in workers]),
        ("host memory: request", [_size(worker.request) for worker in workers]),
        ("host memory: limit", [_size(worker.limit) for worker in workers]),
        ("/dev/shm", [_size(worker.shm) if worker.shm else "-" for worker in workers]),
    ]
    rows = [(name, cells or [f"{worker.sequences:,}" for worker in workers]) for name, cells in rows]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}" + "".join(f"{cell:>12}" for cell in cells) for name, cells in rows)


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}" if num_bytes % size else f"{num_bytes // size:,} {unit}"
    return f"{num_bytes} B"


def _handoffs(per_prompt: int, rate: float | None, device: Device | None) -> str:
    """What a prompt's KV needs, and which transport reaches it."""
    text = f"{per_prompt / 1e6:,.0f} MB a prompt"
    if rate is None:
        return f"{text}; --rate R says the bandwidth that R requests/s need"
    needed = per_prompt * rate
    text = f"{text}, {needed / 1e9:,.2f} GB/s at {rate:g} requests/s: "
    plain, encrypted = f"{ZMQ_BYTES_S / 1e9:g} GB/s", f"{ENCRYPTED_BYTES_S / 1e9:g} GB/s"
    if needed <= ENCRYPTED_BYTES_S:
        return f"{text}any transport carries it, also ZMQ with a CURVE key"
    if needed <= ZMQ_BYTES_S:
        return f"{text}NIXL, or ZMQ without a CURVE key (a pair of workers: {plain}, {encrypted} with one)"
    text += f"NIXL over RDMA (ZMQ: {plain} a pair of workers, {encrypted} with a CURVE key)"
    if device is None:
        return text
    links = math.ceil(needed / (REACHED_LINK * device.link_bytes_s))
    return f"{text}; {links} link{'s' if links > 1 else ''} of {device.link_bytes_s * 8e-9:g} Gbit/s on each side"


def _resources(worker: WorkerSize) -> str:
    """The lines of a container, for Kubernetes."""
    gpus = f', nvidia.com/gpu: "{worker.num_gpus}"' if worker.num_gpus else ""
    request, limit = _quantity(worker.request), _quantity(worker.limit)
    text = f"# {worker.role}\nresources: {{requests: {{memory: {request}}}, limits: {{memory: {limit}{gpus}}}}}"
    return (
        f"{text}\nemptyDir: {{medium: Memory, sizeLimit: {_quantity(worker.shm)}}}  # /dev/shm" if worker.shm else text
    )


def _quantity(num_bytes: int) -> str:
    """As Kubernetes writes it, rounded up."""
    unit, size = ("Gi", GIB) if num_bytes > 8 * GIB else ("Mi", MIB)
    return f"{-(-num_bytes // size)}{unit}"
