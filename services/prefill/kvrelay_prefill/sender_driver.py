"""Hands sequences over to decode workers: reservations, pushes, the handoff message, and the blocks held for them.

The machine in `sender_handoff.py` decides about one sequence. This module turns messages of decode workers and routers
and events of the transports into events of the machines, and carries out the instructions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from kvrelay.kv.pool import BlockState
from kvrelay.process_identity import own_identity
from kvrelay.protocol.failure_kind import FailureKind
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
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.telemetry.handoffs import HandoffMeter
from kvrelay.telemetry.limited_log import LimitedLog
from kvrelay.transfer.base import Pushed, SenderDrained, SenderEvent, TransferFailed, TransferSender
from kvrelay.transfer.sharded import ShardedSender
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.packed_candidates import pack_candidates
from kvrelay.worker.ranked_transfers import as_sharded_sender, other_ranks_identities, shards_of
from kvrelay.worker.requests import OpenRequests, is_same_process
from kvrelay.worker.sequences import sequence_key
from kvrelay_prefill.offers import TransportOffers
from kvrelay_prefill.push_counts import InFlightPushes
from kvrelay_prefill.request import PrefillRequest
from kvrelay_prefill.sender_events import (
    AbortTransfer,
    BlocksComputed,
    DecodeLost,
    DecodeReassigned,
    HandoffCommitted,
    PrefillFinished,
    PrefillScheduled,
    PushBlocks,
    ReleaseBlocks,
    ResendRequested,
    ReservationDeferred,
    ReservationGranted,
    ReservationRefused,
    ReservationReleased,
    SendAbort,
    SendCancelled,
    SendDrained,
    SenderHandoffEvent,
    SenderInstruction,
    SendFailed,
    SendHandoff,
    SendNeedDecode,
    SendReserve,
)
from kvrelay_prefill.sender_handoff import SenderHandoff, SenderState

log = logging.getLogger(__name__)


class SenderDriver:
    """Feeds the handoff machines and carries out their instructions. `requests` are all requests of the role."""

    def __init__(
        self,
        context: WorkerContext,
        senders: Mapping[str, TransferSender | ShardedSender],
        requests: OpenRequests[PrefillRequest],
    ) -> None:
        self.totals: dict[str, float] = dict.fromkeys(
            ("handed_over", "failed", "pushed_blocks", "pushed_bytes", "failed_pushes"), 0
        )
        self._context = context
        self._senders = {name: as_sharded_sender(sender, context.spec) for name, sender in senders.items()}
        self._requests = requests
        self._log = LimitedLog(log)
        self._offers = TransportOffers(senders)
        self._process, self._processes = _writers(context)
        self._shards = shards_of(self._senders, context.spec)
        self._pushes = InFlightPushes()
        self._meter = HandoffMeter(
            "prefill", context.spec.block_bytes, context.instruments, context.metrics, context.tracer, context.recent
        )

    def start(self) -> None:
        """Starts the transports. Must be called on the event loop's thread."""
        for sender in self._senders.values():
            sender.start(self._on_transfer)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def push_totals(self) -> dict[str, float]:
        """The transports' counters, and the time during which any push was in flight."""
        counters = [counters for sender in self._senders.values() for counters in sender.counters]
        return {
            "push_messages": sum(each.num_messages for each in counters),
            "push_runs": sum(each.num_runs for each in counters),
            "push_busy_s": self._pushes.busy_s(time.monotonic()),
        }

    # -- from the role ------------------------------------------------------------------------------------------------

    def scheduled(self, request: PrefillRequest) -> None:
        """The first chunk is scheduled. Asks decode; a cached prefix can be pushed before any forward pass."""
        self._feed(request, PrefillScheduled(tuple(request.sequence.table.ids.tolist())))
        self.computed(request)

    def computed(self, request: PrefillRequest) -> None:
        """A step has run. Pushes the blocks that it completed."""
        if request.handoff.state is SenderState.COMPUTING:
            self._feed(request, BlocksComputed(request.sequence.num_computed // self._context.spec.block_size))

    def prefilled(self, request: PrefillRequest, message: FirstToken) -> None:
        """The prompt is computed. Unless the first token ends the request, the handoff holds its blocks from now on."""
        key = request.sequence.key
        if message.finish is None:
            self._hold(request, request.handoff.blocks)
            self._context.scheduler.abort(key)
        self._context.steps.forget(key)
        self._meter.complete(request.timings)
        self._feed(request, PrefillFinished(message))

    def cancel(self, request: PrefillRequest, reason: str) -> None:
        """Ends the request in whatever state it is."""
        self._context.steps.abort(request.sequence.key)
        self._feed(request, SendCancelled(reason))

    def fail(self, request: PrefillRequest, kind: FailureKind, cause: str, *, retriable: bool) -> None:
        """Ends the request here and sends Failed to the router."""
        if request.handoff.state is SenderState.DRAINING:
            return  # the router knows already, and only the transport can end the wait for writes in flight
        self._send_failed(request, kind, cause, retriable=retriable)
        self._feed(request, SendCancelled(cause))

    def decode_lost(self, request: PrefillRequest, peer: PeerRef, reason: str) -> None:
        """The decode worker of this request is silent or gone."""
        self._meter.failed("decode_lost", request.timings)
        self._feed(request, DecodeLost(peer, f"{peer.peer_id}: {reason}"))

    # -- from decode and the router -----------------------------------------------------------------------------------

    def on_message(self, event: Delivered) -> None:
        """A message about a handoff. The handoff may have ended here already."""
        body, request = event.body, self._requests.get(sequence_key(event.header))
        if request is None:
            self._answer_for_unknown(sequence_key(event.header), event.peer, body)
            return
        if not self._may_say(request, event.peer, body):
            return
        self._measure(request, event.peer, body)
        handoff_event = _event_of(event.peer, body)
        if handoff_event is None:
            name = type(body).__name__
            self._log.warning("kind", "%s sent %s, which is not for a prefill worker", event.peer.peer_id, name)
            return
        if isinstance(body, Granted) and (wrong := self._why_wrong(request, body)):
            self._send_back(event.peer, request.sequence.key, body, wrong)
            handoff_event = ReservationRefused(event.peer, wrong)
        self._feed(request, handoff_event)

    @staticmethod
    def _may_say(request: PrefillRequest, peer: PeerRef, body: AnyBody) -> bool:
        """Returns whether the peer may send this message. An earlier decode worker may, unless the message concerns the
        present reservation."""
        match body:
            case Reassign():
                return is_same_process(request.sequence.router, peer)
            case Committed() | Resend():
                decode = request.handoff.decode
                return decode is not None and is_same_process(decode, peer)
            case _:
                return True

    def _why_wrong(self, request: PrefillRequest, body: Granted) -> str:
        """Returns why the grant is invalid; empty if it is valid. The state machine checks the number of slots."""
        if body.transport not in self._senders:
            return f"{body.transport!r} was granted, which is no transport here"
        if self._pushes.key_of(body.reservation) not in (None, request.sequence.key):
            return f"reservation {body.reservation} was granted to two sequences"
        if not body.num_stages and self._shards.num_stages > 1:
            return f"its version knows no stages, and there are {self._shards.num_stages} here"
        return self._senders[body.transport].why_not_to(1 + len(body.rank_endpoints), body.num_stages or 1)

    def _send_back(self, peer: PeerRef, key: SequenceKey, body: Granted, reason: str) -> None:
        """Nothing was pushed for this reservation, so it is drained at once."""
        self._requests.send(peer, key, Abort(reservation=body.reservation, reason=reason))
        self._requests.send(peer, key, Drained(reservation=body.reservation))

    def _measure(self, request: PrefillRequest, peer: PeerRef, body: AnyBody) -> None:
        if isinstance(body, Committed):
            self.totals["handed_over"] += 1
        if isinstance(body, Released) and body.transport_failed:
            self._note_failure(request.handoff, TransferFailed(body.reservation, body.reason))
        if peer != request.handoff.decode:
            return  # about a reservation that has ended
        match body:
            case Granted():
                self._meter.granted(request.timings, body.transport)
            case Refused():
                self._meter.failed("refused", request.timings)
            case Released():
                self._meter.failed("transfer" if body.transport_failed else "released", request.timings)
            case Committed() if request.handoff.state is SenderState.HANDED:
                self._meter.committed(request.timings, request.sequence.key)
            case Resend():
                request.timings.num_resends += 1
            case _:
                pass

    def _answer_for_unknown(self, key: SequenceKey, peer: PeerRef, body: AnyBody) -> None:
        """The request has ended here. The peer must not wait for it."""
        match body:
            case Granted():
                self._send_back(peer, key, body, "the request ended on prefill")
            case Released():
                self._requests.send(peer, key, Drained(reservation=body.reservation))
            case Reassign():
                cause = "the request is no longer held here"
                self._requests.send(peer, key, Failed(failure=FailureKind.WORKER_LOST, cause=cause, retriable=True))
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
            case SenderDrained():
                self._forget_reservation(request, event.reservation)
            case TransferFailed():
                is_current = request.handoff.transport_of(event.reservation) is not None
                self._meter.failed("transfer", request.timings if is_current else None)
                self._note_failure(request.handoff, event)
            case Pushed():
                pass
        self._feed(request, event)

    def _note_failure(self, handoff: SenderHandoff, event: TransferFailed) -> None:
        self.totals["failed_pushes"] += 1
        if handoff.decode is not None and (name := handoff.transport_of(event.reservation)) is not None:
            fields = self._requests.log_fields(self._pushes.key_of(event.reservation))
            log.warning("%s to %s failed: %s", name, handoff.decode.peer_id, event.cause, extra=fields)
            self._offers.failed(handoff.decode, name, time.monotonic())

    # -- instructions -------------------------------------------------------------------------------------------------

    def _feed(self, request: PrefillRequest, event: SenderHandoffEvent) -> None:
        for instruction in request.handle(event):
            self._carry_out(request, instruction)

    def _carry_out(self, request: PrefillRequest, instruction: SenderInstruction) -> None:
        key, router = request.sequence.key, request.sequence.router
        match instruction:
            case SendReserve(decode):
                self._meter.asked(request.timings)
                self._requests.send(decode, key, self._reserve(request, decode))
            case SendNeedDecode(reason, excluded, lacks):
                self._requests.send(router, key, NeedDecode(reason=reason, excluded=list(excluded), lacks=lacks))
            case PushBlocks(reservation, transport, endpoint, copies, rank_endpoints, num_stages):
                self._know_reservation(request, reservation)
                self._hold(request, [copy.source for copy in copies])
                self._pushes.started(reservation, len(copies), time.monotonic())
                self._senders[transport].push(reservation, (endpoint, *rank_endpoints), copies, num_stages)
                self._meter.pushed(request.timings, len(copies))
            case SendHandoff(decode, reservation, num_blocks, resend):
                request.timings.is_handed = True
                self._requests.send(decode, key, self._handoff_message(request, reservation, num_blocks, resend))
            case AbortTransfer(reservation, transport):
                self._know_reservation(request, reservation)
                self._senders[transport].abort(reservation)
            case SendAbort(decode, reservation, reason):
                self._requests.send(decode, key, Abort(reservation=reservation, reason=reason))
            case SendDrained(decode, reservation):
                self._requests.send(decode, key, Drained(reservation=reservation))
            case SendFailed(kind, cause):
                self._send_failed(request, kind, cause, retriable=True)
            case ReleaseBlocks():
                self._release(request)

    def _send_failed(self, request: PrefillRequest, kind: FailureKind, cause: str, *, retriable: bool) -> None:
        key = request.sequence.key
        self.totals["failed"] += 1
        self._requests.send(request.sequence.router, key, Failed(failure=kind, cause=cause, retriable=retriable))
        self._context.steps.abort(key)  # it may still be queued, or in the middle of its prompt

    def _reserve(self, request: PrefillRequest, decode: PeerRef) -> Reserve:
        return Reserve(
            prompt=request.prompt,
            router=request.sequence.router,
            transports=self._offers.to(decode, time.monotonic()),
            num_blocks=len(request.handoff.blocks),
            process=self._process,
            num_siblings=self._num_siblings(request, decode),
            shards=self._shards,
            processes=self._processes,
        )

    def _num_siblings(self, request: PrefillRequest, decode: PeerRef) -> int:
        """The number of other queued samples of the request that go to this decode worker."""
        if request.prompt.num_samples == 1:
            return 0
        return sum(
            each is not request and each.handoff.decode == decode and each.handoff.state is SenderState.QUEUED
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

    def _hold(self, request: PrefillRequest, blocks: Iterable[int]) -> None:
        """Holds blocks that the transport reads or that are kept for another decode worker."""
        new = [block for block in blocks if block not in request.held]
        self._context.pool.hold(new, BlockState.IN_FLIGHT)
        request.held.update(new)

    def _know_reservation(self, request: PrefillRequest, reservation: str) -> None:
        self._pushes.register(reservation, request.sequence.key)
        request.reservations.add(reservation)

    def _forget_reservation(self, request: PrefillRequest, reservation: str) -> None:
        self._pushes.forget(reservation)
        request.reservations.discard(reservation)

    def _release(self, request: PrefillRequest) -> None:
        self._context.pool.release(list(request.held), BlockState.IN_FLIGHT)
        request.held.clear()
        self._requests.remove(request.sequence.key)
        for reservation in request.reservations:
            self._pushes.forget(reservation)
        request.reservations.clear()
        self._context.steps.wake()


def _writers(context: WorkerContext) -> tuple[str, list[str]]:
    """`process` and `processes` of `Reserve`."""
    own, others = own_identity(), other_ranks_identities(context)
    return ("", [own, *others]) if others else (own, [])


def _event_of(peer: PeerRef, body: AnyBody) -> SenderHandoffEvent | None:
    """None if the message is not one that a prefill worker gets about a handoff."""
    match body:
        case Granted():
            return ReservationGranted(peer, body)
        case Deferred():
            return ReservationDeferred(peer)
        case Refused():
            return ReservationRefused(peer, body.reason)
        case Released():
            return ReservationReleased(peer, body.reservation, body.reason)
        case Committed():
            return HandoffCommitted(body.reservation)
        case Resend():
            return ResendRequested(body.reservation, tuple(body.blocks), body.number, body.corrupted)
        case Reassign():
            return DecodeReassigned(body.decode)
        case _:
            return None
