"""Ranks with sequences of their own that take all steps together, and sleep together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.ranks.lockstep_group import LocalGroup, LocalRank
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.queue.prefill_delay import DelayerSettings, PrefillDelayer
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import DeviceLost, StepResult, WorkerBatch
from kvrelay.worker.rank_loops import LockstepLoop
from kvrelay.worker.step_loop import StepCallbacks
from tests.fakes.hash_runner import EOS_TOKEN_ID, HashRunner, expected_tokens
from tests.fakes.sequences import new_sequence
from tests.fakes.waiting import PATIENCE_S
from tests.thoroughness import examples

BLOCK_SIZE, NUM_BLOCKS, LONGEST, MAX_RUNNING = 4, 14, 56, 3
ME = PeerRef("rank", "1", "tcp://nowhere")


class Meeting(HashRunner):
    """Steps of all ranks meet, as collectives do: a rank that comes to another step, or does not come, is found."""

    def __init__(self, barrier: threading.Barrier, steps: list[int]) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, LONGEST)
        self._barrier = barrier
        self._steps = steps
        self.fails = 0  # so many steps with rows fail
        self.is_lost = False

    def execute(self, batch: WorkerBatch) -> StepResult:
        if self.is_lost:
            raise DeviceLost("as told")
        self._steps.append(len(batch.rows))
        self._barrier.wait(PATIENCE_S)
        if batch.rows and self.fails:
            self.fails -= 1
            raise RuntimeError("as told")
        return super().execute(batch)


class Rank:
    def __init__(self, group: LocalRank, runner: Meeting, delayer: PrefillDelayer | None) -> None:
        pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        limits = SchedulerLimits(16, MAX_RUNNING, LONGEST, frozenset({EOS_TOKEN_ID}))
        scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), SchedulerSettings())
        self.pool, self.runner, self.scheduler = pool, runner, scheduler
        self.loop = LockstepLoop(runner, scheduler, group=group)
        self.loop.delayer = scheduler.admission.prefill_gate = delayer
        group.join(ME, lambda peer, body: None, self.loop.woken)
        self.output: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.failed: set[str] = set()

    def add(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.output[name] = []
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        self.loop.add(new_sequence((name, 1, 0), prompt, sampling, BLOCK_SIZE))

    def callbacks(self) -> StepCallbacks:
        return StepCallbacks(lambda plan: self.pool.check_integrity(), self._committed, self._failed)

    def _committed(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.output[output.sequence.key[0]] += output.token_ids
            if output.finish is not None:
                self.finished.add(output.sequence.key[0])

    def _failed(self, sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        self.failed |= {sequence.key[0] for sequence in sequences}


class Group:
    def __init__(self, size: int, delayer: Callable[[], PrefillDelayer | None] = lambda: None) -> None:
        barrier, local = threading.Barrier(size), LocalGroup(size)
        self.steps: list[list[int]] = [[] for _ in range(size)]
        self.ranks = [
            Rank(each, Meeting(barrier, steps), delayer()) for each, steps in zip(local.ranks, self.steps, strict=True)
        ]

    @property
    def num_passes(self) -> list[int]:
        return [rank.loop.num_passes for rank in self.ranks]

    async def run(self, test: Callable[[], object]) -> None:
        self.running = [asyncio.create_task(rank.loop.run(rank.callbacks())) for rank in self.ranks]
        try:
            await asyncio.wait_for(test(), PATIENCE_S)  # type: ignore[arg-type]
        finally:
            for rank in self.ranks:
                rank.loop.stop()
            self.ends = await asyncio.gather(*self.running, return_exceptions=True)

    async def until_asleep(self) -> None:
        """Until no rank has work, and no pass is taken any more."""
        while True:
            before = self.num_passes
            await asyncio.sleep(0.02)
            if self.num_passes == before and not any(rank.scheduler.has_work for rank in self.ranks):
                return


@dataclass(frozen=True)
class Job:
    rank: int
    after_passes: int
    prompt: tuple[int, ...]
    max_tokens: int


JOBS = st.lists(
    st.builds(
        Job,
        rank=st.integers(0, 2),
        after_passes=st.integers(0, 30),
        prompt=st.lists(st.integers(1, 9), min_size=1, max_size=20).map(tuple),
        max_tokens=st.integers(1, 12),
    ),
    min_size=1,
    max_size=10,
)


@given(JOBS, st.sampled_from([None, 1, 5, 1000]), st.booleans())
@example([Job(0, 0, (1,), 3)], 1000, True)
@settings(max_examples=examples(100))
def test_every_rank_takes_every_step_and_no_token_depends_on_it(
    jobs: list[Job], max_delay_passes: int | None, bounded: bool
) -> None:
    def delayer() -> PrefillDelayer | None:
        if max_delay_passes is None:
            return None
        passes = min(max_delay_passes, 50) if bounded else max_delay_passes
        return PrefillDelayer(DelayerSettings(MAX_RUNNING, passes, 0.05))

    async def test() -> None:
        waiting = {f"r{number}": job for number, job in enumerate(jobs)}
        while waiting:
            for name, job in list(waiting.items()):
                if group.num_passes[0] >= job.after_passes or all(not r.scheduler.has_work for r in group.ranks):
                    del waiting[name]
                    group.ranks[job.rank].add(name, job.prompt, job.max_tokens)
            await asyncio.sleep(0)
        await group.until_asleep()

    group = Group(3, delayer)
    asyncio.run(group.run(test))
    assert group.ends == [None] * 3
    assert len(set(map(len, group.steps))) == 1
    assert len({*group.num_passes}) == 1
    for number, job in enumerate(jobs):
        sampling = Sampling(temperature=0.0, max_tokens=job.max_tokens)
        expected = expected_tokens(job.prompt, sampling, LONGEST)
        assert group.ranks[job.rank].output[f"r{number}"] == expected
    if max_delay_passes is not None:
        outcomes = [rank.loop.delayer.totals.outcomes for rank in group.ranks if rank.loop.delayer is not None]
        assert outcomes[0] == outcomes[1] == outcomes[2]


def test_an_idle_group_sleeps_and_any_rank_wakes_it() -> None:
    async def test() -> None:
        for number in range(6):
            await group.until_asleep()
            before = group.num_passes
            group.ranks[number % 3].add(f"r{number}", (1, 2, number + 1), 4)
            await group.until_asleep()
            assert group.num_passes > before

    group = Group(3)
    asyncio.run(group.run(test))
    assert [len(rank.finished) for rank in group.ranks] == [2, 2, 2]


def test_a_step_that_fails_on_one_rank_fails_its_sequences_alone() -> None:
    async def test() -> None:
        group.ranks[0].runner.fails = 1
        for rank in group.ranks:
            rank.add("r", (1, 2, 3), 5)
        await group.until_asleep()
        group.ranks[0].add("again", (1, 2, 3), 5)
        await group.until_asleep()

    group = Group(2)
    asyncio.run(group.run(test))
    assert [rank.failed for rank in group.ranks] == [{"r"}, set()]
    assert [rank.finished for rank in group.ranks] == [{"again"}, {"r"}]


def test_a_lost_rank_is_a_lost_group() -> None:
    async def test() -> None:
        await group.until_asleep()
        group.ranks[1].runner.is_lost = True
        group.ranks[0].runner._barrier.abort()
        group.ranks[0].runner.is_lost = True
        group.ranks[0].add("r", (1, 2, 3), 5)
        while not group.ranks[0].failed:
            await asyncio.sleep(0.01)

    group = Group(2)
    asyncio.run(group.run(test))
    assert all(isinstance(end, DeviceLost) for end in group.ends)


def test_ranks_leave_when_all_have_drained() -> None:
    left: list[int] = []

    async def test() -> None:
        for number, rank in enumerate(group.ranks):
            rank.loop.on_all_leaving = lambda number=number: left.append(number)  # type: ignore[misc]
        group.ranks[0].loop.leave_together()
        await group.until_asleep()
        group.ranks[1].add("r", (1, 2, 3), 5)  # the first takes part in the steps for it
        await group.until_asleep()
        assert not left
        group.ranks[1].loop.leave_together()
        while len(left) < 2:
            await asyncio.sleep(0)

    group = Group(2)
    asyncio.run(group.run(test))
    assert group.ranks[1].finished == {"r"}
    assert {*left} == {0, 1}


def test_no_step_begins_once_all_leave() -> None:
    """A rank that has gone already would be missing in it."""
    num_steps: list[int] = []

    async def test() -> None:
        await group.until_asleep()
        num_steps.extend(map(len, group.steps))
        for rank in group.ranks:
            rank.loop.leave_together()  # wakes the rank, and that alone would mean a step
        await asyncio.wait(group.running)

    group = Group(2)
    asyncio.run(group.run(test))
    assert [len(steps) for steps in group.steps] == num_steps
    assert group.ends == [None, None]
