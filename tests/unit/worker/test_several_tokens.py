"""Rows that bring several tokens in one step, forced by a grammar or drafted: sequences end with the tokens, finish
reasons, log-probabilities, K/V and cached blocks that they have with one token a step."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.sampling import FinishReason, Grammar, GrammarKind, Sampling
from kvrelay.scheduling.plan import SequenceOutput, StepPlan, worker_batch
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.speculation.forced_tokens import SHARED_PART
from kvrelay.telemetry.metrics_file import MetricsFile, SequenceRecord, read_metrics
from kvrelay.telemetry.step_observer import StepObserver
from kvrelay.worker.reports import report_load
from kvrelay.worker.speeds import SpeedMeter
from kvrelay_decode.service import entry_of
from tests.fakes.guessing_speculator import GuessingSpeculator
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.sequences import new_sequence
from tests.thoroughness import examples
from tests.unit.worker.serving import MOST_DRAFTS, Job, Service, failing, jobs, serve

PROMPT = [1, 2, 3]
AMPLE_BLOCKS = 400
GRAMMAR = Grammar(kind=GrammarKind.REGEX, text=".*")
CONSTRAINED = Sampling(temperature=0, max_tokens=20, ignore_eos=True, grammar=GRAMMAR)
DRAFTED = Sampling(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("jump_forward", [False, True])
@settings(max_examples=examples(60))
@given(jobs, MOST_DRAFTS)
def test_outcomes_are_those_of_one_token_a_step(jump_forward: bool, wanted: list[Job], most_drafts: int) -> None:
    """Without aborts and failures, whose moment is another one, on a pool from which nothing is evicted. The KV of the
    forced run that ends a sequence is not computed, so its last blocks are not cached."""
    wanted = [replace(job, abort_at=None, fail_at=None) for job in wanted]

    def run(*, most_drafts: int, jump_forward: bool) -> Service:
        make = failing(blame=True, num_blocks=AMPLE_BLOCKS)
        options: dict[str, Any] = {"most_drafts": most_drafts, "jump_forward": jump_forward, "num_blocks": AMPLE_BLOCKS}
        return serve(Service(wanted, "sarathi", 0, make, overlap=False, **options))

    several, one = run(most_drafts=most_drafts, jump_forward=jump_forward), run(most_drafts=0, jump_forward=False)
    assert several.served.output == one.served.output
    assert several.served.finish == one.served.finish
    assert several.served.most_tokens <= 1 + most_drafts or jump_forward
    cached, expected = cached_hashes(several), cached_hashes(one)
    assert cached <= expected if jump_forward else cached == expected


def cached_hashes(service: Service) -> set[bytes]:
    return {block_hash for block_hash in service.cache._hash if block_hash is not None}


class Steps:
    """Sequences on a scheduler and the hash model, step by step. `most_drafts`: of a speculator that guesses."""

    def __init__(
        self,
        samplings: list[Sampling],
        token_budget: int = 32,
        *,
        prefill_only: bool = False,
        most_drafts: int = 0,
        observer: StepObserver | None = None,
    ) -> None:
        self.runner = HashRunner(64, 4, 64)
        limits = SchedulerLimits(token_budget, 4, 64, frozenset())
        pool = BlockPool(64, 4)
        chosen = SchedulerSettings(jump_forward=True)
        self.scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), chosen)
        if most_drafts:
            self.scheduler.lifecycle.speculator = GuessingSpeculator(most_drafts)
        self.observer = observer
        self.sequences = [self._add(number, each, prefill_only) for number, each in enumerate(samplings)]
        self.plans: list[StepPlan] = []
        self.outputs: list[SequenceOutput] = []

    def _add(self, number: int, sampling: Sampling, prefill_only: bool) -> Sequence:
        sequence = new_sequence((f"r{number}", 1, 0), PROMPT, sampling, 4, prefill_only=prefill_only)
        self.runner.add_sequence(sequence.key, sampling, PROMPT, len(PROMPT))
        self.scheduler.add(sequence)
        if self.observer is not None:
            self.observer.arrived(sequence, is_running=False)
        return sequence

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        if self.observer is not None:
            self.observer.planned(plan)
        result = self.runner.execute(worker_batch(plan))
        outputs = self.scheduler.commit(plan, result)
        self.outputs += outputs
        if self.observer is not None:
            self.observer.committed(plan, result, outputs, self.scheduler, 0.0, 0.0, ahead=False)
            for output in outputs:
                if output.finish is not None:
                    self.observer.left(output.sequence.key, output.finish)

    def run(self) -> list[list[int]]:
        while self.scheduler.has_work:
            self.step()
        return [[token for o in self.outputs if o.sequence is s for token in o.token_ids] for s in self.sequences]


def test_a_run_is_computed_in_one_row_of_the_decode() -> None:
    world = Steps([CONSTRAINED])
    (output,) = world.run()
    assert output == expected_tokens(PROMPT, CONSTRAINED, 64)
    assert len(world.plans) < len(output)
    sizes = [row.num_tokens for plan in world.plans[1:] for row in plan.rows]
    assert max(sizes) > 1 and all(row.sample and not row.is_prefill for plan in world.plans[1:] for row in plan.rows)
    assert sizes == [len(o.token_ids) for o in world.outputs[:-1]], "each row holds what the step before brought"


def test_runs_stay_within_the_token_budget_and_leave_a_token_to_every_decode() -> None:
    samplings = [CONSTRAINED] * 3 + [msgspec.structs.replace(CONSTRAINED, grammar=None)]
    world = Steps(samplings, token_budget=6)
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
    world = Steps(samplings, token_budget=budget)
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


FORCED_OR_DRAFTED = pytest.mark.parametrize(("sampling", "most_drafts"), [(CONSTRAINED, 0), (DRAFTED, 7)])


@FORCED_OR_DRAFTED
def test_a_run_ends_at_max_tokens_and_at_a_stop_token(sampling: Sampling, most_drafts: int) -> None:
    whole = expected_tokens(PROMPT, sampling, 64)
    for count in range(1, 20):
        world = Steps([msgspec.structs.replace(sampling, max_tokens=count)], most_drafts=most_drafts)
        assert world.run() == [whole[:count]]
        assert world.outputs[-1].finish is FinishReason.LENGTH
        world = Steps([msgspec.structs.replace(sampling, stop_token_ids=(whole[count],))], most_drafts=most_drafts)
        assert world.run() == [whole[: whole.index(whole[count]) + 1]]
        assert world.outputs[-1].finish is FinishReason.STOP_TOKEN
        assert all(o.finish is None for o in world.outputs[:-1])
        if sampling.logprobs is not None:
            (output,) = world.run()
            assert [entry.token_id for o in world.outputs for entry in o.logprobs] == output


@FORCED_OR_DRAFTED
def test_messages_to_the_router_follow_on_each_other(sampling: Sampling, most_drafts: int) -> None:
    world = Steps([sampling], most_drafts=most_drafts)
    world.run()
    index = 0
    for entry in map(entry_of, world.outputs):
        assert entry.index == index
        assert sampling.logprobs is None or len(entry.logprobs) == len(entry.token_ids)
        index += len(entry.token_ids)
    assert index == 20 > len(world.outputs)


@pytest.mark.parametrize("change", [{"logprobs": 0}, {"grammar": None}])
def test_without_a_grammar_or_with_logprobs_each_token_is_sampled(change: dict[str, object]) -> None:
    world = Steps([msgspec.structs.replace(CONSTRAINED, **change)])
    assert world.run() == [expected_tokens(PROMPT, CONSTRAINED, 64)]
    assert len(world.plans) == 20


@pytest.mark.parametrize("prefill_only", [False, True])
def test_a_late_row_brings_its_token_in_the_next_step_and_delays_no_other(prefill_only: bool) -> None:
    free = msgspec.structs.replace(CONSTRAINED, grammar=None)
    world = Steps([CONSTRAINED, free], prefill_only=prefill_only)
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
    world = Steps([CONSTRAINED], prefill_only=True)
    world.step()
    (output,) = world.outputs
    assert list(output.token_ids) == expected_tokens(PROMPT, CONSTRAINED, 64)[:1]


def test_steps_behind_forced_tokens_are_planned_after_their_commit() -> None:
    world = Steps([CONSTRAINED])
    plan = world.scheduler.schedule()
    assert world.scheduler.schedule_ahead() is None
    world.scheduler.commit(plan, world.runner.execute(worker_batch(plan)))


def test_a_decode_with_forced_tokens_is_no_prompt_in_the_load_that_routers_see() -> None:
    world, longest = Steps([CONSTRAINED]), 0
    world.step()
    while world.scheduler.has_work:
        (sequence,) = world.scheduler.running.values()
        longest = max(longest, sequence.num_remaining)
        load, _ = report_load(world.scheduler, SpeedMeter(), 0.0)
        assert (load.queued_tokens, load.queued_pairs, load.context_tokens) == (0, 0.0, sequence.num_tokens)
        world.step()
    assert longest > 1, "the grammar forced no run"


def test_time_per_output_token_counts_tokens_and_not_steps(tmp_path: Path) -> None:
    now = itertools.count()
    file = MetricsFile(tmp_path / "metrics", lambda: float(next(now)))
    observer = StepObserver("decode", file=file, clock=lambda: float(next(now)))
    world = Steps([DRAFTED], most_drafts=7, observer=observer)
    world.run()
    observer.close()
    (record,) = [each for each in read_metrics(tmp_path / "metrics") if isinstance(each, SequenceRecord)]
    assert len(world.outputs) < 20 == record.num_output_tokens
    assert record.tpot_s is not None and record.tpot_s * 19 < next(now)
