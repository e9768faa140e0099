"""The identity of numerics: equal where outputs have equal bits, and of what it depends."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from kvrelay.backends import cpu_build
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.fused.forward import FusedForward
from kvrelay.engine.load import causal_model
from kvrelay.engine.load.causal_model import CausalModel, load_model, numerics_of, spec_of
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.model_part import PartPlan, RankGroups
from kvrelay.engine.parallel.pipeline import StagePlan
from kvrelay.engine.parallel.shard_plan import ShardPlan

DirectoryOf = Callable[[str], Path]


def load(model_dir: DirectoryOf, *, fused_layers: bool = True, block_size: int = 16) -> CausalModel:
    return load_model(open_source(str(model_dir("llama")), "bfloat16"), block_size, fused_layers=fused_layers)


@pytest.fixture(scope="module")
def fused(model_dir: DirectoryOf) -> CausalModel:
    model = load(model_dir)
    assert isinstance(model.forward, FusedForward)
    return model


class Ranks:
    """Of a group that sums through memory that it shares, or through a library."""

    def __init__(self, *, shares_memory: bool) -> None:
        self.shares_memory = shares_memory


def with_ranks(model: CausalModel, *, shares_memory: bool) -> CausalModel:
    group = cast("GroupCoordinator", Ranks(shares_memory=shares_memory))
    return replace(model, source=replace(model.source, ranks=RankGroups(tensor_parallel=group)))


class Shards:
    """A division among `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size = self.num_stages = size


def test_workers_of_one_installation_have_one_id_whatever_their_pools_threads_and_paths(
    model_dir: DirectoryOf, fused: CausalModel, tmp_path: Path
) -> None:
    expected = numerics_of(fused)
    assert len(expected) == 8 and set(expected) <= set(string.hexdigits)
    moved = tmp_path / "elsewhere"
    moved.symlink_to(model_dir("llama"))
    torch.set_num_threads(2)
    try:
        other = load(lambda _: moved, block_size=32)
    finally:
        torch.set_num_threads(1)
    for num_blocks in (8, 64):
        assert spec_of(other, num_blocks, 0, 0.0).numerics == expected


def test_whatever_changes_bits_changes_the_id(
    model_dir: DirectoryOf, fused: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, layout, part = fused.source, fused.layout, fused.part
    shards = cast("ShardPlan", Shards(2))
    invariant = TorchBackend()
    invariant.batch_invariant = True
    others = [
        load(model_dir, fused_layers=False),
        replace(fused, backend=TorchBackend()),
        replace(fused, backend=invariant),
        replace(fused, layout=replace(layout, dtype=torch.float32)),
        replace(fused, layout=replace(layout, stored=torch.float8_e4m3fn)),
        replace(fused, layout=replace(layout, stored=torch.float8_e5m2)),
        *(replace(fused, source=replace(source, quantization=each)) for each in ("int8", "int4")),
        replace(fused, part=replace(part, shards=shards)),
        replace(fused, part=replace(part, shards=cast("ShardPlan", Shards(4)))),
        replace(fused, part=PartPlan(mlps=shards)),
        replace(fused, part=replace(part, stage=cast("StagePlan", Shards(2)))),
        with_ranks(fused, shares_memory=False),
    ]
    ids = [numerics_of(fused), *map(numerics_of, others)]
    monkeypatch.setattr(FusedForward, "instructions", "another path")
    ids.append(numerics_of(fused))
    monkeypatch.setattr(causal_model, "kernel_key", lambda: "another kernel")
    ids.append(numerics_of(fused))
    monkeypatch.setattr(torch, "__version__", "another torch")
    ids.append(numerics_of(fused))
    assert len(set(ids)) == len(ids)


def test_sums_in_shared_memory_need_no_mark(fused: CausalModel) -> None:
    assert numerics_of(with_ranks(fused, shares_memory=True)) == numerics_of(fused)


def test_the_key_of_the_kernel_names_the_file_that_is_loaded() -> None:
    assert cpu_build.load_kernel()._name == str(cpu_build.cache_dir() / f"cpu_kernel-{cpu_build.kernel_key()}.so")
