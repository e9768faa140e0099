"""Does what the attempts' machines say: sends, delivers, places, and waits for workers where there are none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kvrelay.protocol.messages import AnyBody, PeerRef, TokenEntry
from kvrelay.state_machine import IllegalEvent
from kvrelay.telemetry.tracer import trace_fields
from kvrelay_router.dispatch.events import (
    AttemptFailed,
    AwaitLost,
    DecodeChosen,
    Deliver,
    Ended,
    Event,
    FindDecode,
    FindPlacement,
    FirstTokenReceived,
    Instruction,
    PlacementFailed,
    Send,
    TokensReceived,
    WorkersAssigned,
)
from kvrelay_router.dispatch.interface import SequenceDelta
from kvrelay_router.dispatch.load import OutstandingLoad
from kvrelay_router.dispatch.placement import Placement, as_json, work_of
from kvrelay_router.dispatch.running_sequence import CacheTally, ExpectedCacheHit, RunningSequence
from kvrelay_router.dispatch.tracing import AttemptTracing
from kvrelay_router.routing.candidates import Decision

log = logging.getLogger(__name__)


class SendMessage(Protocol):
    """`Messenger.send`."""

    def __call__(self, peer: PeerRef, body: AnyBody, *, request: str, attempt: int, sequence: int, trace: str) -> None:
        """Sends reliably, or reports the peer lost."""


class AttemptDriver:
    """Owns no sequence: `on_ended` tells their owner, once for each. `is_recorded`: machines' events are, so all go
    through `handle`."""

    def __init__(
        self,
        send: SendMessage,
        placement: Placement,
        load: OutstandingLoad,
        on_ended: Callable[[RunningSequence, str | None], None],
        wait_for_worker_s: float,
        tracing: AttemptTracing | None = None,
        *,
        is_recorded: bool = False,
    ) -> None:
        self.num_illegal = 0
        self.num_retries = 0
        self.cache = CacheTally()
        self._send = send
        self._placement = placement
        self._load = load
        self._on_ended = on_ended
        self._wait_for_worker_s = wait_for_worker_s
        self._tracing = tracing
        self._is_recorded = is_recorded
        self._waiting: dict[RunningSequence, None] = {}  # in the order in which they came

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a worker."""
        return len(self._waiting)

    def feed(self, sequence: RunningSequence, event: Event) -> None:
        """Tells the machine, and follows it."""
        try:
            instructions = sequence.handle(event)
        except IllegalEvent as error:
            self._contradicted(sequence, event, error)
            return
        is_plain = True
        for instruction in instructions:
            if type(instruction) is Deliver:
                self._deliver(sequence, instruction.delta)
            else:
                is_plain = False
                self._follow(sequence, instruction)
        if sequence.held.is_waiting or not is_plain:
            self._move_load(sequence)

    def feed_tokens(self, sequence: RunningSequence, worker: PeerRef, entry: TokenEntry) -> None:
        """`feed` of TokensReceived."""
        delta = None if self._is_recorded else sequence.machine.next_delta(worker, entry)
        if delta is None:
            self.feed(sequence, TokensReceived(worker, entry))
            return
        sequence.record.num_output_tokens += len(delta.token_ids)
        sequence.running.handle.deliver(delta)

    def place(self, sequence: RunningSequence, decision: Decision, cause: str) -> None:
        """Sends an attempt to the workers chosen for it."""
        prefill = decision.prefill.peer if decision.prefill is not None else None
        decode = decision.decode.peer if decision.decode is not None else None
        running = sequence.running
        sequence.fingerprint = decision.fingerprint
        machine = sequence.machine
        num_tokens = machine.spec.num_prompt_tokens + len(machine.output)
        sequence.work = work_of(decision, num_tokens, running.prompt.sent_to)
        self._placement.placed(decision, running.prompt)
        sequence.expected = ExpectedCacheHit(num_tokens, decision.num_cached_tokens)
        sequence.trace = running.handle.request.trace
        if self._tracing is not None:
            sequence.trace = self._tracing.begin(sequence.trace)
        running.record.placed(sequence.index, sequence.machine.attempt, decision, cause, sequence.trace)
        served_by = running.handle.served_by
        served_by.prefill = prefill.peer_id if prefill is not None else None
        served_by.decode = decode.peer_id if decode is not None else None
        served_by.tell_route = partial(as_json, decision)
        timeout_s = max(0.0, running.deadline - time.monotonic())
        self.feed(sequence, WorkersAssigned(prefill, decode, timeout_s))

    def place_waiting(self) -> None:
        """RetryBudget again for those that wait for a worker."""
        for sequence in list(self._waiting):
            match sequence.waiting_for:
                case FindPlacement() as wish:
                    self._find_placement(sequence, wish)
                case FindDecode() as wish:
                    self._find_decode(sequence, wish)

    # -- instructions -------------------------------------------------------------------------------------------------

    def _follow(self, sequence: RunningSequence, instruction: Instruction) -> None:
        """All but deliveries."""
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
                self._stop_waiting(sequence)  # for a decode worker of the attempt before
                self.num_retries += 1
                log.warning("attempt %d: %s", instruction.attempt, instruction.cause, extra=_names(sequence))
                sequence.running.record.attempt_ended(sequence.index, instruction.cause)
                if instruction.delay_s:
                    self._pause(sequence, instruction)
                else:
                    self._find_placement(sequence, instruction)
            case AwaitLost(cause=cause):
                self._stop_waiting(sequence)
                reason = f"{cause}; none of the lost workers was heard again for {self._wait_for_worker_s:g} s"
                self._wait(sequence, instruction, lambda: self.feed(sequence, PlacementFailed(reason)))
            case FindDecode():
                self._find_decode(sequence, instruction)
            case Ended(error=error):
                self._stop_waiting(sequence)
                sequence.running.record.attempt_ended(sequence.index, error or "")
                self._on_ended(sequence, error)

    def _deliver(self, sequence: RunningSequence, delta: SequenceDelta) -> None:
        record = sequence.record
        if record.first_token_ms is None:
            record.first_token_ms = sequence.running.record.elapsed_ms()
        record.num_output_tokens += len(delta.token_ids)
        if delta.beams:
            record.num_output_tokens += sum(len(beam.token_ids) for beam in delta.beams)
        if delta.cached_tokens is not None:
            record.cached_tokens = delta.cached_tokens
            if sequence.expected is not None:
                self.cache.add(sequence.expected, delta.cached_tokens)
                sequence.expected = None
        if delta.usage is not None:
            record.usage = delta.usage
        if delta.finish is not None:
            record.finish = str(delta.finish)
        sequence.running.handle.deliver(delta)

    def _pause(self, sequence: RunningSequence, wish: FindPlacement) -> None:
        """A pause is not a wait for workers: nothing but its end, and the sequence's, ends it."""
        loop = asyncio.get_running_loop()
        sequence.waiting_timer = loop.call_later(wish.delay_s, self._find_placement, sequence, wish)

    def _find_placement(self, sequence: RunningSequence, wish: FindPlacement) -> None:
        machine = sequence.machine
        decision = self._placement.place(
            sequence.request_id,
            prompt=sequence.running.prompt,
            num_output=len(machine.output),
            needs_decode=machine.needs_decode,
            avoid=wish.avoid,
        )
        if isinstance(decision, Decision):
            self._stop_waiting(sequence)
            self.place(sequence, decision, wish.cause)
        elif sequence.waiting_for is None:
            reason = f"{wish.cause}; then {decision.reason}, for {self._wait_for_worker_s:g} s"
            self._wait(sequence, wish, lambda: self.feed(sequence, PlacementFailed(reason)))

    def _wait(
        self, sequence: RunningSequence, wish: FindPlacement | AwaitLost | FindDecode, give_up: Callable[[], None]
    ) -> None:
        """Until a worker is ready, but not for ever; the request's own deadline may come before."""
        sequence.waiting_for = wish
        self._waiting[sequence] = None
        sequence.waiting_timer = asyncio.get_running_loop().call_later(self._wait_for_worker_s, give_up)

    def _stop_waiting(self, sequence: RunningSequence) -> None:
        if sequence.waiting_timer is not None:
            sequence.waiting_timer.cancel()
        sequence.waiting_for = sequence.waiting_timer = None
        self._waiting.pop(sequence, None)

    def _find_decode(self, sequence: RunningSequence, wish: FindDecode) -> None:
        """While no decode worker is ready at all, prefill keeps what it has computed. One that was lost and is there
        again has forgotten this attempt, but not its cache: the next attempt may take it."""
        prompt, fingerprint = sequence.running.prompt, sequence.fingerprint
        decode = self._placement.place_decode(sequence.request_id, prompt, fingerprint, wish.excluded)
        has_waited = sequence.waiting_for is not None
        if decode is not None or self._placement.has_decode(fingerprint):
            self._decode_chosen(sequence, wish, decode, came_back=has_waited)
        elif not has_waited:
            self._wait(sequence, wish, lambda: self._decode_chosen(sequence, wish, None, came_back=False))

    def _decode_chosen(
        self, sequence: RunningSequence, wish: FindDecode, decode: PeerRef | None, *, came_back: bool
    ) -> None:
        self._stop_waiting(sequence)
        sequence.running.record.reassigned(sequence.index, decode, wish.cause)
        sequence.running.handle.served_by.decode = decode.peer_id if decode is not None else None
        self.feed(sequence, DecodeChosen(decode, came_back and decode is None))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _move_load(self, sequence: RunningSequence) -> None:
        machine = sequence.machine
        if machine.is_over:
            self._load.move(sequence.held, None, 0, None)
            return
        work = sequence.work
        self._load.move(
            sequence.held,
            machine.computes,
            work.num_tokens,
            machine.decode,
            num_pairs=work.num_pairs,
            num_pending_blocks=work.num_decode_blocks if machine.handoff_is_to_come else 0,
        )

    def _contradicted(self, sequence: RunningSequence, event: Event, error: IllegalEvent) -> None:
        """A worker broke the protocol. Dropping its message alone could leave the client waiting: the attempt ends."""
        self.num_illegal += 1
        log.error("a message does not fit its request: %s", error, extra=_names(sequence))
        if isinstance(event, FirstTokenReceived | TokensReceived) and sequence.machine.involves(event.worker):
            cause = f"{event.worker.peer_id} broke the protocol: {error}"
            self.feed(sequence, AttemptFailed(event.worker, sequence.machine.attempt, cause, retriable=True))


def _names(sequence: RunningSequence) -> dict[str, Any]:
    return {
        "request_id": sequence.request_id,
        "sequence": sequence.index,
        **trace_fields(sequence.trace or sequence.running.handle.request.trace),
    }
