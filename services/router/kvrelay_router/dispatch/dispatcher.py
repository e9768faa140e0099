"""Connects the HTTP layer and the workers: takes requests, sends messages, and delivers tokens.

`attempt.py` decides about retries, `attempt_driver.py` carries them out.

Everything runs on one event loop. Each event is handled completely before the next one, so there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kvrelay.fleet.index import IndexFeed
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.link import LinkEvent
from kvrelay.protocol.messages import PeerRef, Prompt, pack_tokens
from kvrelay.protocol.sampling import FinishReason
from kvrelay.telemetry.event_log import EventLog, recorded
from kvrelay.telemetry.tracer import Tracer
from kvrelay.text.request.validation import ModelLimits
from kvrelay_router.dispatch.attempt import SequenceAttempts
from kvrelay_router.dispatch.attempt_driver import AttemptDriver, first_search
from kvrelay_router.dispatch.events import Cancelled, SequenceSpec, StopMatched, WorkerBack
from kvrelay_router.dispatch.inbox import Inbox
from kvrelay_router.dispatch.interface import (
    DispatchSettings,
    GenerateRequest,
    NoWorkerReady,
    RequestFailed,
    TooLate,
    session_key,
)
from kvrelay_router.dispatch.placement import Placement, PromptPrefixes
from kvrelay_router.dispatch.records import AttemptTracing, RequestCounts, RequestRecords, latency_of, timeline_of
from kvrelay_router.dispatch.running_request import ActiveSequence, PushQueue, RunningRequest, TokenIntake, own_figures
from kvrelay_router.fleet.load import OutstandingLoad
from kvrelay_router.fleet.view import FleetView, KnownWorker, WorkerState
from kvrelay_router.fleet.watch import FleetWatch, ListWorkers, StaticWorkers
from kvrelay_router.routing.estimates import NoPlacement

log = logging.getLogger(__name__)

OVERLOAD_RETRY_AFTER_S = 1.0
MAX_MISSED_SIGNS = 3
"""A worker that missed this many life signs gets no requests while other workers send theirs: it may be dead. The link
reports the loss only later."""
LONG_PROMPT_TOKENS = 4096
"""Longer prompts are hashed in a thread. A block takes about a microsecond."""
LIVE_TIMEOUT_S = 0.5
RECENT_REQUESTS = 2000
LATENCY_REQUESTS = 500
"""`/fleet` reports percentiles over this many requests."""


class RouterDispatcher:
    """Runs requests on the workers of the fleet. Call `start` on the event loop; `begin_drain`, `close` at the end."""

    def __init__(
        self,
        open_messenger: Callable[[Callable[[LinkEvent], None]], Messenger],
        list_workers: ListWorkers | None,
        settings: DispatchSettings | None = None,
        events: EventLog | None = None,
        index: IndexFeed | None = None,
        tracer: Tracer | None = None,
        static: StaticWorkers | None = None,
    ) -> None:
        self._tracing = AttemptTracing(tracer) if tracer is not None else None
        self._events = events
        self._index = index
        self.settings = settings or DispatchSettings()
        self.load = OutstandingLoad()
        self.view = FleetView(self.load, self._on_state, tokenizer=self.settings.tokenizer)
        self.messenger = open_messenger(lambda event: self._inbox.take(event))
        self._placement = Placement(
            self.view,
            self.settings.policy,
            self.settings.local_prefill_tokens,
            self._index,
            is_silent=self._is_silent,
        )
        self._driver = AttemptDriver(
            self.messenger,
            self._placement,
            self.load,
            self._sequence_ended,
            lambda running, error: self._end(running, "failed", error),
            self.settings.max_wait_for_worker_s,
            self._tracing,
        )
        self.watch = FleetWatch(
            self.view,
            list_workers,
            self.messenger.send,
            self._fleet_changed,
            static=static,
            registry_interval_s=self.settings.registry_interval_s,
            status_interval_s=self.settings.status_interval_s,
        )
        self._has_met_worker = asyncio.Event()
        self._records = RequestRecords(max(RECENT_REQUESTS, 2 * self.settings.max_requests))
        self._running: dict[RunningRequest, asyncio.TimerHandle] = {}  # value: the deadline's timer
        self._sequences: dict[tuple[str, int], ActiveSequence] = {}
        self._counts = RequestCounts()
        self._num_opening_tokens = 0
        self._pushes = PushQueue()
        self._inbox = Inbox(self._sequences, self._driver, self._placement, self.messenger, self.watch, self._records)
        self._is_accepting = True
        self._is_closed = False

    def _is_silent(self, peer: PeerRef) -> bool:
        """Returns whether the last message of a worker is so old that it may be dead."""
        return self.messenger.silent_s(peer) > MAX_MISSED_SIGNS * self.messenger.alive_interval_s

    @property
    def num_running(self) -> int:
        """The number of requests in progress."""
        return len(self._running)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the messenger and the watch over the fleet. Must be called on the event loop."""
        self.messenger.start()
        self.watch.start()
        if self._index is not None:
            self._index.start()

    def begin_drain(self) -> None:
        """`ready` returns False from now on. Requests on open connections are still accepted."""
        self._is_accepting = False

    async def close(self) -> None:
        """Cancels all requests on their workers and closes the sockets. Idempotent."""
        if self._is_closed:
            return
        self._is_accepting, self._is_closed = False, True
        for running in list(self._running):
            self._end(running, "failed", RequestFailed("the router is shutting down", FailureKind.ROUTER_SHUTDOWN))
        await self.watch.close()
        if self._index is not None:
            await self._index.close()
        self.messenger.close()

    # -- for the HTTP layer -------------------------------------------------------------------------------------------

    def limits(self) -> ModelLimits | None:
        """Returns None while no worker is known."""
        return self.view.limits(time.monotonic())

    async def first_limits(self) -> ModelLimits | None:
        """As `limits`, but waits for the first worker, for `max_wait_for_worker_s` at most."""
        if self.limits() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.max_wait_for_worker_s):
                    await self._has_met_worker.wait()
        return self.limits()

    def ready(self) -> bool:
        """Returns whether a request could be placed at this moment."""
        return self._is_accepting and self._placement.is_possible()

    def ready_workers(self) -> dict[str, int]:
        """Returns the number of workers that accept new requests, by role."""
        candidates = self.view.candidates(time.monotonic())
        return {"prefill": len(candidates.prefill), "decode": len(candidates.decode)}

    async def prepare(self, request: GenerateRequest) -> PromptPrefixes:
        """Computes the prompt's block hashes, on another thread if it is long."""
        prompt = self._unprepared(request)
        for naming in self._placement.namings():
            if prompt.num_tokens > LONG_PROMPT_TOKENS:
                await asyncio.to_thread(prompt.hashes, naming)
        return prompt

    def submit(self, request: GenerateRequest, prepared: PromptPrefixes | None = None) -> RunningRequest:
        """Starts a request, which may have to wait for a worker. Never blocks. Raises NoWorkerReady, also when too many
        requests are in progress; TooLate."""
        self._check_room(request)
        prompt = prepared or self._unprepared(request)
        deadline_s = min(request.timeout_s, self.settings.ttft_deadline_s or request.timeout_s)
        try:
            decision = self._placement.place(
                request.request_id,
                prompt=prompt,
                num_output=len(request.opening) + request.num_prompt_tokens - prompt.num_tokens,
                needs_decode=request.sampling.max_tokens - len(request.opening) > 1,
                deadline_s=deadline_s,
            )
        except TooLate:
            self._counts.add("refused", request.owner)
            raise
        if isinstance(decision, NoPlacement):
            return self._submit_waiting(request, prompt, decision.reason, deadline_s)
        running = self._begin(request, prompt)
        try:
            self._driver.place_all(list(running.sequences.values()), decision, first_search())
        except Exception as error:
            self._end(running, "failed", RequestFailed(str(error)))
            raise
        return running

    def _submit_waiting(
        self, request: GenerateRequest, prompt: PromptPrefixes, reason: str, deadline_s: float
    ) -> RunningRequest:
        if not self.settings.max_wait_for_worker_s:
            self._counts.add("refused", request.owner)
            raise NoWorkerReady(reason)
        running = self._begin(request, prompt)
        self._driver.await_first(running, reason, deadline_s)
        return running

    @staticmethod
    def _unprepared(request: GenerateRequest) -> PromptPrefixes:
        return PromptPrefixes(request.prompt_ids, request.cache_salt, request.session, session_key=request.session_key)

    async def fleet(self, owner: str | None = None) -> dict[str, Any]:
        """All workers with role, state, queues and blocks by state, asked live; JSON-ready. With an `owner`, decisions,
        latencies and counts of requests are those of its requests."""
        live = await self.watch.ask_all(LIVE_TIMEOUT_S)
        me = self.messenger.me
        return {
            "router": {
                "router_id": me.peer_id,
                "process_id": os.getpid(),
                "incarnation": me.incarnation,
                "address": me.address,
                "accepting": self._is_accepting,
                "registry": self.watch.registry_state,
            },
            "workers": self._describe_workers(live),
            **self._figures(owner),
            "latency": latency_of(self._records.latest(LATENCY_REQUESTS, owner)),
            "last_decisions": [
                decision
                for decision in self._placement.last_decisions
                if owner is None or self._records.get(decision["request_id"], owner) is not None
            ],
        }

    def figures(self) -> dict[str, Any]:
        """Returns counters and gauges of this router, and its workers by role and state. Sends no messages."""
        return self._figures() | {"worker_states": self.view.states(time.monotonic())}

    def _request_figures(self, owner: str | None) -> dict[str, int]:
        if owner is not None:
            records = self._records.latest(RECENT_REQUESTS, owner)
            figures = own_figures(self._running, records, owner)
        else:
            figures = {
                "running": len(self._running),
                "running_sequences": len(self._sequences),
                "sequences_waiting_for_worker": len(self._driver.waits),
                "retries": self._driver.num_retries,
            }
        return figures | {"protocol_errors": self._driver.num_illegal} | self._counts.of(owner)

    def _figures(self, owner: str | None = None) -> dict[str, Any]:
        fallbacks = self._placement.fallbacks
        return {
            "requests": self._request_figures(owner),
            "fallback": {
                "decode_alone_requests": fallbacks.num_requests,
                "active": fallbacks.is_active,
                "reason": fallbacks.reason,
            },
            "placements": self._placement.num_placed,
            "opening_tokens": self._num_opening_tokens,
            "cache": dict(self._inbox.cache),
            "prefix_index": self._index.describe() if self._index is not None else {"state": "off"},
        }

    def _describe_workers(self, live: frozenset[str]) -> list[dict[str, Any]]:
        now = time.monotonic()
        workers = self.view.describe(live, now)
        for worker in workers:
            key = worker["worker_id"], worker["incarnation"]
            worker["breaker"] = str(self._placement.breakers.state(key, now))
            # Until the link is lost, a dead worker and one without CPU time or network look alike.
            if worker["state"] == WorkerState.READY and not worker["live"] and worker["age_s"] >= LIVE_TIMEOUT_S:
                worker["state"] = "silent"
        return workers

    def recent_request(self, request_id: str, owner: str | None = None) -> dict[str, Any] | None:
        """Attempts, workers and block counters of a running or lately finished request; JSON-ready. None if it is
        unknown, or not of this owner."""
        record = self._records.get(request_id, owner)
        return record.as_json() if record is not None else None

    def recent_requests(self, limit: int, owner: str | None = None, session: str | None = None) -> list[dict[str, Any]]:
        """The latest requests of an owner and session (None: of all), the newest first; JSON-ready."""
        return [record.summary() for record in self._records.latest(limit, owner, session)]

    def end_session(self, session: str, owner: str = "") -> None:
        """No request of this owner's session will come. Workers learn it within about a second."""
        key = session_key(session, owner)
        self._placement.session_ended(key)
        self.watch.session_ended(key)

    async def timeline(self, request_id: str, owner: str | None = None) -> dict[str, Any] | None:
        """What happened to a recent request when, on the router and its workers, asked live; JSON-ready. None if it is
        unknown, or not of this owner."""
        record = self._records.get(request_id, owner)
        if record is None:
            return None
        events = await self.watch.ask_about(request_id, record.workers(), LIVE_TIMEOUT_S)
        return timeline_of(record, events)

    # -- beginnings and ends ------------------------------------------------------------------------------------------

    def _check_room(self, request: GenerateRequest) -> None:
        if self._is_closed:
            raise NoWorkerReady("the router is shutting down")
        if len(self._running) >= self.settings.max_requests:
            self._counts.add("refused", request.owner)
            limit = self.settings.max_requests
            raise NoWorkerReady(f"overloaded: {limit} requests are in progress", OVERLOAD_RETRY_AFTER_S)
        if self._records.get(request.request_id) is not None:
            raise ValueError(f"request id {request.request_id} was used already")

    def _begin(self, request: GenerateRequest, prefixes: PromptPrefixes) -> RunningRequest:
        running = RunningRequest(request, prefixes, self._stop, self._cancel, self._pushes)
        prompt = Prompt(
            tokens=prefixes.packed,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
            tenant=request.tenant,
            weight=request.weight,
            session=request.session_key,
            text_owner=request.text_owner,
            num_samples=1 if request.endings else request.num_sequences,
        )
        specs = [
            SequenceSpec(
                sequence=index,
                prompt=replace(prompt, sampling=request.endings[index].sampling) if request.endings else prompt,
                ending=pack_tokens(request.endings[index].token_ids) if request.endings else b"",
                opening=request.opening,
                max_attempts=self.settings.max_attempts,
            )
            for index in range(request.num_sequences)
        ]
        for spec in specs:
            sequence = self._make_sequence(spec, running)
            running.sequences[spec.sequence] = self._sequences[request.request_id, spec.sequence] = sequence
        loop = asyncio.get_running_loop()
        self._running[running] = loop.call_later(request.timeout_s, self._deadline_passed, running)
        self._records.add(running.record)
        self._counts.add("submitted", request.owner)
        self._num_opening_tokens += request.num_sequences * len(request.opening)
        return running

    def _make_sequence(self, spec: SequenceSpec, running: RunningRequest) -> ActiveSequence:
        attempts, given = SequenceAttempts(spec), (spec.sequence, spec.num_scores, spec.opening)
        intake = TokenIntake(*given)
        key = running.record.request_id, 0, spec.sequence
        handle_event = recorded(self._events, "attempts", key, attempts.handle, spec)
        handle_entry = recorded(self._events, "intake", key, intake.handle, *given)
        history = running.record.sequences[spec.sequence]
        return ActiveSequence(spec.sequence, attempts, intake, handle_event, handle_entry, running, history)

    def _sequence_ended(self, sequence: ActiveSequence, error: RequestFailed | None) -> None:
        running = sequence.running
        del self._sequences[sequence.request_id, sequence.index]
        del running.sequences[sequence.index]
        sequence.record.finished_ms = running.record.elapsed_ms()
        if error is not None:
            sequence.record.failed(error)
        if error is None:
            running.finish(sequence.index)
        else:
            self._end(running, "timed_out" if error.kind is FailureKind.DEADLINE else "failed", error)
        if not running.sequences and running in self._running:
            self._forget(running)

    def _end(self, running: RunningRequest, outcome: str, error: RequestFailed) -> None:
        """Cancels all unfinished sequences. The client gets the error."""
        if running.outcome == "finished":
            running.outcome = outcome
            running.record.failed(error)
        running.fail(error)
        for sequence in list(running.sequences.values()):
            sequence.record.failed(error)
            self._driver.feed(sequence, Cancelled(str(error)))

    def _forget(self, running: RunningRequest) -> None:
        self._running.pop(running).cancel()
        running.record.state = running.outcome
        self._counts.add(running.outcome, running.record.owner)
        if self._tracing is not None:
            self._tracing.ended(running.record, running.request.trace)

    def _stop(self, running: RunningRequest, sequence: int) -> None:
        found = self._sequences.get((running.request.request_id, sequence))
        if found is not None:
            found.record.finish = FinishReason.STOP_STRING.value
            self._driver.feed(found, StopMatched())

    def _cancel(self, running: RunningRequest) -> None:
        if running in self._running:
            self._end(running, "cancelled", RequestFailed("the client cancelled the request", FailureKind.CANCELLED))

    def _deadline_passed(self, running: RunningRequest) -> None:
        reason = f"the request did not finish within {running.request.timeout_s:g} s"
        self._end(running, "timed_out", RequestFailed(reason, FailureKind.DEADLINE))

    def _fleet_changed(self) -> None:
        if not self._has_met_worker.is_set() and self.limits() is not None:
            self._has_met_worker.set()
        self._driver.place_waiting()

    def _on_state(self, worker: KnownWorker, state: WorkerState, reason: str) -> None:
        level = logging.WARNING if state in (WorkerState.LOST, WorkerState.INCOMPATIBLE) else logging.INFO
        log.log(level, "worker %s is %s: %s", worker.record.worker_id, state, reason)
        if state in (WorkerState.READY, WorkerState.DRAINING):
            for sequence in list(self._sequences.values()):
                self._driver.feed(sequence, WorkerBack(worker.peer))
