"""Runs of free blocks, against a plain set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.free_runs import FreeRuns


def runs_of(free: set[int]) -> list[tuple[int, int]]:
    """Maximal runs of neighbours, (start, length)."""
    starts = sorted(block for block in free if block - 1 not in free)
    return [(start, next(n for n in range(1, len(free) + 2) if start + n not in free)) for start in starts]


@given(st.integers(0, 40), st.randoms(use_true_random=False), st.integers(1, 60))
def test_random_histories_match_a_set(num_blocks: int, random, num_operations: int) -> None:  # type: ignore[no-untyped-def]
    runs = FreeRuns(num_blocks)
    free = set(range(num_blocks))
    used: list[int] = []
    for _ in range(num_operations):
        if random.random() < 0.5:
            taken = runs.take(random.randint(0, len(free)))
            assert len(set(taken)) == len(taken) and free.issuperset(taken)
            free -= set(taken)
            used += taken
        elif used and random.random() < 0.3:
            after = random.choice(used)
            taken = runs.take_at(after + 1, random.randint(0, 4))
            assert taken == [block for block in range(after + 1, after + 1 + len(taken)) if block in free]
            free -= set(taken)
            used += taken
        elif random.random() < 0.3:
            named = random.sample(sorted(free), random.randint(0, len(free)))
            runs.take_named(named)
            free -= set(named)
            used += named
        else:
            random.shuffle(used)
            cut = random.randint(0, len(used))
            runs.give_back(used[cut:])
            free |= set(used[cut:])
            del used[cut:]
        assert runs.check_integrity() == free
        assert runs.num_free == len(free)
        assert runs.runs() == runs_of(free)


def test_one_run_is_taken_where_one_fits() -> None:
    runs = FreeRuns(64)
    runs.take(64)
    runs.give_back([*range(3), *range(10, 18), *range(30, 62)])
    assert runs.take(8) == list(range(10, 18))
    assert runs.take(20) == list(range(30, 50))


def test_single_blocks_fill_the_smallest_gaps() -> None:
    runs = FreeRuns(32)
    runs.take(32)
    runs.give_back([5, *range(10, 20), 25])
    assert sorted(runs.take(1) + runs.take(1)) == [5, 25]


def test_few_runs_are_used_where_none_fits() -> None:
    runs = FreeRuns(32)
    runs.take(32)
    runs.give_back([1, 3, *range(5, 9), *range(12, 28)])
    assert runs.take(20) == [*range(12, 28), *range(5, 9)]
