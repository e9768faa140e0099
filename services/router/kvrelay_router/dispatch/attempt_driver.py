"""Carries out what the attempt machines return: sends, places, retries, and waits for workers.

`attempt.py` decides whether a sequence is tried again, `retry_budget.py` how often.

Waits are not polled: the fleet watch calls `place_waiting` after each event that may have made a worker ready. At most
one suspect has an unproven attempt at a time. A suspect is a sequence that was lost with several workers, each time
together with others. So the one that crashes workers exhausts its retry budget without those of the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvrelay.logs import LimitedLog
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.state_machine import IllegalEvent
from kvrelay.telemetry.tracer import trace_fields
from kvrelay.text.choice import SequenceDelta
from kvrelay_router.dispatch.attempt import AttemptState
from kvrelay_router.dispatch.events import (
    AwaitLostWorkers,
    DecodeChosen,
    Ended,
    Event,
    FindDecode,
    FindPlacement,
    Instruction,
    PlacementFailed,
    Send,
    TokensArrived,
    WorkersAssigned,
)
from kvrelay_router.dispatch.interface import RequestFailed
from kvrelay_router.dispatch.placement import Placement, as_json, work_of
from kvrelay_router.dispatch.records import AttemptTracing
from kvrelay_router.dispatch.running_request import ActiveSequence, RunningRequest, Search
from kvrelay_router.fleet.load import OutstandingLoad, worker_key
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.routing.estimates import Candidate, Decision

log = logging.getLogger(__name__)

MAX_WAIT_FOR_LOST_S = 30.0
"""For lost workers that may only be stopped, once the retry budget is exhausted."""
PLACED_PER_TURN = 16
"""A placement takes 0.1 to 0.3 ms."""


class WorkerWaits:
    """The sequences that wait for a ready worker, in their order of arrival. Thousands may wait when a worker comes
    back, so they are placed in slices, with a turn of the event loop between two.

    `is_possible` returns whether a search may succeed, at no cost. `look` then searches; if that succeeds, it calls
    `remove`."""

    def __init__(
        self, is_possible: Callable[[ActiveSequence, Search], bool], look: Callable[[ActiveSequence, Search], None]
    ) -> None:
        self._is_possible = is_possible
        self._look = look
        self._waiting: dict[ActiveSequence, None] = {}
        self._left: list[ActiveSequence] = []  # those that the present round has not reached
        self.suspect: ActiveSequence | None = None  # the one whose attempt is not proven

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: ActiveSequence, search: Search, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        """The sequence waits. After `timeout_s` seconds `on_timeout` is called; it must end the wait."""
        sequence.waiting_for = search
        sequence.waiting_timer = asyncio.get_running_loop().call_later(timeout_s, on_timeout)
        self._waiting[sequence] = None
        sequence.running.worker_awaited(sequence.index)

    def pause(self, sequence: ActiveSequence, delay_s: float, then: Callable[[], None]) -> None:
        """Calls `then` after the delay. A worker that becomes ready does not end it."""
        sequence.waiting_timer = asyncio.get_running_loop().call_later(delay_s, then)

    def remove(self, sequence: ActiveSequence) -> None:
        """Ends the wait or the pause, if any."""
        if sequence.waiting_timer is not None:
            sequence.waiting_timer.cancel()
        sequence.waiting_timer = None
        if sequence.waiting_for is not None:
            sequence.waiting_for = None
            del self._waiting[sequence]
            sequence.running.worker_found(sequence.index)

    def look_again(self) -> None:
        """Looks for workers for all that wait."""
        if self._waiting:
            is_running, self._left = bool(self._left), list(reversed(self._waiting))
            if not is_running:
                self._look_for_some()

    def _look_for_some(self) -> None:
        num_tried = 0
        try:
            while self._left and num_tried < PLACED_PER_TURN:
                sequence = self._left.pop()
                search = sequence.waiting_for
                if search is not None and self._is_possible(sequence, search):
                    num_tried += 1
                    self._look(sequence, search)
        finally:  # whatever befell one of them, the others are looked at
            if self._left:
                asyncio.get_running_loop().call_soon(self._look_for_some)

    def may_try(self, sequence: ActiveSequence) -> bool:
        """Returns whether a suspect may start its attempt now."""
        return self.suspect in (None, sequence)

    def suspect_got_tokens(self) -> None:
        """With enough tokens the suspect is cleared, and the next one may start."""
        if self.suspect is not None and self.suspect.is_proven:
            self.attempt_ended(self.suspect)

    def attempt_ended(self, sequence: ActiveSequence) -> None:
        """The sequence's attempt is over. If it was a suspect's, the next one may start."""
        if sequence is self.suspect:
            self.suspect = None
            if self._waiting:
                asyncio.get_running_loop().call_soon(self.look_again)


def first_search() -> FindPlacement:
    """Objects that every new request needs."""
    return FindPlacement(1, "", frozenset())


class AttemptDriver:
    """Feeds events to the attempt machines of all sequences and carries out their instructions.

    Calls `on_ended` once for each sequence, with its error or None, and `on_failed` if a whole request must end.
    """

    def __init__(
        self,
        messenger: Messenger,
        placement: Placement,
        load: OutstandingLoad,
        on_ended: Callable[[ActiveSequence, RequestFailed | None], None],
        on_failed: Callable[[RunningRequest, RequestFailed], None],
        max_wait_for_worker_s: float,
        tracing: AttemptTracing | None = None,
    ) -> None:
        self.num_illegal = 0
        self.num_retries = 0
        self._send = messenger.send
        self._placement = placement
        self._load = load
        self._on_ended = on_ended
        self._on_failed = on_failed
        self._max_wait_for_worker_s = max_wait_for_worker_s
        self._tracing = tracing
        self._log = LimitedLog(log)
        self.waits = WorkerWaits(self._may_succeed, self._look)

    def feed(self, sequence: ActiveSequence, event: Event) -> None:
        """Gives an event to the attempt machine and carries out its instructions."""
        awaited = sequence.attempts.awaits_handoff
        try:
            instructions = sequence.handle_event(event)
        except IllegalEvent as error:
            self.num_illegal += 1
            where = sequence.request_id, sequence.index
            self._log.warning("illegal", "dropped what does not fit request %s, sequence %d: %s", *where, error)
            return
        for instruction in instructions:
            self._carry_out(sequence, instruction)
        if awaited and type(event) is TokensArrived and not event.from_prefill and sequence.decision is not None:
            self._placement.handed_over(sequence.decision, sequence.running.prompt)
        self._move_load(sequence)

    def place_all(self, sequences: Iterable[ActiveSequence], decision: Decision, search: FindPlacement) -> None:
        """Sends an attempt of each sequence to the chosen workers, in slices with turns of the event loop in between.
        Raises what `place` raises for the first slice."""
        waiting = deque(sequences)
        self._place_some(waiting, decision, search)
        if waiting:
            self._continue_soon(waiting, decision, search)

    def _continue_soon(self, waiting: deque[ActiveSequence], decision: Decision, search: FindPlacement) -> None:
        asyncio.get_running_loop().call_soon(self._place_rest, waiting, decision, search)

    def _place_some(self, waiting: deque[ActiveSequence], decision: Decision, search: FindPlacement) -> None:
        share = LoopShare()
        while waiting:
            sequence = waiting[0]
            if sequence.attempts.state is AttemptState.WAITING:  # else it ended before its turn
                self.place(sequence, decision, search.cause)
            waiting.popleft()
            if share.is_used_up:
                return

    def _place_rest(self, waiting: deque[ActiveSequence], decision: Decision, search: FindPlacement) -> None:
        if not self._placement.is_usable(decision):
            # A worker was lost in between. These sequences were not sent to it, so nothing would report the loss.
            self._await_together(waiting, search, "a chosen worker was lost", self._max_wait_for_worker_s)
            self.place_waiting()
            return
        try:
            self._place_some(waiting, decision, search)
        except Exception as error:
            log.exception("placing a sequence failed", extra=_log_fields(waiting[0]))
            self._on_failed(waiting[0].running, RequestFailed(str(error)))
            return
        if waiting:
            self._continue_soon(waiting, decision, search)

    def place(self, sequence: ActiveSequence, decision: Decision, cause: str) -> None:
        """Sends an attempt to the chosen workers. `cause`: why the attempt before it failed, or empty."""
        prefill = decision.prefill.peer if decision.prefill is not None else None
        decode = decision.decode.peer if decision.decode is not None else None
        running, attempts, output = sequence.running, sequence.attempts, sequence.intake.output
        num_tokens = attempts.spec.num_prompt_tokens + len(output)
        sequence.decision, sequence.num_prompt_tokens = decision, num_tokens
        sequence.work = work_of(decision, num_tokens, running.prompt.sent_to)
        self._placement.placed(decision, running.prompt)
        workers = [peer for peer in (prefill, decode) if peer is not None]
        sequence.silent_workers = frozenset(worker_key(peer) for peer in workers if self._placement.is_silent(peer))
        sequence.trace = running.request.trace
        if self._tracing is not None:
            sequence.trace = self._tracing.begin(sequence.trace)
        running.record.placed(sequence.index, attempts.attempt, decision, cause, sequence.trace)
        served_by = running.served_by
        served_by.prefill = prefill.peer_id if prefill is not None else None
        served_by.decode = decode.peer_id if decode is not None else None
        served_by.num_attempts = max(served_by.num_attempts, attempts.attempt)
        served_by.describe_route = partial(as_json, decision)
        self._note_numerics(sequence, is_retry=bool(cause))
        timeout_s = max(0.0, running.deadline - time.monotonic())
        self.feed(sequence, WorkersAssigned(prefill, decode, timeout_s, list(output)))

    def await_first(self, request: RunningRequest, reason: str, timeout_s: float) -> None:
        """No worker is ready for a new request: its sequences wait. They are placed together."""
        timeout_s = min(timeout_s, self._max_wait_for_worker_s)
        self._await_together(list(request.sequences.values()), first_search(), reason, timeout_s)

    def _await_together(
        self, sequences: Iterable[ActiveSequence], search: FindPlacement, reason: str, timeout_s: float
    ) -> None:
        """Sequences of one request wait for a worker. They are placed together."""
        failed = PlacementFailed(f"{reason}, for {timeout_s:g} s")
        for sequence in sequences:
            if sequence.attempts.state is AttemptState.WAITING:
                self.waits.add(sequence, search, timeout_s, partial(self.feed, sequence, failed))

    def place_waiting(self) -> None:
        """Looks for workers again for all sequences that wait for one."""
        self.waits.look_again()

    # -- instructions -------------------------------------------------------------------------------------------------

    def _carry_out(self, sequence: ActiveSequence, instruction: Instruction) -> None:
        match instruction:
            case Send(worker=worker, attempt=attempt, body=body):
                self._send(
                    worker,
                    body,
                    request=sequence.request_id,
                    attempt=attempt,
                    sequence=sequence.index,
                    trace=sequence.trace,
                )
            case FindPlacement():
                self._retry(sequence, instruction)
            case AwaitLostWorkers(cause=cause):
                self.waits.attempt_ended(sequence)
                self.waits.remove(sequence)
                timeout_s = min(MAX_WAIT_FOR_LOST_S, self._max_wait_for_worker_s)
                reason = f"{cause}; none of the lost workers came back within {timeout_s:g} s"
                failed = PlacementFailed(reason, FailureKind.WORKER_LOST)
                self.waits.add(sequence, instruction, timeout_s, partial(self.feed, sequence, failed))
            case FindDecode():
                self._find_decode(sequence, instruction)
            case Ended(error=error, finish=finish, kind=kind):
                if finish is not None:
                    delta = SequenceDelta(sequence.index, [], finish=finish)
                    sequence.record_details(delta)
                    sequence.running.deliver(delta)
                self.waits.attempt_ended(sequence)
                self.waits.remove(sequence)
                sequence.running.record.attempt_ended(sequence.index, error or "")
                failure = RequestFailed(error, kind or FailureKind.INTERNAL_ERROR) if error is not None else None
                self._on_ended(sequence, failure)

    def _retry(self, sequence: ActiveSequence, search: FindPlacement) -> None:
        self.waits.attempt_ended(sequence)
        self.waits.remove(sequence)  # the failed attempt may still wait for a decode worker
        self.num_retries += 1
        log.warning("attempt %d: %s", search.attempt, search.cause, extra=_log_fields(sequence))
        sequence.running.record.attempt_ended(sequence.index, search.cause)
        if not search.delay_s:
            self._find_placement(sequence, search)
            return
        self.waits.pause(sequence, search.delay_s, partial(self._find_placement, sequence, search))

    def _find_placement(self, sequence: ActiveSequence, search: FindPlacement) -> None:
        if search.is_suspect and not self.waits.may_try(sequence):
            self._await_placement(sequence, search, "another request is tried first")
            return
        num_output = len(sequence.intake.output)
        decision = self._placement.place(
            sequence.request_id,
            prompt=sequence.running.prompt,
            num_output=num_output,
            needs_decode=sequence.attempts.needs_decode(num_output),
            avoid=search.avoid,
            hands_over=search.hands_over,
            numerics=next(iter(sequence.running.served_by.numerics), ""),
        )
        if not isinstance(decision, Decision):
            self._await_placement(sequence, search, decision.reason)
            return
        # The sequences of a new request share their search, and go to the same workers.
        siblings = sequence.running.sequences.values()
        found = [each for each in siblings if each is sequence or each.waiting_for is search]
        for each in found:
            self.waits.remove(each)
            if search.is_suspect:
                self.waits.suspect = each
        self.place_all(found, decision, search)

    def _await_placement(self, sequence: ActiveSequence, search: FindPlacement, reason: str) -> None:
        if sequence.waiting_for is None:
            timeout_s = self._max_wait_for_worker_s
            self.waits.remove(sequence)  # the pause before the search
            failed = PlacementFailed(f"{search.cause}; then {reason}, for {timeout_s:g} s")
            self.waits.add(sequence, search, timeout_s, partial(self.feed, sequence, failed))

    def _find_decode(self, sequence: ActiveSequence, search: FindDecode) -> None:
        """While no decode worker is ready at all, prefill keeps the KV and the sequence waits.

        A lost decode worker that is ready again has forgotten this attempt, but not its cache. It is excluded here, and
        the next attempt may use it.
        """
        prompt, fingerprint = sequence.running.prompt, sequence.fingerprint
        decode = self._placement.place_decode(
            sequence.request_id, prompt, fingerprint, search.excluded, numerics=sequence.numerics
        )
        has_waited = sequence.waiting_for is not None
        if decode is not None or self._placement.has_decode(fingerprint):
            self._decode_chosen(sequence, search, decode, returned=has_waited)
        elif not has_waited:
            give_up = partial(self._decode_chosen, sequence, search, None, returned=False)
            self.waits.add(sequence, search, self._max_wait_for_worker_s, give_up)

    def _decode_chosen(
        self, sequence: ActiveSequence, search: FindDecode, decode: Candidate | None, *, returned: bool
    ) -> None:
        self.waits.remove(sequence)
        if sequence.decision is not None:
            sequence.decision = replace(sequence.decision, decode=decode)
        sequence.running.record.reassigned(sequence.index, decode, search.cause)
        sequence.running.served_by.decode = decode.worker_id if decode is not None else None
        self._note_numerics(sequence, is_retry=True)
        self.feed(sequence, DecodeChosen(decode.peer if decode is not None else None, returned and decode is None))

    @staticmethod
    def _note_numerics(sequence: ActiveSequence, *, is_retry: bool) -> None:
        """Adds the numerics of the current attempt's workers to the request's."""
        known = sequence.running.served_by.numerics
        new = [each for each in sequence.record.attempts[-1].numerics if each not in known]
        if new and known and is_retry:
            text = "no usable worker has numerics %s, so the request goes on with %s: bits of its output may differ"
            log.info(text, ", ".join(known), ", ".join(new), extra=_log_fields(sequence))
        known += new

    # -- waiting for workers ------------------------------------------------------------------------------------------

    def _may_succeed(self, sequence: ActiveSequence, search: Search) -> bool:
        match search:
            case FindPlacement(is_suspect=is_suspect):
                needs_decode = sequence.attempts.needs_decode(len(sequence.intake.output))
                may_try = not is_suspect or self.waits.may_try(sequence)
                return may_try and self._placement.is_possible(needs_decode=needs_decode)
            case FindDecode():
                return self._placement.has_decode(sequence.fingerprint)
            case AwaitLostWorkers():
                return False  # WorkerBack ends this wait

    def _look(self, sequence: ActiveSequence, search: Search) -> None:
        match search:
            case FindPlacement():
                self._find_placement(sequence, search)
            case FindDecode():
                self._find_decode(sequence, search)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _move_load(self, sequence: ActiveSequence) -> None:
        attempts = sequence.attempts
        if attempts.is_over:
            self._load.move(sequence.held, None, 0, None)
            return
        work = sequence.work
        self._load.move(
            sequence.held,
            attempts.computes_prompt,
            work.num_tokens,
            attempts.decode,
            num_pairs=work.num_pairs,
            num_pending_blocks=work.num_decode_blocks if attempts.awaits_handoff else 0,
        )


def _log_fields(sequence: ActiveSequence) -> dict[str, Any]:
    return {
        "request_id": sequence.request_id,
        "sequence": sequence.index,
        **trace_fields(sequence.trace or sequence.running.request.trace),
    }
