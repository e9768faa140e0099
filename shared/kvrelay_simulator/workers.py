"""Simulated workers: the services' schedulers, pools and caches, with steps timed on a virtual clock.

As in the services: prefill asks decode when a prompt's first chunk is scheduled, holds the blocks until decode has
committed, and its first token does not wait for the transfer; decode queues handoffs in its scheduler, runs them once
their KV has arrived, and computes whole prompts that the router sends to it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvrelay.device_profiles import PipelineClock, Profile, StepLoad
from kvrelay.fleet.worker_registry import WorkerRecord
from kvrelay.kv.hashing import BlockHash, root_hash
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.messages import PROTOCOL_VERSION, PeerRef, Status
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import QueueOrderName, SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Origin, RemoteKV, Sequence, TokenBuffer
from kvrelay.step.batch import RowResult, StepResult
from kvrelay.worker.reports import report_load
from kvrelay.worker.speeds import SpeedMeter
from kvrelay_bench.traces import Tokens


class VirtualClock:
    """A clock in seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.now_s

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Schedules a call at this time, or now if it has passed."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Schedules a call after a delay."""
        self.at(self.now_s + delay_s, event)

    def step(self) -> bool:
        """Runs the next event; False if there is none."""
        if not self._events:
            return False
        self.now_s, _, event = heapq.heappop(self._events)
        event()
        return True


FINGERPRINT = "simulated"
MODEL = "simulated"
TOKEN, LAST_TOKEN = 1, 2
"""The sampled token. Schedulers know only the maximum length; the last token ends the request like a stop token."""
HANDOFF_S = 1e-3  # time of a handoff's messages, in addition to its transfer
ROUTER = PeerRef("router", "1", "tcp://router")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of the services' configuration. `kv_tokens`: tokens per pool; None: the profile's."""

    block_size: int = 64
    prefill_token_budget: int = 2048
    decode_token_budget: int = 512
    max_running: int = 256
    max_model_len: int = 1 << 18
    scheduler: str = "sarathi"
    queue_order: QueueOrderName = "fcfs"
    kv_tokens: int | None = None


def _nothing(request: Request) -> None:
    pass


@dataclass(slots=True, eq=False)
class Request:
    """One request and its times in virtual seconds."""

    number: int
    arrival_s: float
    tokens: Tokens
    hashes: list[BlockHash]
    num_output: int
    on_first_token: Callable[[Request], None] = _nothing
    on_committed: Callable[[Request], None] = _nothing
    on_finished: Callable[[Request], None] = _nothing
    owner: str = ""
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    longest_gap_s: float = 0.0  # between two tokens
    num_cached_tokens: int = 0
    computed_by: str = ""
    decode: SimulatedDecode | None = None
    held: list[int] = field(default_factory=list)  # blocks kept on prefill for the handoff
    link_free_s: float | None = None  # time at which the early blocks have left; None: not granted
    num_missing_blocks: int = 0
    prefilled_s: float | None = None

    def received(self, now_s: float) -> None:
        """Notes the time of one step's tokens."""
        if self.last_token_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_token_s)
        self.last_token_s = now_s

    def sequence(self, block_size: int) -> Sequence:
        """The sequence for a worker's scheduler."""
        sequence = Sequence(
            key=(str(self.number), 1, 0),
            tokens=TokenBuffer(self.tokens),
            num_prompt=len(self.tokens),
            sampling=Sampling(max_tokens=self.num_output, ignore_eos=True, stop_token_ids=(LAST_TOKEN,)),
            root=root_hash(model=FINGERPRINT),
            table=BlockTable(block_size),
            origin=Origin(ROUTER, owner=self.owner),
        )
        sequence.hashes = list(self.hashes)
        return sequence


