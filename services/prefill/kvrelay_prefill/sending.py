"""What a prefill worker hands over: reservations, pushes, the handoff message, and the blocks that are held for them.

The machine in `handoff.py` decides about one sequence. This module feeds the machines what decode, the router and the
transports say, and carries out their instructions, until nothing of a sequence is left here.
"""

from __future__ import annotations

import logging
import time

from kvrelay.engine.batch import SequenceKey
from kvrelay.kv.pool import Owner
from kvrelay.process_identity import own_identity
from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import (
    Abort,
    AnyBody,
    Committed,
    Deferred,
    Drained,
    Failed,
    FirstToken,
    Granted,
    Handoff,
    NeedDecode,
    PeerRef,
    Reassign,
    Refused,
    Released,
    Resend,
    Reserve,
)
from kvrelay.telemetry.handoffs import HandoffMeter
from kvrelay.transfer.base import Pushed, SenderDrained, SenderEvent, TransferFailed, TransferSender
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.packed_candidates import pack_candidates
from kvrelay.worker.requests import OpenRequests
from kvrelay.worker.sequences import sequence_key
from kvrelay_prefill import handoff as machine
from kvrelay_prefill.offers import TransportOffers
from kvrelay_prefill.pushes import Pushes
from kvrelay_prefill.request import PrefillRequest

log = logging.getLogger(__name__)


