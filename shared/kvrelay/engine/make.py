"""Makes a runner: loads the model, sizes the pool for this machine, captures decoding steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from kvrelay.backends.backend import AttentionBackend, KVLayout
from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.integer_weight import Quantization
from kvrelay.engine.load.model_source import LoadFormat, open_source
from kvrelay.engine.memory_need import MemoryNeed
from kvrelay.engine.parallel.model_part import ONE_PROCESS, RankGroups
from kvrelay.engine.pool_size import (
    MemoryGauge,
    MemoryProfile,
    blocks_for_profile,
    make_gauge,
    measure_kept,
    profile_memory,
)
from kvrelay.engine.run.device import use_on_this_thread
from kvrelay.engine.run.graphs import GraphSettings
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.memory.swapping import SWAP_PART
from kvrelay.step.batch import ModelSpec

log = logging.getLogger(__name__)

DEFAULT_KV_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """A share of the machine's memory for this process, swap space included, and the limits of its steps."""

    memory_utilization: float
    token_budget: int
    max_running: int
    whole_prompts: bool = False  # the scheduler does not cut prompts, so a step may be as long as the longest prompt


def make_runner(
    model: str,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    num_blocks: int | None = None,
    memory_bytes: int = DEFAULT_KV_MEMORY_BYTES,
    size_pool: PoolSizing | None = None,
    swap_bytes: int | None = 0,
    max_model_len: int | None = None,
    device: str | torch.device = "cpu",
    num_threads: int | None = None,
    backend: AttentionBackend | None = None,
    load_format: LoadFormat = "auto",
    graphs: GraphSettings | None = None,
    fused_layers: bool = True,
    batch_invariant: bool = False,
    quantization: Quantization = "none",
    ranks: RankGroups = ONE_PROCESS,
) -> TransformersRunner:
    """Loads `model` (a directory or a hub name) and allocates its pool: `num_blocks`, or as many as fit the share of
    memory in `size_pool`, or else `memory_bytes`.

    `kv_cache_dtype` is one of `KV_DTYPES`, or "auto" for the model's dtype. `swap_bytes` is the host's swap space;
    None: a quarter of the pool's memory. Without a `backend`, the fastest one that works is used. With `graphs`,
    decoding steps are captured in CUDA graphs if model and backend allow it; the pool then has a scratch block more.
    `batch_invariant`: see `load_model`.

    With `ranks`, this process loads its rank's part of the model. All ranks call this at the same time, with the same
    arguments but for device and groups, and get the same number of blocks and no graphs. `memory_bytes` and
    `swap_bytes` are each rank's; on CPUs, `size_pool` is the share of all ranks on this machine together.

    Raises UnsupportedModel with the reason; ValueError for an unknown dtype, memory for less than one block, or CUDA
    graphs that the device refuses; PoolDoesNotFit for a share of memory that is too small; MemoryTooSmall for memory
    that does not hold weights and pool; OSError for no such model.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    with ranks.in_agreement():
        source = open_source(model, dtype, device, max_model_len, load_format, kv_cache_dtype, quantization, ranks)
    if ranks.all_ranks is not None and graphs is not None:
        log.info("CUDA graphs are off: they do not capture what ranks send each other")
        graphs = None
    gauge = make_gauge(source.device)
    use_on_this_thread(source.device)
    with ranks.in_agreement():
        need = MemoryNeed.of(source, gauge, fused_layers=fused_layers)
        need.check()
    loaded = load_model(source, block_size, backend, fused_layers=fused_layers, batch_invariant=batch_invariant)
    if num_blocks is None and size_pool is not None:
        num_blocks = _num_blocks_beside(loaded, size_pool, swap_bytes, gauge, graphs)
    with ranks.in_agreement():
        if num_blocks is None:
            num_blocks = num_blocks_of(loaded.layout, memory_bytes, with_scratch=graphs is not None)
    num_blocks = ranks.least(num_blocks)  # the ranks of a pipeline may have blocks of unequal size
    with ranks.in_agreement():
        if max_model_len is not None:
            _check_holds(loaded.layout, num_blocks, source.max_model_len)
        num_slots = num_swap_slots(loaded.layout, num_blocks, swap_bytes)
        need.check(num_blocks * loaded.layout.block_bytes, num_slots * loaded.layout.block_bytes)
    num_slots = ranks.least(num_slots)
    with ranks.in_agreement():
        runner = TransformersRunner(loaded, num_blocks, num_host_slots=num_slots, with_scratch=graphs is not None)
    _warn_of_cut(source.max_model_len, runner.spec)
    if graphs is not None:
        runner.try_graphs(graphs)
    gauge.keep()
    runner.populate()
    return runner


def num_blocks_of(layout: KVLayout, memory_bytes: int, *, with_scratch: bool) -> int:
    """Raises ValueError if that memory does not hold one block, beside the scratch block of CUDA graphs."""
    num_blocks = memory_bytes // layout.block_bytes - with_scratch
    if num_blocks < 1:
        raise ValueError(f"a block takes {layout.block_bytes} bytes, more than the pool's {memory_bytes}")
    return num_blocks


def _check_holds(layout: KVLayout, num_blocks: int, max_model_len: int) -> None:
    """Raises ValueError if the pool is too small for one sequence."""
    block_size, needed = layout.block_size, blocks_for(max_model_len, layout.block_size)
    if num_blocks * block_size < max_model_len:
        raise ValueError(
            f"max_model_len {max_model_len} does not fit the pool: {num_blocks} blocks of {block_size} tokens hold "
            f"{num_blocks * block_size}; it takes {needed} blocks, {needed * layout.block_bytes} bytes"
        )


def _warn_of_cut(max_model_len: int, spec: ModelSpec) -> None:
    """Logs if the pool holds less than the longest sequence of the model."""
    if spec.max_model_len < max_model_len:
        needed = blocks_for(max_model_len, spec.block_size) * spec.block_bytes
        held = f"the pool's {spec.num_blocks} blocks of {spec.block_size}"
        log.warning(
            "max_model_len is cut from %d to %d tokens, which %s hold; it takes %d MiB: raise kv_memory_bytes, "
            "memory_utilization or num_blocks, or set max_model_len",
            max_model_len,
            spec.max_model_len,
            held,
            -(-needed >> 20),
        )


def num_swap_slots(layout: KVLayout, num_blocks: int, swap_bytes: int | None) -> int:
    """Raises ValueError if swap space is asked for that does not hold one block."""
    num_slots = num_blocks // SWAP_PART if swap_bytes is None else swap_bytes // layout.block_bytes
    if swap_bytes and not num_slots:
        raise ValueError(
            f"swap_space = {swap_bytes}: a block takes {layout.block_bytes} bytes (allowed: 0, or at least that)"
        )
    return num_slots


def _profile(model: CausalModel, sizing: PoolSizing, gauge: MemoryGauge, graphs: GraphSettings | None) -> MemoryProfile:
    """Runs the largest step on a small pool."""
    num_tokens = sizing.token_budget
    if sizing.whole_prompts:
        num_tokens = max(num_tokens, model.source.max_model_len)
    small = TransformersRunner(model, blocks_for_profile(num_tokens, sizing.max_running, model.layout.block_size))
    small.pool.zero_()  # so that its pages rest, and are not the step's
    profile = profile_memory(small, num_tokens, sizing.max_running, gauge)
    # The profiled pool is freed, while the memory of libraries remains.
    most = profile.resting + profile.step - small.pool.nbytes
    del small
    resting = gauge.rest()
    profile = replace(profile, resting=resting, step=max(0, most - resting), free=gauge.free())
    if graphs is not None:
        profile = replace(profile, graphs=_graph_bytes(model, graphs, gauge))
    return profile


def _num_blocks_beside(
    model: CausalModel, sizing: PoolSizing, swap_bytes: int | None, gauge: MemoryGauge, graphs: GraphSettings | None
) -> int:
    """The blocks that fit beside weights and the largest step, which is run. Raises PoolDoesNotFit, on all ranks."""
    profile = _profile(model, sizing, gauge, graphs)
    block_size, block_bytes, group = model.layout.block_size, model.layout.block_bytes, model.source.ranks.all_ranks
    is_cpu = model.source.device.type == "cpu"
    # Ranks on CPUs share the memory of one machine.
    share = sizing.memory_utilization / (group.size if is_cpu and group is not None else 1)
    with model.source.ranks.in_agreement():
        profile.check_free(share)
        num_blocks = profile.num_blocks(
            share,
            block_bytes,
            blocks_for(sizing.token_budget, block_size),
            swap_bytes=swap_bytes if is_cpu else 0,  # a GPU's pool swaps to the host's memory: not counted here
        )
    log.info(
        "memory: %d MiB with the weights, %d MiB for the largest step, %d MiB for CUDA graphs, %d MiB for the pool, "
        "of %d MiB",
        profile.resting >> 20,
        profile.step >> 20,
        profile.graphs >> 20,
        num_blocks * block_bytes >> 20,
        profile.total >> 20,
    )
    return num_blocks


def _graph_bytes(model: CausalModel, graphs: GraphSettings, gauge: MemoryGauge) -> int:
    """The bytes that graphs keep, with their scratch block. Captures them over a temporary pool to measure that."""
    trial = TransformersRunner(model, 1, with_scratch=True)
    return measure_kept(lambda: trial.try_graphs(graphs, trial=True), gauge) + model.layout.block_bytes
