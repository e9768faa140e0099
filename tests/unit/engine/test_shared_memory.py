"""A rank that ends behind a collective has done its part in it."""

from __future__ import annotations

import pytest
import torch

from kvrelay.engine.parallel.shared_memory import RankEnded, SharedMemory, _make_file


@pytest.fixture
def ranks() -> tuple[SharedMemory, SharedMemory]:
    path = _make_file(2)
    try:
        return SharedMemory(path, 0, 2), SharedMemory(path, 1, 2)
    finally:
        path.unlink()


def test_a_rank_that_ends_behind_its_part_is_not_lost(ranks: tuple[SharedMemory, SharedMemory]) -> None:
    """It does so after the other one looked for its part, and before that one looks whether it lives."""
    waiting, ending = ranks
    own, others = torch.tensor([1, 2]), torch.tensor([3, 4])

    def end() -> None:
        ending.gather(others, lambda: None, is_wanted=True)
        ending.close()

    parts = waiting.gather(own, end, is_wanted=True)
    assert [part.tolist() for part in parts] == [[1, 2], [3, 4]]
    with pytest.raises(RankEnded, match="rank 1"):
        waiting.gather(own, lambda: None, is_wanted=True)


def test_a_rank_that_ends_before_its_part_is_lost(ranks: tuple[SharedMemory, SharedMemory]) -> None:
    waiting, ending = ranks
    with pytest.raises(RankEnded, match="rank 1"):
        waiting.gather(torch.tensor([1, 2]), ending.close, is_wanted=True)
    with pytest.raises(RankEnded, match="rank 1"):
        waiting.all_reduce(torch.ones(3), lambda: None)