class SimulatedWorker:
    """Parts common to both roles."""

    role: str

    def __init__(self, name: str, profile: Profile, settings: WorkerSettings, clock: VirtualClock) -> None:
        self.name = name
        self.profile = profile
        self.settings = settings
        self.clock = clock
        self.pool = BlockPool((settings.kv_tokens or profile.kv_tokens) // settings.block_size, settings.block_size)
        self.cache = PrefixCache(self.pool)
        is_prefill = self.role == "prefill"
        self.token_budget = settings.prefill_token_budget if is_prefill else settings.decode_token_budget
        max_running = min(settings.max_running, self.token_budget)
        limits = SchedulerLimits(self.token_budget, max_running, settings.max_model_len, frozenset())
        policy = SchedulerSettings(
            queue_order=settings.queue_order,
            pipeline_depth=profile.pipeline_depth,
        )
        self.scheduler = make_scheduler(settings.scheduler, limits, self.pool, self.cache, policy)
        self.speeds = SpeedMeter()
        self.busy_s = 0.0
        self.num_steps = 0
        self.requests: dict[tuple[str, int, int], Request] = {}
        self.pipeline = PipelineClock(profile.pipeline_depth)
        self._in_flight = 0

    @property
    def peer(self) -> PeerRef:
        """The worker's address for the router."""
        return PeerRef(self.name, "1", f"tcp://{self.name}")

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.name,
            role="prefill" if self.role == "prefill" else "decode",
            incarnation="1",
            address=f"tcp://{self.name}",
            model=MODEL,
            fingerprint=FINGERPRINT,
            protocol_version=PROTOCOL_VERSION,
            block_size=self.settings.block_size,
            num_blocks=self.pool.num_blocks,
            max_model_len=self.settings.max_model_len,
            vocab_size=1 << 31,
            block_bytes=self.profile.kv_bytes_per_token * self.settings.block_size,
            token_budget=self.token_budget,
        )

    def status(self) -> Status:
        """The status report for routers."""
        plain, named = report_load(self.scheduler, self.speeds, self.clock.now_s)
        blocks = {state.value: count for state, count in self.pool.counts().items()}
        return Status(
            query=1, draining=False, queues=self.queues(), blocks=blocks, totals={}, load=named.get(ROUTER, plain)
        )

    def queues(self) -> dict[str, int]:
        """Implemented by each role."""
        return {}

    def wake(self) -> None:
        """Begins steps until the first part of the pipeline is busy or there is no work."""
        while self._in_flight < self.profile.pipeline_depth and self.pipeline.free_s <= self.clock.now_s:
            plan = self.scheduler.schedule_ahead() if self._in_flight else self.scheduler.schedule()
            if plan is None:
                return
            self.planned(plan)
            if plan.rows:
                self._begin(plan)
            elif self._in_flight or not plan.preempted:
                return

    def _begin(self, plan: StepPlan) -> None:
        load = StepLoad.of((row.position, row.num_tokens, row.is_prefill) for row in plan.rows)
        part_s = self.profile.step_s(load) / self.profile.pipeline_depth
        self._in_flight += 1
        self.began(plan, part_s)
        self.clock.at(self.pipeline.enter(self.clock.now_s, part_s), partial(self._done, plan, part_s))
        if self.profile.pipeline_depth > 1:
            self.clock.at(self.pipeline.free_s, self.wake)

    def _done(self, plan: StepPlan, step_s: float) -> None:
        self._in_flight -= 1
        rows = [RowResult((self._draw(row.sequence),) if row.sample else ()) for row in plan.rows]
        outputs = self.scheduler.commit(plan, StepResult(plan.step, rows, step_s))
        self.speeds.stepped(plan, step_s)
        self.committed(outputs)
        self.wake()

    def _draw(self, sequence: Sequence) -> int:
        is_last = sequence.num_output + 1 == self.requests[sequence.key].num_output
        return LAST_TOKEN if is_last else TOKEN

    def began(self, plan: StepPlan, step_s: float) -> None:
        """Called when a step begins, with its duration on each part of a pipeline."""
        self.busy_s += step_s
        self.num_steps += 1

    def planned(self, plan: StepPlan) -> None:
        """Implemented by each role."""

    def committed(self, outputs: list[SequenceOutput]) -> None:
        """Implemented by each role."""
        raise NotImplementedError


