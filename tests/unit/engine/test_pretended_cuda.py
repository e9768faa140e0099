"""The pretended CUDA device notices what goes wrong on a real one: so tests that pass on it say something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch

from kvrelay.backends import flashinfer_kernels
from kvrelay.backends.backend import AttentionParams, PackedRows
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.engine.run.block_copies import DevicePool
from kvrelay.engine.run.device import start_copy, to_device
from tests.fakes import pretended_flashinfer
from tests.fakes.pretended_cuda import NO_PRETENCE, DeviceTensor, Machine, pretend_cuda

pytestmark = [pytest.mark.unit, pytest.mark.skipif(bool(NO_PRETENCE), reason=NO_PRETENCE)]
GPU = torch.device("cuda", 0)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with pretend_cuda(Machine(2)) as found:
        yield found


def numbers(count: int = 8) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32, device=GPU)


def test_what_is_read_before_its_copy_is_there_is_spoilt(machine: Machine) -> None:
    host, landed = start_copy(numbers() + 1)
    assert landed is not None and not landed.query()
    assert host.isnan().all()
    landed.synchronize()
    assert host.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_pinned_memory_that_is_written_to_before_it_is_copied_is_a_fault(machine: Machine) -> None:
    host = torch.zeros(4, pin_memory=True)
    there = host.to(GPU, non_blocking=True)
    host.fill_(1)
    assert there.tolist() == [1, 1, 1, 1]
    assert len(machine.faults) == 1 and "before its copy" in machine.faults[0]
    machine.faults.clear()


def test_memory_that_is_not_pinned_may_be_written_to(machine: Machine) -> None:
    host = torch.zeros(4)
    there = host.to(GPU, non_blocking=True)
    host.fill_(1)
    assert there.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("waits", [False, True])
def test_streams_are_ordered_by_nothing_but_waits(machine: Machine, waits: bool) -> None:
    made, side = numbers(), torch.cuda.Stream(GPU)
    if waits:
        side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        doubled = made * 2
    torch.cuda.current_stream(GPU).wait_stream(side)  # it is not freed before
    side.synchronize()
    assert isinstance(doubled, DeviceTensor)
    assert doubled.data_there.isnan().all() == (not waits)


@pytest.mark.parametrize("way", ["recorded", "waited for", "neither"])
def test_memory_that_goes_while_another_stream_uses_it_is_a_fault(machine: Machine, way: str) -> None:
    made, side, main = numbers(), torch.cuda.Stream(GPU), torch.cuda.current_stream(GPU)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        made.add_(1)
    if way == "recorded":
        made.record_stream(side)
    if way == "waited for":
        main.wait_stream(side)
    del made
    assert bool(machine.faults) == (way == "neither")
    machine.faults.clear()


def test_devices_do_not_mix(machine: Machine) -> None:
    there, here = numbers(), torch.zeros(8)
    assert (there + torch.tensor(1.0)).tolist()[0] == 1, "a lone number goes along"
    mixed: list[Callable[[], object]] = [
        lambda: there + here,
        lambda: there + here.to("cuda:1"),
        lambda: here[there.long()],
    ]
    for op in mixed:
        with pytest.raises(RuntimeError, match="same device"):
            op()
    with pytest.raises(TypeError, match="can't convert cuda"):
        there.numpy()


def set_by_index(tensor: torch.Tensor) -> None:
    tensor[to_device(np.array([1]), GPU)] = -1.0


def copy_out(tensor: torch.Tensor) -> None:
    torch.empty(8, pin_memory=True).copy_(tensor, non_blocking=True)


@pytest.mark.parametrize(
    ("what", "op"),
    [
        ("item", lambda x: float(x.sum())),
        ("copy to the host", lambda x: x.cpu()),
        ("copy to memory that is not pinned", lambda x: torch.empty(8).copy_(x, non_blocking=True)),
        ("copy", lambda x: x.copy_(torch.zeros(8))),
        ("copy", lambda x: torch.tensor([1, 2], device=GPU)),
        ("index", lambda x: x[x > 1]),
        ("copy of what index is given on the host", lambda x: x[[1, 2]]),
        ("copy of what index_put_ is given on the host", set_by_index),
        ("nonzero", lambda x: x.nonzero()),
        ("", copy_out),
        ("", lambda x: x.index_fill_(0, to_device(np.array([1]), GPU), -1.0)),
        ("", lambda x: torch.where(x > 1, x, 0.0).masked_fill(x > 2, 5).softmax(-1)),
    ],
)
def test_waits_that_hide_are_seen(machine: Machine, what: str, op: Callable[[torch.Tensor], object]) -> None:
    tensor = numbers()
    op(tensor)
    assert [(wait.what, wait.asked) for wait in machine.waits] == ([(what, False)] if what else [])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    if what:
        with pytest.raises(RuntimeError, match="synchronizing"):
            op(numbers())


def test_a_graph_runs_over_what_its_buffers_hold_then(machine: Machine) -> None:
    given, taken = numbers(), torch.zeros(8, device=GPU)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(GPU)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        float(given.sum())
    with torch.cuda.graph(graph, stream=stream):
        taken.copy_(given * 2 + 1)
    assert taken.tolist() == [0] * 8, "a capture runs nothing"
    for start in (3, 7):
        given.copy_(numbers() + start)
        graph.replay()
        assert taken.tolist() == [2 * (start + i) + 1 for i in range(8)]


def test_after_a_kernel_failed_nothing_works(machine: Machine) -> None:
    numbers().index_select(0, torch.full((1,), 100, device=GPU))
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        torch.cuda.synchronize()
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        torch.zeros(1, device=GPU)


# -- faults that kvrelay could have -----------------------------------------------------------------------------------


def test_a_pool_that_does_not_wait_for_its_copies_gives_other_bytes(machine: Machine) -> None:
    content = np.random.default_rng(0).integers(0, 256, (6, 64)).astype(np.uint8)
    pool = DevicePool(torch.from_numpy(content).to(GPU))
    blocks = np.array([4, 1])
    out = pool.buffer(2)
    with patch.object(DevicePool, "_wait"):
        pool.gather(blocks, out)
    assert not (out == content[blocks]).all()
    torch.cuda.synchronize()
    pool.gather(blocks, out)
    assert (out == content[blocks]).all()


@pytest.mark.parametrize("awaits", [True, False])
def test_a_plan_that_overwrites_one_which_is_not_there_yet_is_noticed(machine: Machine, awaits: bool) -> None:
    with patch.object(flashinfer_kernels, "workspace_bytes", lambda *_: 1 << 20):
        backend = FlashInferBackend(GPU, pretended_flashinfer)
        pool = torch.zeros(8, 1, 2, 2, 16, 64, dtype=torch.bfloat16, device=GPU)
        if not awaits:
            backend.kernels.await_planned = lambda: None  # type: ignore[method-assign]
        for position in (3, 40):
            rows = PackedRows(np.ones(1, np.int32), np.array([position], np.int32), np.array([[2, 3, 4]], np.int32))
            query, key, value = torch.ones(3, 1, 2, 64, dtype=torch.bfloat16, device=GPU)
            backend.plan(pool, rows).attend(0, query, key, value, AttentionParams(0.1))
        if awaits:
            torch.cuda.synchronize()
            return
        with pytest.raises(torch.AcceleratorError, match="the plan is of another step"):
            torch.cuda.synchronize()
        machine.faults.clear()
