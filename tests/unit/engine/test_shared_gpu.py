"""Processes that start on one GPU at the same time: each gets the pool that it would get alone, or is refused."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.config import WorkerConfig
from kvrelay.engine import make, memory_need, pool_size
from kvrelay.engine.parallel.model_part import ONE_PROCESS
from kvrelay.engine.pool_size import CudaGauge, PoolDoesNotFit
from kvrelay.worker.worker_main import load_runner
from tests.fakes.baton import Baton
from tests.fakes.fake_gpu import MIB, FakeGpu, FakeMemory
from tests.fakes.hash_runner import HashRunner
from tests.thoroughness import examples

BLOCK_BYTES = MIB
CONTEXT_MIB = 50


@dataclass(frozen=True)
class Needs:
    """Of one process, in MiB; `share` of the GPU."""

    share: float
    weights: int = 100
    step: int = 60
    libraries: int = 20  # which the first step loads
    graphs: int = 0  # of all sizes; None are captured without


NEEDS = st.builds(Needs, st.sampled_from([0.17, 0.2, 0.25]), st.integers(1, 60), st.integers(0, 40), st.integers(0, 20))


class Pool(HashRunner):
    """Its pool, and what its steps take, lie on the fake GPU."""

    follows = False

    def __init__(self, model: Any, num_blocks: int, *_: Any, with_scratch: bool = False, **__: Any) -> None:
        super().__init__(num_blocks=num_blocks, max_model_len=10**6)
        self.memory: FakeMemory = model.memory
        self.needs: Needs = model.needs
        self._loaded = False
        self.with_scratch = with_scratch
        self.graphs = 0
        self.pool = SimpleNamespace(nbytes=(num_blocks + with_scratch) * BLOCK_BYTES, zero_=lambda: None)
        self.memory.allocate(self.pool.nbytes)

    def __del__(self) -> None:
        self.memory.release(self.pool.nbytes + self.graphs)

    def prepare_grammars(self) -> None:
        pass

    def populate(self) -> None:
        pass

    def try_graphs(self, graphs: Any, *, trial: bool = False) -> None:
        assert self.with_scratch
        assert graphs.sizes == (1, 2, 4, 8, 16, 24, 32)
        self.graphs = self.needs.graphs * MIB
        self.memory.allocate(self.graphs)
        if not trial:
            self.memory.allocate(25 * MIB)  # they are checked, by steps that are not the largest
            self.memory.release(25 * MIB)

    def execute(self, batch: Any) -> Any:
        if not self._loaded:
            self.memory.load_library(self.needs.libraries * MIB)
            self._loaded = True
        self.memory.allocate(self.needs.step * MIB)
        self.memory.release(self.needs.step * MIB)
        return super().execute(batch)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


class World:
    """`load_runner` as it is, on fake GPUs: `start` runs it for one process, in whatever thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self._now = threading.local()
        monkeypatch.setenv("KVRELAY_CACHE_DIR", str(directory))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(pool_size, "device_uuid", lambda _: "GPU-0")
        monkeypatch.setattr(pool_size, "gc", SimpleNamespace(collect=lambda: None))  # takes long beside all of torch
        monkeypatch.setattr(pool_size, "pause", lambda _: self._now.memory.moment())
        source = SimpleNamespace(device=torch.device("cuda", 0), max_model_len=512, config=None, ranks=ONE_PROCESS)
        monkeypatch.setattr(make, "open_source", lambda *_: source)
        monkeypatch.setattr(make, "make_gauge", lambda _: CudaGauge(self._now.memory))
        monkeypatch.setattr(make, "load_model", lambda *_, **__: self._load(source))
        monkeypatch.setattr(make, "TransformersRunner", Pool)
        monkeypatch.setattr(memory_need, "least_bytes", lambda *_, **__: 0)
        monkeypatch.setattr(make, "use_on_this_thread", lambda _: None)

    def start(self, memory: FakeMemory, needs: Needs) -> Pool:
        self._now.memory, self._now.needs = memory, needs
        config = WorkerConfig(
            model="org/model",
            role="decode",
            device="cuda",
            memory_utilization=needs.share,
            token_budget=32,
            max_running=4,
            cuda_graphs=needs.graphs > 0,
            preemption="recompute",
        )
        made = load_runner(config)
        assert isinstance(made, Pool)
        return made

    def _load(self, source: Any) -> Any:
        memory, needs = self._now.memory, self._now.needs
        memory.allocate(needs.weights * MIB)
        layout = SimpleNamespace(block_size=16, block_bytes=BLOCK_BYTES)
        return SimpleNamespace(layout=layout, source=source, memory=memory, needs=needs)


