"""Groups of ranks, on threads of the test's process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.parallel import group_coordinator, shared_memory
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator, GroupNotFormed, RankLost
from kvrelay.engine.parallel.shared_memory import SharedMemory, SharedMemoryUnusable
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.process import HeldPort
from tests.fakes.waiting import PATIENCE_S


def free_address() -> tuple[str, int]:
    with HeldPort() as held:
        return "127.0.0.1", held.port


def run_ranks(size: int, work: Callable[[GroupCoordinator], Any]) -> list[Any]:
    """What `work` returned or raised on each rank."""
    address = free_address()

    def rank(number: int) -> Any:
        return work(GroupCoordinator.connect(number, size, address, PATIENCE_S))

    with ThreadPoolExecutor(size) as pool:
        futures: list[Future[Any]] = [pool.submit(rank, number) for number in range(size)]
        return [future.exception() or future.result() for future in futures]


@pytest.fixture(autouse=True, params=["shared memory", "small slots", "gloo", "one rank cannot share"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the ranks talk; all tests run with each."""
    means: str = request.param
    if means == "small slots":
        monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 128)
    if means == "gloo":
        monkeypatch.setattr(group_coordinator, "share_memory", lambda *_: None)
    if means == "one rank cannot share":
        open_file = SharedMemory.__init__

        def init(self: SharedMemory, path: Path, rank: int, size: int) -> None:
            if rank == 1:
                raise SharedMemoryUnusable("no such file")
            open_file(self, path, rank, size)

        monkeypatch.setattr(SharedMemory, "__init__", init)
    return means


def test_ranks_share_memory_if_all_can(means: str) -> None:
    def work(group: GroupCoordinator) -> bool:
        if group._shared is not None and group.rank == 0:
            assert not Path(str(group._shared._file.name)).exists(), "the file outlives its ranks"
        return group._shared is not None

    assert run_ranks(3, work) == [means in ("shared memory", "small slots")] * 3


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_add_in_float32_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    shapes = [(1, 1), (3, 7), (2, 5, 64), (1, 4099)]
    generator = torch.Generator().manual_seed(0)
    parts = {shape: torch.randn(size, *shape, generator=generator).to(dtype) for shape in shapes}

    def work(group: GroupCoordinator) -> list[torch.Tensor]:
        own = [parts[shape][group.rank].clone() for shape in shapes]
        for tensor in own:
            group.all_reduce(tensor)
        return own

    results = run_ranks(size, work)
    for shape, *sums in zip(shapes, *results, strict=True):
        expected = parts[shape][0].float()
        for part in parts[shape][1:]:
            expected += part
        assert all(torch.equal(each, expected.to(dtype)) for each in sums)


def test_columns_are_gathered_in_the_order_of_the_ranks() -> None:
    whole = torch.randn(3, 12)

    def work(group: GroupCoordinator) -> tuple[Any, Any, int]:
        part = whole[:, 4 * group.rank : 4 * group.rank + 4]
        return group.gather_columns(part), group.gather_columns(part, to_all=True), group.least(7 - group.rank)

    results = run_ranks(3, work)
    for rank, (gathered, everywhere, least) in enumerate(results):
        assert torch.equal(gathered, whole) if rank == 0 else gathered is None
        assert torch.equal(everywhere, whole)
        assert least == 5


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def work(group: GroupCoordinator) -> str:
        with group.in_agreement():
            pass
        try:
            with group.in_agreement():
                if group.rank == 1:
                    raise ValueError("no such größe")
        except ValueError as error:
            assert group.least(group.rank) == 0  # still in step
            return f"{type(error).__name__}: {error}"
        return "no error"

    other = "UnsupportedModel: rank 1 of 3: no such größe"
    assert run_ranks(3, work) == [other, "ValueError: no such größe", other]
    assert issubclass(UnsupportedModel, ValueError)


def test_a_rank_that_leaves_is_lost_to_the_others() -> None:
    def work(group: GroupCoordinator) -> None:
        if group.rank == 1:
            group.close()
        group.all_reduce(torch.zeros(10))

    assert [type(error) for error in run_ranks(2, work)] == [RankLost, RankLost]


def test_neighbouring_ranks_are_a_group_of_their_own() -> None:
    def work(group: GroupCoordinator) -> Any:
        with pytest.raises(ValueError, match="a group of 4 ranks does not divide into groups of 3"):
            group.divide(3)
        part = group.divide(2)
        ranks = torch.tensor([group.rank])
        part.all_reduce(ranks)  # while the other part may do nothing
        everywhere = torch.ones(1)
        group.all_reduce(everywhere)
        if group.rank == 3:
            group.leave()
            with pytest.raises(RankLost, match="rank 1 of 2 has left"):
                part.all_reduce(torch.ones(1))
        if group.rank < 2:
            part.all_reduce(everywhere)
        group.close()
        with pytest.raises(RankLost):
            part.all_reduce(torch.ones(1))
        return part.rank, part.size, int(ranks), int(everywhere)

    assert run_ranks(4, work) == [(0, 2, 1, 8), (1, 2, 1, 8), (0, 2, 5, 4), (1, 2, 5, 4)]


def test_ranks_that_never_come_are_named() -> None:
    address = free_address()
    with pytest.raises(GroupNotFormed, match=r"of 3 ranks, 1, 2 did not come to .* within 0.3 s"):
        GroupCoordinator.connect(0, 3, address, 0.3)
    with pytest.raises(GroupNotFormed, match=r"rank 1 found no rank 0 at 127.0.0.1:\d+ within 0.3 s"):
        GroupCoordinator.connect(1, 3, address, 0.3)


def test_two_ranks_of_one_number_are_refused() -> None:
    address = free_address()

    def work(number: int) -> Any:
        return GroupCoordinator.connect(number, 3, address, 1.0)

    with ThreadPoolExecutor(3) as pool:
        errors = [pool.submit(work, number).exception for number in (0, 1, 1)]
        assert "there is a rank 1 at" in " ".join(str(error()) for error in errors)


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(GroupNotFormed, match=rf"cannot listen on 127.0.0.1:{port}: .*in use"):
            GroupCoordinator.connect(0, 2, ("127.0.0.1", port), 1.0)


def test_a_rank_that_the_group_does_not_have_is_refused() -> None:
    address = free_address()

    def work(number: int) -> Any:
        return GroupCoordinator.connect(number, 2, address, 1.0)

    with ThreadPoolExecutor(2) as pool:
        errors = [pool.submit(work, number).exception for number in (0, 2)]
        assert "there is no rank 2 in a group of 2 (allowed: 1 to 1)" in str(errors[1]())
