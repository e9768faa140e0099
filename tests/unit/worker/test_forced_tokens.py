"""Tokens that a grammar forces join the output without their K/V, and the next rows of the decode compute it: sequences
end with the tokens, finish reasons, K/V and cached blocks that they have with one token a step."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.grammar import Grammar, GrammarKind
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.scheduling.plan import SequenceOutput, StepPlan, worker_batch
from kvrelay.scheduling.policies import BUILT_IN
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.speculation.forced_tokens import SHARED_PART
from kvrelay.worker.load_report import SpeedMeter, report_load
from kvrelay_decode.stream import entry_of
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.sequences import new_sequence
from tests.thoroughness import examples
from tests.unit.worker.serving import Job, Service, check_tokens, failing, jobs, serve
from tests.unit.worker.test_launch_ahead import serve_queued
from tests.unit.worker.test_several_tokens import AMPLE_BLOCKS, cached_hashes

pytestmark = pytest.mark.unit
PROMPT = [1, 2, 3]
GRAMMAR = Grammar(kind=GrammarKind.REGEX, text=".*")
CONSTRAINED = Sampling(temperature=0, max_tokens=20, ignore_eos=True, grammar=GRAMMAR)


@pytest.mark.parametrize("scheduler", list(BUILT_IN))
@pytest.mark.parametrize("overlap", [True, False])
@settings(max_examples=examples(60))
@given(jobs, st.sampled_from([0, 3, 40]), st.booleans(), st.sampled_from([0, 0, 3]))
def test_tokens_are_right_and_nothing_is_left_behind(
    overlap: bool, scheduler: str, wanted: list[Job], num_slots: int, blame: bool, most_drafts: int
) -> None:
    """On a small pool: with preemption by recomputing and by swapping, aborts, stops, failures, late masks between."""
    make = failing(blame=blame)
    service = serve(
        Service(wanted, scheduler, num_slots, make, overlap=overlap, most_drafts=most_drafts, jump_forward=True)
    )
    check_tokens(wanted, service.served, blame=blame)


@settings(max_examples=examples(60))
@given(jobs, st.sampled_from([0, 3]))
def test_tokens_are_right_on_a_device_with_a_queue(wanted: list[Job], mistakes: int) -> None:
    service = serve_queued(wanted, "sarathi", 0, mistakes=mistakes, jump_forward=True)
    check_tokens(wanted, service.served, blame=True)


@settings(max_examples=examples(60))
@given(jobs)
def test_outcomes_are_those_of_one_token_a_step_and_cached_blocks_are_among_them(wanted: list[Job]) -> None:
    """Without aborts and failures, whose moment is another one, on a pool from which nothing is evicted. The KV of the
    run that ends a sequence is not computed, so its last blocks are not cached."""
    wanted = [replace(job, abort_at=None, fail_at=None) for job in wanted]

    def run(*, jump_forward: bool) -> Service:
        make = failing(blame=True, num_blocks=AMPLE_BLOCKS)
        return serve(
            Service(wanted, "sarathi", 0, make, overlap=False, jump_forward=jump_forward, num_blocks=AMPLE_BLOCKS)
        )

    jumping, stepwise = run(jump_forward=True), run(jump_forward=False)
    assert jumping.served.output == stepwise.served.output
    assert jumping.served.finish == stepwise.served.finish
    assert cached_hashes(jumping) <= cached_hashes(stepwise)


class Fleetless:
    """Sequences on a scheduler and the hash model, step by step."""

    def __init__(
        self,
        samplings: list[Sampling],
        token_budget: int = 32,
        *,
        prefill_only: bool = False,
    ) -> None:
        self.runner = HashRunner(64, 4, 64)
        limits = SchedulerLimits(token_budget, 4, 64, frozenset())
        pool = BlockPool(64, 4)
        chosen = SchedulerSettings(jump_forward=True)
        self.scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), chosen)
        self.sequences = [self._add(number, each, prefill_only) for number, each in enumerate(samplings)]
        self.plans: list[StepPlan] = []
        self.outputs: list[SequenceOutput] = []

    def _add(self, number: int, sampling: Sampling, prefill_only: bool) -> Sequence:
        sequence = new_sequence((f"r{number}", 1, 0), PROMPT, sampling, 4, prefill_only=prefill_only)
        self.runner.add_sequence(sequence.key, sampling, PROMPT, len(PROMPT))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.outputs += self.scheduler.commit(plan, self.runner.execute(worker_batch(plan)))

    def run(self) -> list[list[int]]:
        while self.scheduler.has_work:
            self.step()
        return [[token for o in self.outputs if o.sequence is s for token in o.token_ids] for s in self.sequences]


def test_a_run_is_computed_in_one_row_of_the_decode() -> None:
    world = Fleetless([CONSTRAINED])
    (output,) = world.run()
    assert output == expected_tokens(PROMPT, CONSTRAINED, 64)
    assert len(world.plans) < len(output)
    sizes = [row.num_tokens for plan in world.plans[1:] for row in plan.rows]
    assert max(sizes) > 1 and all(row.sample and not row.is_prefill for plan in world.plans[1:] for row in plan.rows)
    assert sizes == [len(o.token_ids) for o in world.outputs[:-1]], "each row holds what the step before brought"


def test_runs_stay_within_the_token_budget_and_leave_a_token_to_every_decode() -> None:
    samplings = [CONSTRAINED] * 3 + [msgspec.structs.replace(CONSTRAINED, grammar=None)]
    world = Fleetless(samplings, token_budget=6)
    for output in world.run():
        assert output == expected_tokens(PROMPT, CONSTRAINED, 64)
    for plan in world.plans:
        sizes = [row.num_tokens for row in plan.rows]
        assert sum(sizes) <= 6
        decodes = [row.num_tokens for row in plan.rows if not row.is_prefill]
        assert decodes == sorted(decodes, key=lambda size: size == 1), "runs come before single tokens"
    assert any(not row.sample and not row.is_prefill for plan in world.plans for row in plan.rows), "a run was cut"


@pytest.mark.parametrize("max_shared", [2, 3])
def test_runs_take_a_part_of_the_budget_beside_unconstrained_rows(max_shared: int) -> None:
    """So that a step, and with it the gap between the tokens of these rows, is bounded."""
    free, budget = msgspec.structs.replace(CONSTRAINED, grammar=None, max_tokens=6), max_shared * SHARED_PART
    samplings = [CONSTRAINED, CONSTRAINED, free, CONSTRAINED]
    world = Fleetless(samplings, token_budget=budget)
    outputs = world.run()
    assert outputs == [expected_tokens(PROMPT, each, 64) for each in samplings]
    beside: list[int] = []
    alone: list[int] = []
    for plan in world.plans:
        decodes = [row for row in plan.rows if not row.is_prefill]
        has_others = any(row.sequence is world.sequences[2] for row in decodes)
        (beside if has_others else alone).append(sum(row.num_tokens for row in decodes) - len(decodes))
    assert max(beside) == max_shared < max(alone)
    rows = [sum(row.sequence is world.sequences[2] for row in plan.rows) for plan in world.plans]
    assert sum(rows) == 6, "the unconstrained row gets a token in each step"


def test_a_run_ends_at_max_tokens_and_at_a_stop_token() -> None:
    whole = expected_tokens(PROMPT, CONSTRAINED, 64)
    for count in range(1, 20):
        world = Fleetless([msgspec.structs.replace(CONSTRAINED, max_tokens=count)])
        assert world.run() == [whole[:count]]
        assert world.outputs[-1].finish is FinishReason.LENGTH
        world = Fleetless([msgspec.structs.replace(CONSTRAINED, stop_token_ids=(whole[count],))])
        assert world.run() == [whole[: whole.index(whole[count]) + 1]]
        assert world.outputs[-1].finish is FinishReason.STOP_TOKEN
        assert all(o.finish is None for o in world.outputs[:-1])


def test_messages_to_the_router_follow_on_each_other() -> None:
    world = Fleetless([CONSTRAINED])
    world.run()
    index = 0
    for entry in map(entry_of, world.outputs):
        assert entry.index == index
        index += len(entry.token_ids)
    assert index == 20


@pytest.mark.parametrize("change", [{"logprobs": 0}, {"grammar": None}])
def test_without_a_grammar_or_with_logprobs_each_token_is_sampled(change: dict[str, object]) -> None:
    world = Fleetless([msgspec.structs.replace(CONSTRAINED, **change)])
    assert world.run() == [expected_tokens(PROMPT, CONSTRAINED, 64)]
    assert len(world.plans) == 20


@pytest.mark.parametrize("prefill_only", [False, True])
def test_a_late_row_brings_its_token_in_the_next_step_and_delays_no_other(prefill_only: bool) -> None:
    free = msgspec.structs.replace(CONSTRAINED, grammar=None)
    world = Fleetless([CONSTRAINED, free], prefill_only=prefill_only)
    world.runner.late_every = 1  # every one, once for each place
    world.step()
    constrained, unconstrained = world.sequences
    assert [output.sequence for output in world.outputs] == [unconstrained]
    assert constrained.num_computed == len(PROMPT) - 1
    world.step()
    row = next(row for row in world.plans[1].rows if row.sequence is constrained)
    assert (row.position, row.num_tokens, row.sample) == (len(PROMPT) - 1, 1, True)
    if prefill_only:
        assert constrained.num_computed == len(PROMPT) and constrained.num_output
        return
    whole = expected_tokens(PROMPT, CONSTRAINED, 64)
    assert world.run() == [whole, whole]
    first, second = (
        [at for at, plan in enumerate(world.plans) if any(row.sequence is s for row in plan.rows)]
        for s in world.sequences
    )
    assert len(second) == len(whole), "the other row gets a token in every step"
    assert len(first) > len([o for o in world.outputs if o.sequence is constrained])


def test_a_prefill_worker_brings_the_first_token_alone() -> None:
    world = Fleetless([CONSTRAINED], prefill_only=True)
    world.step()
    (output,) = world.outputs
    assert list(output.token_ids) == expected_tokens(PROMPT, CONSTRAINED, 64)[:1]


def test_steps_behind_forced_tokens_are_planned_after_their_commit() -> None:
    world = Fleetless([CONSTRAINED])
    plan = world.scheduler.schedule()
    assert world.scheduler.schedule_ahead() is None
    world.scheduler.commit(plan, world.runner.execute(worker_batch(plan)))


def test_a_decode_with_forced_tokens_is_no_prompt_in_the_load_that_routers_see() -> None:
    world, longest = Fleetless([CONSTRAINED]), 0
    world.step()
    while world.scheduler.has_work:
        (sequence,) = world.scheduler.running.values()
        longest = max(longest, sequence.num_remaining)
        load, _ = report_load(world.scheduler, SpeedMeter())
        assert (load.queued_tokens, load.queued_pairs, load.context_tokens) == (0, 0.0, sequence.num_tokens)
        world.step()
    assert longest > 1, "the grammar forced no run"
