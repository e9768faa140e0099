"""A fleet in virtual time: the router's real view, placement and load counting with simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrelay.device_profiles import Profile
from kvrelay.kv.hashing import BlockHash
from kvrelay_bench.traces import TracedRequest
from kvrelay_router.dispatch.placement import Placement, PromptPrefixes, Work, work_of
from kvrelay_router.fleet.load import Held, OutstandingLoad
from kvrelay_router.fleet.view import FleetView
from kvrelay_router.routing.estimates import BlockNaming, Decision
from kvrelay_router.routing.policy import PolicyName
from kvrelay_simulator.workers import (
    FINGERPRINT,
    Request,
    SimulatedDecode,
    SimulatedPrefill,
    SimulatedWorker,
    VirtualClock,
    WorkerSettings,
)

MESSAGE_S = 5e-4
STATUS_INTERVAL_S = 1.0


class CannotServe(ValueError):
    """A request does not fit any worker of this fleet."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Settings of a run. Without decode workers every request ends at its first token. `decode_profile`: of decode
    workers, if they have other devices."""

    profile: Profile
    num_prefill: int
    num_decode: int
    policy: PolicyName = "cost"
    local_prefill_tokens: int | None = None
    has_index: bool = True
    workers: WorkerSettings = field(default_factory=WorkerSettings)
    decode_profile: Profile | None = None


class CacheView:
    """A `PrefixView` that is always right, because it reads the caches."""

    def __init__(self, workers: Sequence[SimulatedWorker]) -> None:
        self._workers = workers

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Number of cached leading blocks by worker."""
        found = {worker.name: worker.cache.peek(hashes) for worker in self._workers}
        return {name: num_blocks for name, num_blocks in found.items() if num_blocks}


class SimulatedFleet:
    """One run. Call `run` once."""

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.clock = VirtualClock()
        options, clock, decode = settings.workers, self.clock, settings.decode_profile or settings.profile
        self.prefill = [
            SimulatedPrefill(f"prefill-{i}", settings.profile, options, clock) for i in range(settings.num_prefill)
        ]
        self.decode = [SimulatedDecode(f"decode-{i}", decode, options, clock) for i in range(settings.num_decode)]
        self.workers: dict[str, SimulatedWorker] = {worker.name: worker for worker in (*self.prefill, *self.decode)}
        self.load = OutstandingLoad(self.clock.now)
        self.view = FleetView(self.load)
        index = CacheView(list(self.workers.values())) if settings.has_index else None
        self.placement = Placement(
            self.view,
            settings.policy,
            settings.local_prefill_tokens,
            index,
            clock=self.clock.now,
            expects_prefill=settings.num_prefill > 0,
        )
        self._num_open = 0

    def run(
        self, trace: Sequence[TracedRequest], progress: Callable[[float], None] = lambda share: None
    ) -> list[Request]:
        """Runs to the last token. Calls `progress` with the share of finished requests."""
        self.view.registered([worker.record() for worker in self.workers.values()], 0.0)
        for worker in self.workers.values():
            self._report(worker, again=False)
        self._num_open = len(trace)
        for worker in self.workers.values():
            self.clock.after(STATUS_INTERVAL_S, partial(self._report, worker))
        requests: list[Request] = []
        for number, traced in enumerate(trace):
            self.clock.at(traced.arrival_s, partial(self._arrive, number, traced, requests))
        told = 0
        while self._num_open and self.clock.step():
            num_ended = len(trace) - self._num_open
            if num_ended * 100 // len(trace) > told:
                told = num_ended * 100 // len(trace)
                progress(num_ended / len(trace))
        if self._num_open:
            raise AssertionError(f"{self._num_open} requests wait, but no event is scheduled")
        return requests

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks or sequences are left after a run."""
        assert self.load.is_empty
        for worker in self.workers.values():
            worker.pool.check_integrity()
            assert not worker.scheduler.has_work and not worker.requests
            assert worker.pool.num_available == worker.pool.num_blocks

    def _report(self, worker: SimulatedWorker, again: bool = True) -> None:
        self.view.answered(worker.peer, worker.status(), self.clock.now_s)
        if again:
            self.clock.after(STATUS_INTERVAL_S, partial(self._report, worker))

    def _arrive(self, number: int, traced: TracedRequest, requests: list[Request]) -> None:
        num_output = traced.num_output_tokens if self.decode else 1
        tokens = traced.tokens()
        prompt = PromptPrefixes(tokens, affinity=traced.session)
        block_size = self.settings.workers.block_size
        needed = -(-(len(tokens) + num_output) // block_size)
        if needed > min(worker.pool.num_blocks for worker in self.workers.values()):
            raise CannotServe(f"request {number} needs {needed} blocks of {block_size} tokens, more than a pool has")
        decision = self.placement.place(str(number), prompt=prompt, needs_decode=num_output > 1)
        assert isinstance(decision, Decision), decision
        self.placement.placed(decision, prompt)
        held, work = Held(), work_of(decision, len(tokens))
        request = Request(
            number,
            self.clock.now_s,
            tokens,
            prompt.hashes(BlockNaming(FINGERPRINT, "", block_size)),
            num_output,
            owner=traced.tenant,
            on_first_token=lambda _: self._count(held, decision, work, computes=False),
            on_committed=lambda _: self._committed(held, decision, work, prompt),
            on_finished=lambda _: self._finished(held),
        )
        requests.append(request)
        self._count(held, decision, work)
        if decision.decode is not None:
            decode = self.workers[decision.decode.worker_id]
            assert isinstance(decode, SimulatedDecode)
            if decision.prefill is None:
                self.clock.after(MESSAGE_S, partial(decode.accept, request))
                return
            request.decode = decode
        assert decision.prefill is not None
        prefill = self.workers[decision.prefill.worker_id]
        assert isinstance(prefill, SimulatedPrefill)
        self.clock.after(MESSAGE_S, partial(prefill.accept, request))

    def _count(
        self, held: Held, decision: Decision, work: Work, *, computes: bool = True, pending: bool = True
    ) -> None:
        worker = decision.computes if computes else None
        self.load.move(
            held,
            worker.peer if worker is not None else None,
            work.num_tokens,
            decision.decode.peer if decision.decode is not None else None,
            num_pairs=work.num_pairs,
            num_pending_blocks=work.num_decode_blocks if pending else 0,
        )

    def _committed(self, held: Held, decision: Decision, work: Work, prompt: PromptPrefixes) -> None:
        self.placement.handed_over(decision, prompt)
        self._count(held, decision, work, computes=False, pending=False)

    def _finished(self, held: Held) -> None:
        self.load.move(held, None, 0, None)
        self._num_open -= 1
