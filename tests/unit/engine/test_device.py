"""Devices: which is taken, what an error of one is for requests, and its pool as transports see it."""

from __future__ import annotations

import threading
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.run.block_copies import DevicePool
from kvrelay.engine.run.device import (
    HostCopy,
    describe_device,
    device_uuid,
    find_device,
    is_settled,
    start_copy,
    to_host,
    use_on_this_thread,
)
from kvrelay.engine.sample.logprobs import BadLogits
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.step.batch import DeviceLost, RowsFailed, failure_kind
from tests.fakes.late_copies import LateCopies
from tests.fakes.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("name", "num_gpus", "expected"),
    [("auto", 2, "cpu"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda:0"), ("cuda", 1, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_what_a_name_stands_for(name: str, num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert find_device(name) == torch.device(expected)


@pytest.mark.parametrize(("name", "num_gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_is_refused(name: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ValueError, match=f"device = {name}: torch finds .*allowed: auto, cpu"):
        find_device(name)


def test_columns_come_back_exactly() -> None:
    ids, peaks = to_host(torch.tensor([2**52, 7]), torch.tensor([0.1, float("nan")]))
    assert ids.astype(np.int64).tolist() == [2**52, 7]
    assert peaks[0] == np.float32(0.1)
    assert np.isnan(peaks[1])


@pytest.mark.parametrize("num_columns", [0, 3])
def test_vectors_and_matrices_come_back_in_one_copy(num_columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies(monkeypatch)
    matrix, vector = torch.arange(2 * num_columns).view(2, num_columns), torch.tensor([2**52, 7])
    copy = HostCopy(matrix, vector, matrix + 9)
    assert copies.num_started == 1 and not copies.landed
    first, second, third = copy.read()
    assert first.tolist() == matrix.tolist() and third.tolist() == (matrix + 9).tolist()
    assert second.astype(np.int64).tolist() == [2**52, 7]


def test_a_copy_from_a_gpu_has_pinned_memory_of_its_own_and_an_event_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Host:
        def copy_(self, source: object, *, non_blocking: bool) -> None:
            assert source is there and non_blocking
            done.append("copy")

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking, "a waiting thread would spin"

        def record(self, stream: str) -> None:
            done.append(f"event on {stream}")

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> Host:
        assert (shape, dtype, pin_memory) == ((2, 3), torch.float64, True)
        return Host()

    there = cast("torch.Tensor", SimpleNamespace(device=torch.device("cuda", 1), shape=(2, 3), dtype=torch.float64))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    hosts = [start_copy(there)[0] for _ in range(2)]
    assert done == ["copy", "event on the stream of cuda:1"] * 2
    assert hosts[0] is not hosts[1]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", "GPU-of-cuda"),
        ("", "GPU-of-cuda"),
        ("GPU-5c89852c", "GPU-of-cuda"),  # cut short
        ("GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"),
        ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"),
    ],
)
def test_a_uuid_comes_from_the_environment_where_that_has_it(
    visible: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="of-cuda"))
    assert device_uuid(torch.device("cuda", 0)) == expected


def test_a_thread_that_uses_a_gpu_has_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each thread, and for each GPU that it goes over to."""
    made: list[tuple[int, str]] = []
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))

    def zeros(size: int, device: torch.device) -> None:
        assert current.device == device
        made.append((threading.get_ident(), str(device)))

    monkeypatch.setattr(torch, "zeros", zeros)

    both = threading.Barrier(2)

    def use() -> None:
        for name in ("cpu", "cuda:1", "cuda:1", "cuda:0"):
            use_on_this_thread(torch.device(name))
        both.wait(PATIENCE_S)  # while both live, their idents differ

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for thread in threads:
        assert [name for ident, name in made if ident == thread.ident] == ["cuda:1", "cuda:0"]


def test_a_gpu_is_named_with_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    named = describe_device(torch.device("cuda", 0))
    assert named == "NVIDIA H100 (MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)"
    assert describe_device(torch.device("cpu")) == "cpu"


def test_a_gpu_that_gives_an_error_for_good_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert is_settled(gpu)

    def fail(_: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert not is_settled(gpu)
    assert is_settled(torch.device("cpu"))


# -- what an error of a step is for the requests in it ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadLogits([("r", 1, 0)]), FailureKind.BAD_LOGITS),
        (RowsFailed("no", [("r", 1, 0)]), FailureKind.ENGINE_ERROR),
        (DeviceLost("GPU 0"), FailureKind.DEVICE_LOST),
        (torch.OutOfMemoryError("no memory"), FailureKind.OUT_OF_MEMORY),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("anything else"), FailureKind.ENGINE_ERROR),
    ],
)
def test_kinds(error: Exception, kind: FailureKind) -> None:
    assert failure_kind(error) is kind


def test_memory_that_torch_finds_too_little_of_on_a_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert failure_kind(caught.value) is FailureKind.OUT_OF_MEMORY


# -- a device's pool as transports see it, on the cpu ----------------------------------------------------------------


NUM_BLOCKS = 7


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    st.integers(1, 24),
    st.integers(0, 3),
    st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True),
    st.randoms(use_true_random=False),
)
def test_blocks_are_gathered_and_scattered_as_an_array_s(
    dtype: torch.dtype, elements: int, skipped: int, blocks: list[int], random: Random
) -> None:
    """Also of a pool that does not begin where its memory does."""
    num_bytes = NUM_BLOCKS * elements * dtype.itemsize
    memory = torch.tensor([random.randint(0, 255) for _ in range(num_bytes + skipped * dtype.itemsize)]).to(torch.uint8)
    pool = memory.view(dtype)[skipped:].view(NUM_BLOCKS, elements)
    array = pool.view(torch.uint8).view(NUM_BLOCKS, -1).numpy().copy()
    device_pool, ids = DevicePool(pool), np.array(blocks, np.int64)
    assert (device_pool.num_blocks, device_pool.block_bytes) == array.shape
    assert device_pool.address == pool.data_ptr()
    out = device_pool.buffer(len(blocks) + 1)
    device_pool.gather(ids, out)
    assert np.array_equal(out[: len(blocks)], array[ids])
    assert [row.tolist() for row in device_pool.rows(ids)] == array[ids].tolist()
    rows = array[ids][::-1]
    device_pool.scatter(ids, rows)
    array[ids] = rows
    assert np.array_equal(pool.view(torch.uint8).view(NUM_BLOCKS, -1).numpy(), array)