class Sending:
    """See the module's text. `requests` are all of the role's."""

    def __init__(
        self, context: WorkerContext, senders: dict[str, TransferSender], requests: OpenRequests[PrefillRequest]
    ) -> None:
        self.totals: dict[str, float] = dict.fromkeys(
            ("handed_over", "failed", "pushed_blocks", "pushed_bytes", "failed_pushes"), 0
        )
        self._context = context
        self._senders = senders
        self._requests = requests
        self._offers = TransportOffers(senders)
        self._process = own_identity()
        self._pushes = Pushes()
        self._meter = HandoffMeter(
            "prefill", context.spec.block_bytes, context.instruments, context.metrics, context.tracer, context.recent
        )

    def start(self) -> None:
        """The event loop runs: transports may report."""
        for sender in self._senders.values():
            sender.start(self._on_transfer)

    def close(self) -> None:
        """Stops the transports."""
        for sender in self._senders.values():
            sender.close()

    def push_totals(self) -> dict[str, float]:
        """What the transports count, and how long anything was under way."""
        counters = [sender.counters for sender in self._senders.values()]
        return {
            "push_messages": sum(each.num_messages for each in counters),
            "push_runs": sum(each.num_runs for each in counters),
            "push_busy_s": self._pushes.busy_s(time.monotonic()),
        }

    # -- from the role ------------------------------------------------------------------------------------------------

    def scheduled(self, request: PrefillRequest) -> None:
        """The first chunk is scheduled: decode is asked. A cached prefix can leave before any forward."""
        self._run(request, request.handoff.scheduled(request.sequence.table.ids.tolist()))
        self.computed(request)

    def computed(self, request: PrefillRequest) -> None:
        """More of the prompt may be complete."""
        if request.handoff.state is machine.SenderState.COMPUTING:
            num_complete = request.sequence.num_computed // self._context.spec.block_size
            self._run(request, request.handoff.computed(num_complete))

    def prefilled(self, request: PrefillRequest, message: FirstToken) -> None:
        """All of it is; unless the first token is the end, its blocks are the handoff's from here on."""
        key = request.sequence.key
        if message.finish is None:
            self._hold(request, request.handoff.blocks)
            self._context.scheduler.abort(key)
        self._context.steps.forget(key)
        self._meter.complete(request.timings)
        self._run(request, request.handoff.prefilled(message))

    def cancel(self, request: PrefillRequest, reason: str) -> None:
        """It is not wanted any more, wherever it is."""
        self._context.steps.abort(request.sequence.key)
        self._run(request, request.handoff.cancel(reason))

    def fail(self, request: PrefillRequest, cause: str, *, retriable: bool) -> None:
        """It cannot go on here. The router hears of it."""
        if request.handoff.state is machine.SenderState.DRAINING:
            return  # whatever led there, the router knows; nothing but the transport's word ends the wait for writes
        self._tell_failed(request, cause, retriable=retriable)
        self._run(request, request.handoff.cancel(cause))

    def decode_lost(self, request: PrefillRequest, peer: PeerRef, reason: str) -> None:
        """The decode worker that it goes to is silent, or gone."""
        self._meter.failed("decode_lost", request.timings)
        self._run(request, request.handoff.decode_lost(peer, f"{peer.peer_id}: {reason}"))

    # -- from decode and the router -----------------------------------------------------------------------------------

    def on_message(self, event: Delivered) -> None:
        """About a handoff, or about one that ended here."""
        body, request = event.body, self._requests.get(sequence_key(event.header))
        if request is None:
            self._answer_for_unknown(sequence_key(event.header), event.peer, body)
            return
        self._measure(request, event.peer, body)
        self._run(request, self._to_machine(request.handoff, event.peer, body))

    def _measure(self, request: PrefillRequest, peer: PeerRef, body: AnyBody) -> None:
        handoff = request.handoff
        if peer != handoff.decode:
            return  # about a reservation that was given up before
        match body:
            case Granted():
                self._meter.granted(request.timings, body.transport)
            case Refused():
                self._meter.failed("refused", request.timings)
            case Released():
                self._meter.failed("transfer" if body.transport_failed else "released", request.timings)
            case Committed() if handoff.state is machine.SenderState.HANDED:
                self._meter.committed(request.timings, request.sequence.key)
            case Resend():
                request.timings.num_resends += 1
            case _:
                pass

    def _to_machine(self, handoff: machine.SenderHandoff, peer: PeerRef, body: AnyBody) -> list[machine.Instruction]:
        match body:
            case Granted():
                return handoff.granted(peer, body)
            case Deferred():
                return handoff.deferred(peer)
            case Refused():
                return handoff.refused(peer, body.reason)
            case Released():
                if body.transport_failed:
                    self._note_failure(handoff, TransferFailed(body.reservation, body.reason))
                return handoff.released(peer, body.reservation, body.reason)
            case Committed():
                self.totals["handed_over"] += 1
                return handoff.committed(body.reservation)
            case Resend():
                return handoff.resend(body.reservation, body.blocks, body.number, corrupted=body.corrupted)
            case Reassign():
                return handoff.reassigned(body.decode)
            case _:
                log.warning("%s sent %s, which is not for a prefill worker", peer.peer_id, type(body).__name__)
                return []

    def _answer_for_unknown(self, key: SequenceKey, peer: PeerRef, body: AnyBody) -> None:
        """About a request that ended here: the other side must not wait for it."""
        match body:
            case Granted():
                abort = Abort(reservation=body.reservation, reason="the request ended on prefill")
                self._requests.send(peer, key, abort)
                self._requests.send(peer, key, Drained(reservation=body.reservation))
            case Released():
                self._requests.send(peer, key, Drained(reservation=body.reservation))
            case Reassign():
                self._requests.send(peer, key, Failed(cause="the request is no longer held here", retriable=True))
            case _:
                pass

    # -- the transport ------------------------------------------------------------------------------------------------

    def _on_transfer(self, event: SenderEvent) -> None:
        key = self._pushes.key_of(event.reservation)
        self._pushes.ended(event, time.monotonic())
        if isinstance(event, Pushed):
            self.totals["pushed_blocks"] += len(event.blocks)
            self.totals["pushed_bytes"] += event.num_bytes
        request = self._requests.get(key)
        if request is None:
            return
        match event:
            case Pushed():
                self._run(request, request.handoff.pushed(event.reservation, event.blocks))
            case SenderDrained():
                self._forget_reservation(request, event.reservation)
                self._run(request, request.handoff.drained(event.reservation))
            case TransferFailed():
                is_current = request.handoff.transport_of(event.reservation) is not None
                self._meter.failed("transfer", request.timings if is_current else None)
                self._note_failure(request.handoff, event)
                self._run(request, request.handoff.transfer_failed(event.reservation, event.cause))

    def _note_failure(self, handoff: machine.SenderHandoff, event: TransferFailed) -> None:
        self.totals["failed_pushes"] += 1
        if handoff.decode is not None and (name := handoff.transport_of(event.reservation)) is not None:
            fields = self._requests.log_fields(self._pushes.key_of(event.reservation))
            log.warning("%s to %s failed: %s", name, handoff.decode.peer_id, event.cause, extra=fields)
            self._offers.failed(handoff.decode, name, time.monotonic())

    # -- instructions -------------------------------------------------------------------------------------------------

    def _run(self, request: PrefillRequest, instructions: list[machine.Instruction]) -> None:
        for instruction in instructions:
            self._carry_out(request, instruction)

    def _carry_out(self, request: PrefillRequest, instruction: machine.Instruction) -> None:
        key, router = request.sequence.key, request.sequence.router
        match instruction:
            case machine.AskDecode(decode):
                self._meter.asked(request.timings)
                self._requests.send(decode, key, self._reserve(request, decode))
            case machine.AskRouter(reason, excluded, lacks):
                self._requests.send(router, key, NeedDecode(reason=reason, excluded=list(excluded), lacks=lacks))
            case machine.PushBlocks(reservation, transport, endpoint, copies):
                self._know_reservation(request, reservation)
                self._hold(request, [copy.source for copy in copies])
                self._pushes.begun(reservation, len(copies), time.monotonic())
                self._senders[transport].push(reservation, endpoint, copies)
                self._meter.pushed(request.timings, len(copies))
            case machine.SendHandoff(decode, reservation, num_blocks, resend):
                request.timings.is_handed = True
                self._requests.send(decode, key, self._handoff_message(request, reservation, num_blocks, resend))
            case machine.AbortTransfer(reservation, transport):
                self._know_reservation(request, reservation)
                self._senders[transport].abort(reservation)
            case machine.SendAbort(decode, reservation, reason):
                self._requests.send(decode, key, Abort(reservation=reservation, reason=reason))
            case machine.SendDrained(decode, reservation):
                self._requests.send(decode, key, Drained(reservation=reservation))
            case machine.FailRequest(cause):
                self._tell_failed(request, cause, retriable=True)
            case machine.ReleaseBlocks():
                self._release(request)

    def _tell_failed(self, request: PrefillRequest, cause: str, *, retriable: bool) -> None:
        key = request.sequence.key
        self.totals["failed"] += 1
        self._requests.send(request.sequence.router, key, Failed(cause=cause, retriable=retriable))
        self._context.steps.abort(key)  # it may still be queued, or in the middle of its prompt

    def _reserve(self, request: PrefillRequest, decode: PeerRef) -> Reserve:
        return Reserve(
            prompt=request.prompt,
            router=request.sequence.router,
            transports=self._offers.to(decode, time.monotonic()),
            num_blocks=len(request.handoff.blocks),
            process=self._process,
            num_siblings=self._num_siblings(request, decode),
        )

    def _num_siblings(self, request: PrefillRequest, decode: PeerRef) -> int:
        """The number of other queued samples of the request that go to this decode worker."""
        if request.prompt.num_samples == 1:
            return 0
        return sum(
            each is not request and each.handoff.decode == decode and each.handoff.state is machine.SenderState.QUEUED
            for each in self._requests.samples_of(request.sequence.key[0])
        )

    def _handoff_message(self, request: PrefillRequest, reservation: str, num_blocks: int, resend: int) -> Handoff:
        first = request.handoff.first_token
        candidates = request.candidates
        assert first is not None and (first.token_id is not None or candidates is not None)
        return Handoff(
            reservation=reservation,
            index=first.index,
            token_id=first.token_id,
            num_tokens=request.prompt.num_tokens,
            num_blocks=num_blocks,
            logprobs=first.logprobs,
            cached_tokens=first.cached_tokens,
            resend=resend,
            candidates=pack_candidates(candidates) if candidates is not None else None,
        )

    def _hold(self, request: PrefillRequest, blocks: list[int]) -> None:
        """The handoff's own hold on blocks that are read by the transport or kept for another decode worker."""
        new = [block for block in blocks if block not in request.held]
        self._context.pool.hold(new, Owner.IN_FLIGHT)
        request.held.update(new)

    def _know_reservation(self, request: PrefillRequest, reservation: str) -> None:
        self._pushes.know(reservation, request.sequence.key)
        request.reservations.add(reservation)

    def _forget_reservation(self, request: PrefillRequest, reservation: str) -> None:
        self._pushes.forget(reservation)
        request.reservations.discard(reservation)

    def _release(self, request: PrefillRequest) -> None:
        self._context.pool.release(list(request.held), Owner.IN_FLIGHT)
        request.held.clear()
        self._requests.remove(request.sequence.key)
        for reservation in request.reservations:
            self._pushes.forget(reservation)
        request.reservations.clear()
        self._context.steps.wake()
