"""A scheduler that chunks, preempts, swaps, drafts, aborts and fails over a runner of several ranks: tokens are right,
and the ranks' K/V is equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.ranks.ranked_runner import RankedRunner, RankedStep
from kvrelay.scheduling.plan import StepPlan
from kvrelay.step.batch import StepResult, WorkerBatch
from tests.fakes.hash_runner import HashRunner
from tests.fakes.replicas import HashReplica, ReplicasHere, resolved
from tests.thoroughness import examples
from tests.unit.worker.serving import (
    BLOCK_SIZE,
    LONGEST,
    NUM_BLOCKS,
    FailingRunner,
    Job,
    Service,
    check_tokens,
    jobs,
    serve,
)


class LeadingFailingRunner(FailingRunner):
    waited_s = 0.0

    def follow(self, batch: WorkerBatch) -> None:
        """Only takes what the stage before has sent: a step that failed has left no K/V to read."""

    def resolve(self, batch: WorkerBatch) -> WorkerBatch:
        return resolved(batch, self._sampled)


@dataclass
class Noted:
    """A step in flight, which must end in the order of the launches."""

    step: RankedStep
    in_flight: list[RankedStep]

    def land(self) -> StepResult:
        assert self.in_flight[0] is self.step
        try:
            return self.step.land()
        finally:
            self.in_flight.pop(0)

    def discard(self) -> None:
        assert self.in_flight.pop(0) is self.step
        self.step.discard()


class Ranked(FailingRunner):
    """Rank 0 with two replicas, in the place of a runner of one process."""

    def __init__(
        self, fail_at: dict[SequenceKey, int], num_slots: int, *, blame: bool, pipeline_depth: int = 1
    ) -> None:
        super().__init__(fail_at, num_slots, blame=blame)
        self.leader = LeadingFailingRunner(fail_at, num_slots, blame=blame)
        self.leader._spec = replace(self.leader.spec, pipeline_parallel_size=pipeline_depth)
        self.let_run = self.leader.let_run
        self.pool_bytes = self.leader.pool_bytes
        self.replicas = [
            HashReplica(HashRunner(NUM_BLOCKS, BLOCK_SIZE, LONGEST, num_host_slots=num_slots)) for _ in range(2)
        ]
        self.ranked = RankedRunner(self.leader, cast(RankGroup, ReplicasHere(*self.replicas)))
        self.in_flight: list[RankedStep] = []

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        self.ranked.add_sequence(key, sampling, token_ids, num_prompt)

    def drop_sequence(self, key: SequenceKey) -> None:
        self.ranked.drop_sequence(key)

    @property
    def launches_ahead(self) -> bool:
        return self.ranked.launches_ahead

    @property
    def num_sequences(self) -> int:
        return self.leader.num_sequences

    def execute(self, batch: WorkerBatch) -> StepResult:
        self.leader.late_every = self.late_every
        return self.ranked.execute(batch)

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        return self.ranked.can_launch_behind(batch)

    def launch(self, batch: WorkerBatch) -> Noted:
        self.leader.late_every = self.late_every
        assert not any(row.has_placeholder for row in batch.rows), "a stage would wait for the last one"
        step = self.ranked.launch(batch)
        self.in_flight.append(step)
        return Noted(step, self.in_flight)


class OwnBlocks(Service):
    """A service whose peer does not write: it would write into the blocks of rank 0 alone."""

    most_planned = 0

    def write_as_a_peer(self) -> None:
        pass

    def planned(self, plan: StepPlan) -> None:
        super().planned(plan)
        self.most_planned = max(self.most_planned, self.num_planned)


@pytest.mark.parametrize("overlap", [True, False])
@settings(max_examples=examples(40), deadline=None)
@given(
    wanted=jobs,
    num_slots=st.sampled_from([0, 3, 40]),
    most_drafts=st.sampled_from([0, 0, 3, 9]),
    jump_forward=st.booleans(),
)
def test_tokens_are_right_and_all_ranks_have_the_same(
    overlap: bool, wanted: list[Job], num_slots: int, most_drafts: int, jump_forward: bool
) -> None:
    wanted = [replace(job, fail_at=None) for job in wanted]
    runner = Ranked({}, num_slots, blame=True)
    service = serve(
        OwnBlocks(
            wanted,
            "sarathi",
            num_slots,
            lambda fail_at, num_slots: runner,
            overlap=overlap,
            most_drafts=most_drafts,
            jump_forward=jump_forward,
        )
    )
    if not jump_forward:
        check_tokens(wanted, service.served, blame=True)
    for replica in runner.replicas:
        assert np.array_equal(replica.runner.pool_bytes, runner.leader.pool_bytes)
        assert np.array_equal(replica.runner._host, runner.leader._host)


@pytest.mark.parametrize("blame", [True, False])
@settings(max_examples=examples(40), deadline=None)
@given(wanted=jobs, num_slots=st.sampled_from([0, 3]))
def test_ranks_go_on_after_steps_that_failed_on_rank_0(blame: bool, wanted: list[Job], num_slots: int) -> None:
    """The replicas check what they read."""
    made: list[Ranked] = []

    def make(fail_at: dict[SequenceKey, int], num_slots: int) -> Ranked:
        made.append(Ranked(fail_at, num_slots, blame=blame))
        return made[0]

    service = serve(OwnBlocks(wanted, "sarathi", num_slots, make, overlap=True))
    check_tokens(wanted, service.served, blame=blame)


@pytest.mark.parametrize("scheduler", ["sarathi", "simple_chunking", "vllm"])
@settings(max_examples=examples(40), deadline=None)
@given(
    wanted=jobs,
    pipeline_depth=st.integers(2, 4),
    num_slots=st.sampled_from([0, 3, 40]),
    most_drafts=st.sampled_from([0, 0, 3, 9]),
    jump_forward=st.booleans(),
    failure=st.sampled_from(["none", "rows", "step"]),
)
def test_several_steps_of_a_pipeline_in_flight(
    scheduler: str,
    wanted: list[Job],
    pipeline_depth: int,
    num_slots: int,
    most_drafts: int,
    jump_forward: bool,
    failure: str,
) -> None:
    """Stages before the last one compute a step as soon as it is launched, and the last one as late as can be."""
    if failure == "none":
        wanted = [replace(job, fail_at=None) for job in wanted]
    made: list[Ranked] = []

    def make(fail_at: dict[SequenceKey, int], num_slots: int) -> Ranked:
        made.append(Ranked(fail_at, num_slots, blame=failure == "rows", pipeline_depth=pipeline_depth))
        return made[0]

    service = serve(
        OwnBlocks(
            *(wanted, scheduler, num_slots, make),
            overlap=True,
            most_drafts=most_drafts,
            jump_forward=jump_forward,
            pipeline_depth=pipeline_depth,
        )
    )
    if not jump_forward:
        check_tokens(wanted, service.served, blame=failure != "step")
    runner = made[0]
    assert not runner.ranked._in_flight and not runner.ranked._drops
    if failure == "none":
        for replica in runner.replicas:
            assert np.array_equal(replica.runner.pool_bytes, runner.leader.pool_bytes)


@pytest.mark.parametrize("pipeline_depth", [2, 3])
def test_stages_have_work(pipeline_depth: int) -> None:
    """Chunks of one prompt are in flight in all stages, with one more behind; and groups of decodes in all stages."""
    plain: dict[str, Any] = {"stop_at": None, "abort_at": None, "fail_at": None, "prefill_only": False, "scored": False}
    long = Job(prompt=(1, 2, 2) * 14, max_tokens=2, after_step=0, **plain)  # two chunks
    short = [Job(prompt=(1,) * number, max_tokens=12, after_step=0, **plain) for number in range(1, 7)]

    def make(fail_at: dict[SequenceKey, int], num_slots: int) -> Ranked:
        return Ranked(fail_at, num_slots, blame=False, pipeline_depth=pipeline_depth)

    service = OwnBlocks([long], "sarathi", 0, make, overlap=True, pipeline_depth=pipeline_depth)
    serve(service)
    assert service.most_planned == 2
    service = OwnBlocks(short, "sarathi", 0, make, overlap=True, pipeline_depth=pipeline_depth)
    check_tokens(short, serve(service).served, blame=False)
    assert service.most_planned == pipeline_depth
