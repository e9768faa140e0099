"""A scheduler that chunks, preempts, swaps, drafts, aborts and fails over a runner of several ranks: tokens are right,
and the ranks' K/V is equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.batch import StepResult, WorkerBatch
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.ranked_runner import RankedRunner
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
    def resolve(self, batch: WorkerBatch) -> WorkerBatch:
        return resolved(batch, self._sampled)


class Ranked(FailingRunner):
    """Rank 0 with two replicas, in the place of a runner of one process."""

    def __init__(self, fail_at: dict[SequenceKey, int], num_slots: int, *, blame: bool) -> None:
        super().__init__(fail_at, num_slots, blame=blame)
        self.leader = LeadingFailingRunner(fail_at, num_slots, blame=blame)
        self.let_run = self.leader.let_run
        self.pool_bytes = self.leader.pool_bytes
        self.replicas = [
            HashReplica(HashRunner(NUM_BLOCKS, BLOCK_SIZE, LONGEST, num_swap_slots=num_slots)) for _ in range(2)
        ]
        self.others = ReplicasHere(*self.replicas)
        self.ranked = RankedRunner(self.leader, self.others)

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        self.ranked.add_sequence(key, sampling, token_ids, num_prompt)

    def drop_sequence(self, key: SequenceKey) -> None:
        self.ranked.drop_sequence(key)

    @property
    def num_sequences(self) -> int:
        return self.leader.num_sequences

    def execute(self, batch: WorkerBatch) -> StepResult:
        self.leader.late_every = self.late_every
        return self.ranked.execute(batch)


class OwnBlocks(Service):
    """A service whose peer does not write: it would write into the blocks of rank 0 alone."""

    def write_as_a_peer(self) -> None:
        pass


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
    runner.let_run.release()
    runner.ranked.execute(WorkerBatch(0, []))
    assert runner.others.num_sequences == [0, 0]


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