def _memory(gpu: FakeGpu, **how: Any) -> FakeMemory:
    memory = FakeMemory(gpu, CONTEXT_MIB, **how)
    memory.moment = gpu.moment  # type: ignore[attr-defined]
    return memory


def test_alone_a_process_takes_its_share_and_no_more(world: World) -> None:
    gpu = FakeGpu(1000, lambda: None)
    memory = _memory(gpu)
    made = world.start(memory, Needs(0.5))
    assert made.spec.num_blocks == 500 - CONTEXT_MIB - 100 - 60 - 20
    assert memory.process.taken == gpu.used == 500 * MIB, "what its largest step takes is held already"
    made.memory.allocate(60 * MIB)
    assert gpu.used == 500 * MIB


def test_graphs_and_their_scratch_block_are_part_of_the_share(world: World) -> None:
    gpu = FakeGpu(1000, lambda: None)
    memory = _memory(gpu)
    made = world.start(memory, Needs(0.5, graphs=30))
    assert made.spec.num_blocks == 500 - CONTEXT_MIB - 100 - 60 - 20 - 30 - 1
    assert memory.process.taken == gpu.used == 500 * MIB


def test_without_nvml_the_context_is_not_counted(world: World) -> None:
    gpu = FakeGpu(1000, lambda: None)
    made = world.start(_memory(gpu, counts_context=False), Needs(0.5))
    assert made.spec.num_blocks == 500 - 100 - 60 - 20
    assert gpu.used == (500 + CONTEXT_MIB) * MIB


def test_a_share_that_others_have_taken_is_refused_with_the_numbers(world: World) -> None:
    gpu = FakeGpu(1000, lambda: None)
    _memory(gpu).allocate(300 * MIB)  # and a context
    with pytest.raises(
        PoolDoesNotFit, match=r"0\.8 of 1000 MiB is 800 MiB; this process takes 170 MiB .* other 630 MiB only 480 MiB"
    ):
        world.start(_memory(gpu), Needs(0.8))


def test_what_is_taken_while_the_pool_is_made_is_refused_too(world: World) -> None:
    """By a process that takes no turns."""
    gpu = FakeGpu(1000, lambda: None)
    foreign, memory = _memory(gpu), _memory(gpu)

    def greedy() -> None:
        if memory.process.tensors > 400 * MIB and not foreign.process.taken:
            gpu.moment = lambda: None
            foreign.allocate(gpu.total - gpu.used - CONTEXT_MIB * MIB)

    gpu.moment = greedy
    with pytest.raises(PoolDoesNotFit, match="largest step takes 60 MiB of GPU memory, but another process took it"):
        world.start(memory, Needs(0.9))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    needs=st.lists(NEEDS, min_size=2, max_size=3),
    num_lives=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    order=st.integers(0, 2**32),
)
def test_in_any_order_each_gets_what_it_would_get_alone(
    world: World, needs: list[Needs], num_lives: list[int], order: int
) -> None:
    """Some end and come again; others run steps meanwhile. Who ends may hide what another takes beside torch."""
    num_lives = num_lives[: len(needs)]
    anybody_ends = max(num_lives) > 1
    alone = [world.start(_memory(FakeGpu(1000, lambda: None)), each).spec.num_blocks for each in needs]
    baton = Baton()
    gpu = FakeGpu(1000, baton.step)
    made: dict[int, Pool] = {}

    def life(number: int) -> Callable[[], None]:
        def run() -> None:
            for left in reversed(range(num_lives[number])):
                memory = _memory(gpu)
                made[number] = world.start(memory, needs[number])
                for _ in range(2):
                    memory.allocate(needs[number].step * MIB)
                    memory.release(needs[number].step * MIB)
                hidden = CONTEXT_MIB + needs[number].libraries if anybody_ends else 0
                assert memory.process.taken <= needs[number].share * gpu.total + hidden * MIB
                if left:
                    del made[number]
                    memory.end()

        return run

    baton.run([life(number) for number in range(len(needs))], random.Random(order).randrange)
    assert not baton.errors
    for number, pool in made.items():
        assert pool.spec.num_blocks >= alone[number], "nobody's growth is taken for another's"
        if not anybody_ends:
            assert pool.spec.num_blocks == alone[number]
    assert gpu.used <= gpu.total
