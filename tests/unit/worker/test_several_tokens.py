"""Rows that bring several tokens in one step: sequences end with the tokens, finish reasons, log-probabilities, K/V and
cached blocks that they have with one token a step, whatever happens between."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.scheduling.plan import SequenceOutput, worker_batch
from kvrelay.scheduling.policies import BUILT_IN
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.telemetry.metrics_file import MetricsFile, SequenceRecord, read_metrics
from kvrelay.telemetry.step_observer import StepObserver
from kvrelay_decode.stream import entry_of
from tests.fakes.guessing_speculator import GuessingSpeculator
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.sequences import new_sequence
from tests.thoroughness import examples
from tests.unit.worker.serving import Job, Service, check_tokens, failing, jobs, serve
from tests.unit.worker.test_launch_ahead import serve_queued

pytestmark = pytest.mark.unit
MOST_DRAFTS = st.sampled_from([1, 3, 9])  # fewer and more tokens than a block holds
AMPLE_BLOCKS = 400


@pytest.mark.parametrize("scheduler", list(BUILT_IN))
@pytest.mark.parametrize("overlap", [True, False])
@settings(max_examples=examples(60))
@given(jobs, st.sampled_from([0, 3, 40]), st.booleans(), MOST_DRAFTS)
def test_tokens_are_right_and_nothing_is_left_behind(
    overlap: bool, scheduler: str, wanted: list[Job], num_slots: int, blame: bool, most_drafts: int
) -> None:
    """On a small pool: with preemption by recomputing and by swapping, aborts, stops and failures between."""
    service = serve(
        Service(wanted, scheduler, num_slots, failing(blame=blame), overlap=overlap, most_drafts=most_drafts)
    )
    check_tokens(wanted, service.served, blame=blame)
    assert service.served.most_tokens <= 1 + most_drafts


@settings(max_examples=examples(60))
@given(jobs, st.sampled_from([0, 3]), MOST_DRAFTS)
def test_tokens_are_right_on_a_device_with_a_queue(wanted: list[Job], mistakes: int, most_drafts: int) -> None:
    service = serve_queued(wanted, "sarathi", 0, mistakes=mistakes, most_drafts=most_drafts)
    check_tokens(wanted, service.served, blame=True)


@settings(max_examples=examples(60))
@given(jobs, MOST_DRAFTS)
def test_outcomes_and_cached_blocks_are_those_of_one_token_a_step(wanted: list[Job], most_drafts: int) -> None:
    """Without aborts and failures, whose moment is another one, on a pool from which nothing is evicted."""
    wanted = [replace(job, abort_at=None, fail_at=None) for job in wanted]

    def run(most_drafts: int) -> Service:
        make = failing(blame=True, num_blocks=AMPLE_BLOCKS)
        return serve(
            Service(wanted, "sarathi", 0, make, overlap=False, most_drafts=most_drafts, num_blocks=AMPLE_BLOCKS)
        )

    several, one = run(most_drafts), run(0)
    assert several.served.output == one.served.output
    assert several.served.finish == one.served.finish
    assert cached_hashes(several) == cached_hashes(one)


def cached_hashes(service: Service) -> set[bytes]:
    return {block_hash for block_hash in service.cache._hash if block_hash is not None}


class Alone:
    """One sequence on a scheduler and the hash model, step by step."""

    def __init__(self, sampling: Sampling, most_drafts: int, observer: StepObserver | None = None) -> None:
        self.runner = HashRunner(16, 4, 64)
        limits = SchedulerLimits(16, 2, 64, frozenset())
        pool = BlockPool(16, 4)
        scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), SchedulerSettings())
        scheduler.lifecycle.speculator = GuessingSpeculator(most_drafts)
        self.scheduler = scheduler
        self.sequence = new_sequence(("one", 1, 0), [1, 2, 3], sampling, 4)
        self.runner.add_sequence(self.sequence.key, sampling, [1, 2, 3], 3)
        self.scheduler.add(self.sequence)
        self.observer = observer
        if observer is not None:
            observer.arrived(self.sequence, is_running=False)

    def step(self) -> SequenceOutput:
        plan = self.scheduler.schedule()
        if self.observer is not None:
            self.observer.planned(plan)
        result = self.runner.execute(worker_batch(plan))
        (output,) = outputs = self.scheduler.commit(plan, result)
        if self.observer is not None:
            self.observer.committed(plan, result, outputs, self.scheduler, 0.0, 0.0, ahead=False)
            if output.finish is not None:
                self.observer.left(self.sequence.key, output.finish)
        return output

    def run(self) -> list[SequenceOutput]:
        outputs = [self.step()]
        while outputs[-1].finish is None:
            assert self.sequence.num_computed == self.sequence.num_tokens - 1, "K/V of all tokens but the newest"
            outputs.append(self.step())
        return outputs


def test_a_run_ends_at_max_tokens_and_what_lies_behind_is_dropped() -> None:
    for max_tokens in range(1, 20):
        sampling = Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        outputs = Alone(sampling, 7).run()
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        assert token_ids == expected_tokens([1, 2, 3], sampling, 64) and len(token_ids) == max_tokens
        assert [entry.token_id for output in outputs for entry in output.logprobs] == token_ids
        assert outputs[-1].finish is FinishReason.LENGTH


def test_a_run_ends_at_a_stop_token_and_what_lies_behind_is_dropped() -> None:
    plain = Sampling(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    whole = expected_tokens([1, 2, 3], plain, 64)
    for count, stop in enumerate(whole, 1):
        alone = Alone(msgspec.structs.replace(plain, stop_token_ids=(stop,)), 7)
        outputs = alone.run()
        assert [token_id for output in outputs for token_id in output.token_ids] == whole[:count]
        assert [entry.token_id for output in outputs for entry in output.logprobs] == whole[:count]
        assert outputs[-1].finish is FinishReason.STOP_TOKEN


def test_a_message_to_the_router_has_all_tokens_of_a_row() -> None:
    outputs = Alone(Sampling(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0), 7).run()
    entries = [entry_of(output) for output in outputs]
    assert any(len(entry.token_ids) > 1 for entry in entries)
    index = 0
    for entry in entries:
        assert entry.index == index and len(entry.logprobs) == len(entry.token_ids)
        index += len(entry.token_ids)
    assert index == 20


def test_time_per_output_token_counts_tokens_and_not_steps(tmp_path: Path) -> None:
    now = itertools.count()
    file = MetricsFile(tmp_path / "metrics", lambda: float(next(now)))
    observer = StepObserver("decode", file=file, clock=lambda: float(next(now)))
    alone = Alone(Sampling(temperature=0, max_tokens=20, ignore_eos=True), 7, observer)
    outputs = alone.run()
    observer.close()
    (record,) = [each for each in read_metrics(tmp_path / "metrics") if isinstance(each, SequenceRecord)]
    assert len(outputs) < 20 == record.num_output_tokens
    assert record.tpot_s is not None and record.tpot_s * 19 < next(now)
