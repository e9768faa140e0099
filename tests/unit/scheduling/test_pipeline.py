"""Steps that are planned before others are committed: in a pipeline, and while blocks are replaced by cached ones."""

from __future__ import annotations

from collections import deque

import pytest

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from tests.fakes.sequences import new_sequence
from tests.unit.scheduling.bench import BLOCK_SIZE, Bench, OverlappedBench, check_writes, make_sequence


class PipelinedBench(Bench):
    """`step` lands one step, behind which others are planned."""

    def __init__(self, pipeline_depth: int, num_blocks: int, token_budget: int) -> None:
        super().__init__(num_blocks, token_budget, settings=SchedulerSettings(pipeline_depth=pipeline_depth))
        self.in_flight: deque[StepPlan] = deque()

    def plan(self) -> None:
        while len(self.in_flight) < self.scheduler.settings.max_uncommitted:
            plan = self.scheduler.schedule_ahead() if self.in_flight else self.scheduler.schedule()
            if plan is None or not plan.has_work:
                break
            waiting = {row.sequence for before in self.in_flight for row in before.rows if row.sample}
            assert not waiting & {row.sequence for row in plan.rows}, "its token is not known yet"
            check_writes(self.scheduler, plan)
            self.in_flight.append(plan)
        self.check_pool()

    def step(self) -> tuple[StepPlan, list[SequenceOutput]]:
        self.plan()
        plan = self.in_flight.popleft()
        outputs = self.scheduler.commit(plan, self.forward(plan))
        self.check_pool()
        return plan, outputs


@pytest.mark.parametrize("pipeline_depth", [2, 3, 4])
def test_decodes_go_on_beside_a_long_prompt(pipeline_depth: int) -> None:
    bench = PipelinedBench(pipeline_depth, 256, token_budget=16)
    decodes = [bench.add([1, 2, number], 60) for number in range(5)]
    for _ in range(4):
        bench.step()
    prompt = bench.add([3] * 700, 1)
    num_rounds = 0
    while not prompt.num_output:
        before = [each.num_output for each in decodes]
        for _ in range(pipeline_depth + 1):
            bench.step()
        if prompt.num_output:
            break
        assert len(bench.in_flight) == pipeline_depth
        if all(each.num_output < 60 for each in decodes):
            num_rounds += 1
            assert all(each.num_output > earlier for each, earlier in zip(decodes, before, strict=True))
    assert num_rounds > 3


def test_decodes_are_divided_into_groups() -> None:
    bench = PipelinedBench(2, 64, token_budget=16)
    for number in range(7):
        bench.add([1, 2, number], 20 if number < 4 else 4)
    groups = [len(bench.step()[0].rows) for _ in range(20)]
    assert groups[4:9] == [4, 3, 4, 3, 4]
    assert set(groups[-6:]) == {2}, "groups are equal again after some sequences ended"
    bench.plan()
    assert len(bench.in_flight) == 2, "a third group would be smaller"


def test_blocks_that_others_had_are_held_for_all_steps_that_read_them() -> None:
    prompt = [1] * (8 * BLOCK_SIZE)
    bench = PipelinedBench(2, 64, token_budget=2 * BLOCK_SIZE)
    bench.add(prompt, 1)
    while bench.scheduler.has_work:
        bench.step()
    scored = new_sequence(("scored", 1, 0), prompt, Sampling(max_tokens=1, prompt_logprobs=0), BLOCK_SIZE)
    bench.scheduler.add(scored)
    bench.plan()
    own = scored.table.ids[:2].tolist()
    bench.step()
    for _ in range(2):
        assert [bench.pool.state_of(block) for block in own] == [BlockState.IN_FLIGHT] * 2
        bench.step()
    assert BlockState.IN_FLIGHT not in {bench.pool.state_of(block) for block in own}
    while bench.scheduler.has_work:
        bench.step()
    assert bench.pool.num_available == 64


# -- a sequence that computed anew what is cached takes the cached blocks for its own ---------------------------------


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


@pytest.mark.parametrize("how", ["cancelled", "failed", "failed for none"])
def test_a_step_that_fails_or_is_cancelled_reads_them_no_more(how: str) -> None:
    bench = OverlappedBench(32, token_budget=2 * BLOCK_SIZE)
    bench.add(PROMPT, 1)
    bench.run()
    scored(bench)
    bench.plan()
    bench.land()
    assert bench.pool.counts()[BlockState.IN_FLIGHT] == 2
    if how == "cancelled":
        assert bench.in_flight is not None
        bench.scheduler.cancel_plan(bench.in_flight)
        bench.in_flight = None
    else:
        bench.fail(None if how == "failed" else frozenset())
    assert bench.pool.counts()[BlockState.IN_FLIGHT] == 0
    bench.run()
    assert bench.pool.num_available == 32
