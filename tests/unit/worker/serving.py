"""A role around a step loop over a model that fails when told: jobs arrive, stop and are aborted at odd moments, and a
peer writes into whatever is free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import FinishReason, Grammar, GrammarKind, Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import RowsFailed, StepResult, WorkerBatch
from kvrelay.worker.launchers import choose_launcher
from kvrelay.worker.rank_loops import PipelinedStepLoop
from kvrelay.worker.step_loop import StepCallbacks, StepLoop
from tests.fakes.guessing_speculator import GuessingSpeculator
from tests.fakes.hash_runner import EOS_TOKEN_ID, HashRunner, expected_tokens
from tests.fakes.queued_runner import QueuedRunner
from tests.fakes.sequences import new_sequence
from tests.fakes.waiting import PATIENCE_S

BLOCK_SIZE = 4
NUM_BLOCKS = 14
LONGEST = NUM_BLOCKS * BLOCK_SIZE


@dataclass(frozen=True)
class Job:
    """`stop_at`: its output's token of that index is a stop token. `abort_at`: it is aborted once it has so many
    tokens, or at once. `fail_at`: its step that computes this position fails, once."""

    prompt: tuple[int, ...]
    max_tokens: int
    after_step: int
    stop_at: int | None
    abort_at: int | None
    fail_at: int | None
    prefill_only: bool
    scored: bool  # all of its prompt is computed, cached or not: it comes to have blocks that others have, too

    @property
    def fail_at_computed(self) -> int | None:
        """`fail_at`, or the first position after it that no cache spares."""
        return None if self.fail_at is None else max(self.fail_at, len(self.prompt) - 1)

    @property
    def sampling(self) -> Sampling:
        plain = Sampling(
            temperature=0.0,
            max_tokens=self.max_tokens,
            prompt_logprobs=0 if self.scored else None,
            logprobs=0 if len(self.prompt) % 2 else None,
        )
        if self.stop_at is None:
            return plain
        output = expected_tokens(self.prompt, plain, LONGEST)
        stops = (output[self.stop_at],) if self.stop_at < len(output) else ()
        return msgspec.structs.replace(plain, stop_token_ids=stops)


maybe = st.one_of(st.none(), st.none(), st.integers(0, 12))
jobs = st.lists(
    st.builds(
        Job,
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=24).map(tuple),
        max_tokens=st.integers(0, 20),
        after_step=st.integers(0, 12),
        stop_at=st.one_of(st.none(), st.integers(0, 12)),
        abort_at=maybe,
        fail_at=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)),
        prefill_only=st.sampled_from([False, False, False, True]),
        scored=st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=10,
)
MOST_DRAFTS = st.sampled_from([0, 0, 1, 3, 9])  # fewer and more tokens than a block holds


class FailingRunner(HashRunner):
    """Blames single sequences, or nobody: then the whole step fails. A forward computes when it is `let_run`."""

    def __init__(
        self, fail_at: dict[SequenceKey, int], num_slots: int, *, blame: bool, num_blocks: int = NUM_BLOCKS
    ) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, LONGEST, num_host_slots=num_slots)
        self.fail_at = fail_at
        self.blame = blame
        self.let_run = threading.Semaphore(0)

    def execute(self, batch: WorkerBatch) -> StepResult:
        assert self.let_run.acquire(timeout=PATIENCE_S)
        keys = []
        for row in batch.rows:
            at = self.fail_at.get(row.key)
            if at is not None and row.position <= at < row.position + len(row.token_ids):
                keys.append(row.key)
                del self.fail_at[row.key]
        if keys and self.blame:
            self._swap(batch)  # copies come before the rows
            raise RowsFailed("as told", keys)
        if keys:
            raise RuntimeError("as told")
        return super().execute(batch)


MakeRunner = Callable[[dict[SequenceKey, int], int], FailingRunner | QueuedRunner]
"""Given what fails where, and the number of swap slots."""


def failing(*, blame: bool, num_blocks: int = NUM_BLOCKS) -> MakeRunner:
    return lambda fail_at, num_slots: FailingRunner(fail_at, num_slots, blame=blame, num_blocks=num_blocks)


@dataclass
class Served:
    """What came of each job, by its number."""

    output: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)
    most_tokens: int = 0  # that one step brought a sequence


class Service:
    """A role around a step loop: adds jobs as steps go by, aborts, and writes into free blocks as a peer would."""

    def __init__(
        self,
        wanted: list[Job],
        scheduler: str,
        num_slots: int,
        make_runner: MakeRunner,
        *,
        overlap: bool,
        most_drafts: int = 0,
        jump_forward: bool = False,
        num_blocks: int = NUM_BLOCKS,
        pipeline_depth: int = 1,
    ) -> None:
        self.wanted = dict(enumerate(wanted))
        self.waiting = dict(self.wanted)
        self.served = Served()
        keys = {number: (f"r{number}", 1, 0) for number in self.wanted}
        fail_at = {keys[number]: job.fail_at for number, job in self.wanted.items() if job.fail_at is not None}
        self.runner = make_runner(fail_at, num_slots)
        self.runner.late_every = 4
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        limits = SchedulerLimits(24, 6, LONGEST, frozenset({EOS_TOKEN_ID}))
        policy = SchedulerSettings(
            preemption="swap",
            num_host_slots=num_slots,
            jump_forward=jump_forward,
            samples_behind=isinstance(self.runner, QueuedRunner),
            pipeline_depth=pipeline_depth,
        )
        self.cache = PrefixCache(self.pool)
        built = make_scheduler(scheduler, limits, self.pool, self.cache, policy)
        built.lifecycle.speculator = GuessingSpeculator(most_drafts)
        self.scheduler = built
        launcher = choose_launcher(self.runner, overlap=overlap)
        make_loop = PipelinedStepLoop if pipeline_depth > 1 else StepLoop
        self.loop = make_loop(self.runner, built, overlap=overlap, make_launcher=launcher)
        if isinstance(self.loop, PipelinedStepLoop):
            self.loop.max_in_flight = policy.max_uncommitted
        self.num_steps = 0
        self.num_planned = 0  # and not landed
        self.reserved: list[int] = []

    def add_due(self) -> None:
        for number, job in list(self.waiting.items()):
            if job.after_step <= self.num_steps or not self.scheduler.has_work:
                del self.waiting[number]
                self.served.output[number] = []
                self.loop.add(self.make_sequence(number, job))

    def make_sequence(self, number: int, job: Job) -> Sequence:
        sampling = job.sampling
        if self.scheduler.settings.jump_forward and number % 4:  # every fourth is unconstrained
            sampling = msgspec.structs.replace(sampling, grammar=Grammar(kind=GrammarKind.REGEX, text=".*"))
        return new_sequence((f"r{number}", 1, 0), job.prompt, sampling, BLOCK_SIZE, prefill_only=job.prefill_only)

    def planned(self, plan: StepPlan) -> None:
        self.pool.check_integrity()
        if not plan.has_work:
            self.release()  # the peer ends, and makes room
            self.loop.wake()
            return
        if not self.num_planned:
            self.runner.let_run.release()
        self.num_planned += 1
        self.abort_due(odd=False)

    def committed(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            number = int(output.sequence.key[0][1:])
            assert number not in self.served.finish and number not in self.served.failed | self.served.aborted
            assert output.index == len(self.served.output[number]) or not output.token_ids
            self.served.output[number] += output.token_ids
            asked = output.sequence.sampling.logprobs is not None
            assert [entry.token_id for entry in output.logprobs] == (list(output.token_ids) if asked else [])
            self.served.most_tokens = max(self.served.most_tokens, len(output.token_ids))
            if output.finish is not None:
                self.served.finish[number] = output.finish
            elif self.wanted[number].prefill_only and output.prefilled:
                self.end(number)
        self.abort_due(odd=True)
        self.num_planned -= 1
        self.after_step()
        if self.num_planned:  # the step behind computes as late as can be: whoever freed its blocks too early is found
            self.runner.let_run.release()

    def failed(self, sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        self.num_planned = 0
        while self.runner.let_run.acquire(blocking=False):
            pass  # those of steps that did not run
        assert cause.endswith("as told")
        self.served.failed |= {int(s.key[0][1:]) for s in sequences} - self.served.aborted
        self.after_step()

    def abort_due(self, *, odd: bool) -> None:
        """Half of those to abort go when a step was published, half when one was planned, maybe with them in it."""
        for number, output in self.served.output.items():
            at = self.wanted[number].abort_at
            over = self.served.finish.keys() | self.served.failed | self.served.aborted
            if at is not None and at % 2 == odd and len(output) >= at and number not in over:
                self.end(number)

    def end(self, number: int) -> None:
        self.served.aborted.add(number)
        self.loop.abort((f"r{number}", 1, 0))

    def after_step(self) -> None:
        self.num_steps += 1
        self.write_as_a_peer()
        self.pool.check_integrity()
        self.scheduler.waiting.check_integrity()
        self.add_due()
        if not self.waiting and not self.scheduler.has_work:
            self.loop.stop()

    def write_as_a_peer(self) -> None:
        """Whatever is available may be written by others at once; and what is theirs nobody else may touch."""
        self.release()
        if self.num_steps % 3:
            self.reserved = self.pool.allocate(min(2, self.pool.num_available), BlockState.RESERVED)
            self.runner.pool_bytes[self.reserved] = 0xAB

    def release(self) -> None:
        mine = self.runner.pool_bytes[self.reserved]
        assert (mine == 0xAB).all(), "a step wrote into blocks that a peer had"
        self.pool.release(self.reserved, BlockState.RESERVED)
        self.reserved = []

    async def serve(self) -> Served:
        self.add_due()
        await asyncio.wait_for(self.loop.run(StepCallbacks(self.planned, self.committed, self.failed)), PATIENCE_S)
        self.release()
        return self.served


def serve(service: Service) -> Service:
    """To the end; nothing is left behind."""
    asyncio.run(service.serve())
    assert service.pool.num_available == service.pool.num_blocks, "blocks were left behind"
    assert service.runner.num_sequences == 0, "sampler state was left behind"
    assert not service.scheduler.lifecycle.in_progress
    assert service.scheduler.lifecycle.offload.use.num_used_slots == 0
    forced = service.scheduler.lifecycle.forced
    assert not forced.jumping and not forced.unsettled, "records of sequences were left behind"
    return service


def check_tokens(wanted: list[Job], served: Served, *, blame: bool) -> None:
    for number, job in enumerate(wanted):
        expected = expected_tokens(job.prompt, job.sampling, LONGEST)
        output = served.output[number]
        assert output == expected[: len(output)], f"r{number} has other tokens"
        if number in served.finish:
            assert output == expected[: 1 if job.prefill_only else None]
            ended_by_length = not output or (len(output) >= job.max_tokens or len(output) + len(job.prompt) >= LONGEST)
            assert (served.finish[number] is FinishReason.STOP_TOKEN) or ended_by_length
        elif number in served.failed:
            assert not blame or job.fail_at is not None, "it was not to blame"
        else:
            assert number in served.aborted
