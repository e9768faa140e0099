"""A sequence that computed anew what is cached takes the cached blocks for its own, whatever step is in flight."""

from __future__ import annotations

import pytest

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.sequence import Sequence
from tests.unit.scheduling.bench import BLOCK_SIZE, Bench, make_sequence
from tests.unit.scheduling.overlapped import OverlappedBench

pytestmark = pytest.mark.unit
PROMPT = [1, 2, 3, 4] * 5
NUM_SHARED = len(PROMPT) // BLOCK_SIZE


def scored(bench: Bench) -> Sequence:
    """Its prompt's log-probabilities are wanted, so that all of it is computed."""
    sequence = make_sequence(PROMPT, 12, "scored")
    sequence.sampling = Sampling(max_tokens=12, prompt_logprobs=0, ignore_eos=True)
    bench.sequences.append(sequence)
    bench.scheduler.add(sequence)
    return sequence


def cached_blocks(bench: Bench, sequence: Sequence) -> list[int]:
    return bench.blocks.cache.match(sequence.block_hashes(NUM_SHARED))


@pytest.mark.parametrize("kind", [Bench, OverlappedBench])
def test_it_shares_them_as_soon_as_it_has_computed_them(kind: type[Bench]) -> None:
    bench = kind(32, token_budget=2 * BLOCK_SIZE)
    bench.add(PROMPT, 1)
    bench.run()
    sequence = scored(bench)
    bench.step()
    while sequence.num_computed < len(PROMPT):
        bench.step()
    assert sequence.table.ids[:NUM_SHARED].tolist() == cached_blocks(bench, sequence)
    bench.run()
    assert bench.pool.num_available == 32
    assert bench.blocks.cache.num_cached > NUM_SHARED, "its output is published behind the shared prefix"


def test_the_step_in_flight_keeps_what_it_reads() -> None:
    bench = OverlappedBench(32, token_budget=2 * BLOCK_SIZE)
    bench.add(PROMPT, 1)
    bench.run()
    sequence = scored(bench)
    bench.plan()
    own = sequence.table.ids[:2].tolist()
    assert bench.following is not None, "the step behind it is planned, and reads the own blocks"
    bench.land()
    assert sequence.table.ids[: len(own)].tolist() == cached_blocks(bench, sequence)[: len(own)]
    assert [bench.pool.state_of(block) for block in own] == [BlockState.IN_FLIGHT] * len(own)
    bench.land()
    assert [bench.pool.state_of(block) for block in own] == [BlockState.FREE] * len(own)


@pytest.mark.parametrize("keys", [None, frozenset[tuple[str, int, int]]()])
def test_a_step_that_fails_reads_them_no_more(keys: frozenset[tuple[str, int, int]] | None) -> None:
    bench = OverlappedBench(32, token_budget=2 * BLOCK_SIZE)
    bench.add(PROMPT, 1)
    bench.run()
    scored(bench)
    bench.plan()
    bench.land()
    assert bench.pool.counts()[BlockState.IN_FLIGHT] == 2
    bench.fail(keys)
    assert bench.pool.counts()[BlockState.IN_FLIGHT] == 0
    bench.run()
    assert bench.pool.num_available == 32


def test_a_planned_step_that_is_cancelled_reads_them_no_more() -> None:
    bench = OverlappedBench(32, token_budget=2 * BLOCK_SIZE)
    bench.add(PROMPT, 1)
    bench.run()
    scored(bench)
    bench.plan()
    bench.land()
    assert bench.in_flight is not None
    bench.scheduler.cancel_plan(bench.in_flight)
    bench.in_flight = None
    assert bench.pool.counts()[BlockState.IN_FLIGHT] == 0
    bench.run()