class SimulatedPrefill(SimulatedWorker):
    """Computes prompts and hands them over."""

    role = "prefill"

    def __init__(self, name: str, profile: Profile, settings: WorkerSettings, clock: VirtualClock) -> None:
        super().__init__(name, profile, settings, clock)
        self._link_free_s = 0.0

    def accept(self, request: Request) -> None:
        """Takes a `Prefill` from the router."""
        sequence = request.sequence(self.settings.block_size)
        sequence.prefill_only = True
        request.computed_by = self.name
        self.requests[sequence.key] = request
        self.scheduler.add(sequence)
        self.wake()

    def planned(self, plan: StepPlan) -> None:
        """Sends `Reserve` for prompts whose first chunk is scheduled."""
        for sequence in plan.admitted:
            request = self.requests[sequence.key]
            request.num_cached_tokens = sequence.num_cached_tokens
            if request.decode is not None and not sequence.num_preemptions:
                request.decode.ask(request, self)

    def committed(self, outputs: list[SequenceOutput]) -> None:
        """Sends the first token; the blocks are kept until decode has them."""
        for output in outputs:
            if not output.prefilled:
                continue
            request = self.requests.pop(output.sequence.key)
            request.prefilled_s = request.first_token_s = self.clock.now_s
            request.received(self.clock.now_s)
            if output.finish is None:
                request.held = output.sequence.table.ids.tolist()
                self.pool.hold(request.held, BlockState.IN_FLIGHT)
                self.scheduler.abort(output.sequence.key)
                self._finish_transfer(request)
            request.on_first_token(request)
            if output.finish is not None:
                request.finished_s = self.clock.now_s
                request.on_finished(request)

    def granted(self, request: Request, num_missing_blocks: int) -> None:
        """Decode granted slots: computed blocks are sent. One link, first come first served."""
        assert request.decode is not None
        num_bytes = num_missing_blocks * self.settings.block_size * self.profile.kv_bytes_per_token
        push_s = num_bytes / self._transfer_bytes_s(request.decode)
        request.num_missing_blocks = num_missing_blocks
        request.link_free_s = self._link_free_s = max(self._link_free_s, self.clock.now_s) + push_s
        self.speeds.links.pushed(request.decode.name, num_bytes, push_s, self.clock.now_s)
        self._finish_transfer(request)

    def _finish_transfer(self, request: Request) -> None:
        """The blocks of the last chunk cannot leave before it is computed."""
        if request.link_free_s is None or request.prefilled_s is None or request.decode is None:
            return
        num_last = min(request.num_missing_blocks, -(-self.token_budget // self.settings.block_size))
        block_bytes = self.settings.block_size * self.profile.kv_bytes_per_token
        last_s = request.prefilled_s + num_last * block_bytes / self._transfer_bytes_s(request.decode)
        self.clock.at(max(request.link_free_s, last_s) + HANDOFF_S, partial(self._handed_over, request))

    def _transfer_bytes_s(self, decode: SimulatedDecode) -> float:
        """The links of the worker with fewer or slower devices limit a handoff."""
        return min(self.profile.transfer_bytes_s, decode.profile.transfer_bytes_s)

    def _handed_over(self, request: Request) -> None:
        assert request.decode is not None
        request.decode.commit(request)
        self.pool.release(request.held, BlockState.IN_FLIGHT)
        request.held = []
        self.wake()


class SimulatedDecode(SimulatedWorker):
    """Continues prompts that were handed over, or computes them."""

    role = "decode"

    def __init__(self, name: str, profile: Profile, settings: WorkerSettings, clock: VirtualClock) -> None:
        super().__init__(name, profile, settings, clock)
        self._arriving: dict[tuple[str, int, int], Sequence] = {}  # handoffs that are not committed
        self._senders: dict[tuple[str, int, int], SimulatedPrefill] = {}

    def queues(self) -> dict[str, int]:
        """Queue lengths, with pending handoffs."""
        return {"asked": len(self._arriving)}

    def accept(self, request: Request) -> None:
        """Takes a `Generate` from the router."""
        sequence = request.sequence(self.settings.block_size)
        request.computed_by = self.name
        self.requests[sequence.key] = request
        self.scheduler.add(sequence)
        self.wake()

    def ask(self, request: Request, sender: SimulatedPrefill) -> None:
        """Takes a `Reserve` from prefill."""
        sequence = request.sequence(self.settings.block_size)
        sequence.remote = RemoteKV(sender.peer)
        self.requests[sequence.key] = request
        self._arriving[sequence.key] = sequence
        self._senders[sequence.key] = sender
        self.scheduler.add(sequence)
        self._grant(self.scheduler.reserve())

    def commit(self, request: Request) -> None:
        """All blocks and the first token have arrived."""
        key = (str(request.number), 1, 0)
        sequence = self._arriving.pop(key)
        sequence.num_computed = sequence.num_tokens
        sequence.tokens.append(TOKEN)
        self.scheduler.adopt(sequence)
        request.on_committed(request)
        self._grant(self.scheduler.reserve())
        self.wake()

    def planned(self, plan: StepPlan) -> None:
        """Counts cached tokens of prompts that decode computes as hits."""
        for sequence in plan.admitted:
            if not sequence.num_preemptions:
                self.requests[sequence.key].num_cached_tokens = sequence.num_cached_tokens
        self._grant(plan.reservations)

    def committed(self, outputs: list[SequenceOutput]) -> None:
        """Counts tokens and ends finished requests."""
        for output in outputs:
            request = self.requests[output.sequence.key]
            if output.token_ids:
                request.received(self.clock.now_s)
            if request.first_token_s is None and output.token_ids:
                request.first_token_s = self.clock.now_s
                request.on_first_token(request)
            if output.finish is not None:
                request.finished_s = self.clock.now_s
                del self.requests[output.sequence.key]
                request.on_finished(request)
        self._grant(self.scheduler.reserve())

    def _grant(self, reserved: Iterable[Sequence]) -> None:
        for sequence in reserved:
            num_missing = sequence.table.num_blocks - sequence.num_published
            self._senders.pop(sequence.key).granted(self.requests[sequence.key], num_missing)
