"""Pushes sequences to decode workers: reservations, blocks in flight, the handoff message, and blocks held for them.

The machine in `kvrelay.handoff.sender` decides about one sequence. This module feeds it with messages of decode workers
and routers and with events of the transports, and carries out the instructions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvrelay.handoff.sender import (
    AskDecode,
    BlocksComputed,
    DecodeLost,
    FromDecode,
    PrefillFinished,
    PrefillScheduled,
    PushBlocks,
    ReleaseBlocks,
    SenderHandoff,
    SenderHandoffEvent,
    SenderInstruction,
    SenderState,
    SendTo,
    StopPushing,
)
from kvrelay.handoff.transports.base import Pushed, SenderDrained, SenderEvent, TransferFailed, TransferSender
from kvrelay.handoff.transports.sharded import ShardedSender
from kvrelay.kv.pool import BlockState
from kvrelay.process_identity import own_identity
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import (
    Cancel,
    Committed,
    Failed,
    FirstToken,
    Granted,
    Handoff,
    PeerRef,
    Prompt,
    Reassign,
    Refused,
    Released,
    Reserve,
)
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.transfers import as_sharded_sender, shards_of
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import Candidates
from kvrelay.telemetry.handoffs import HandoffMeter, HandoffTimings
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.requests import OpenRequests, ScoreParts
from kvrelay.worker.speeds import PushClock

log = logging.getLogger(__name__)

TRY_AGAIN_AFTER_S = 60.0


class TransportOffers:
    """The transports to offer to each decode worker. `names`: this worker's, best first."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._failed: dict[tuple[PeerRef, str], float] = {}

    def failed(self, peer: PeerRef, name: str, now: float) -> None:
        """A push to this peer did not arrive."""
        self._failed = {pair: at for pair, at in self._failed.items() if now - at < TRY_AGAIN_AFTER_S}
        self._failed[peer, name] = now

    def to(self, peer: PeerRef, now: float) -> list[str]:
        """Those that did not fail with this peer lately, best first; all of them if none is left."""
        long_ago = now - TRY_AGAIN_AFTER_S
        left = [name for name in self._names if self._failed.get((peer, name), long_ago) <= long_ago]
        return left or list(self._names)


@dataclass(slots=True, eq=False)
class PushedReservation:
    """What the transport does for a reservation, until it reports that it is done."""

    transport: str
    decode: str  # worker id
    request: PrefillRequest | None  # None: the handoff has ended, and only blocks in flight are awaited
    num_open: int = 0  # blocks in flight


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One sequence on a prefill worker. `handle` is the handoff machine's, recorded if an event log is kept. `held` are
    the blocks that the handoff holds beside the scheduler; `reservations` are those whose transfers are reported to the
    machine.
    """

    sequence: Sequence
    prompt: Prompt
    handoff: SenderHandoff
    handle: Callable[[SenderHandoffEvent], list[SenderInstruction]]
    deadline: float
    held: set[int] = field(default_factory=set)
    reservations: dict[str, PushedReservation] = field(default_factory=dict)
    scores: ScoreParts | None = None  # if log-probabilities of the prompt are asked for
    timings: HandoffTimings = field(default_factory=HandoffTimings)
    candidates: Candidates | None = None  # that follow the prompt, in place of a token


class OutgoingHandoffs:
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
        self._offers = TransportOffers(senders)
        self._processes = [own_identity(), *(context.ranks.identities if context.ranks else ())]
        self._shards = shards_of(self._senders, context.spec)
        self._pushed: dict[str, PushedReservation] = {}
        self._clock = PushClock()
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
            "push_busy_s": self._clock.busy_s(time.monotonic()),
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
        self._feed(request, PrefillFinished(self._handoff_of(request, message) if message.finish is None else None))

    def cancel(self, request: PrefillRequest, reason: str) -> None:
        """Ends the request in whatever state it is."""
        self._context.steps.abort(request.sequence.key)
        self._feed(request, Cancel(reason=reason))

    def fail(self, request: PrefillRequest, kind: FailureKind, cause: str, *, retriable: bool) -> None:
        """Ends the request here and sends Failed to the router."""
        if request.handoff.state is SenderState.DRAINING:
            return  # the router knows already, and only the transport can end the wait for writes in flight
        self._send_failed(request, kind, cause, retriable=retriable)
        self._feed(request, Cancel(reason=cause))

    def decode_lost(self, request: PrefillRequest, peer: PeerRef, reason: str) -> None:
        """The decode worker of this request is silent or gone."""
        self._meter.failed("decode_lost", request.timings)
        self._feed(request, DecodeLost(peer, f"{peer.peer_id}: {reason}"))

    # -- from decode and the router -----------------------------------------------------------------------------------

    def on_message(
        self, key: SequenceKey, peer: PeerRef, body: Granted | Refused | Released | Committed | Reassign
    ) -> None:
        """A message about a handoff. If it has ended here, the peer must not wait for it."""
        event = body if isinstance(body, Reassign) else FromDecode(peer, body)
        request = self._requests.get(key)
        if request is not None:
            self._measure(request, peer, body)
            self._feed(request, event)
            return
        for instruction in SenderHandoff.released(peer).handle(event):
            if isinstance(instruction, SendTo):
                self._requests.send(instruction.to, key, instruction.body)

    def _measure(self, request: PrefillRequest, peer: PeerRef, body: object) -> None:
        if isinstance(body, Committed):
            self.totals["handed_over"] += 1
        if isinstance(body, Released) and body.transport_failed:
            self._note_failure(request, TransferFailed(body.reservation, body.reason))
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
            case _:
                pass

    # -- the transport ------------------------------------------------------------------------------------------------

    def _on_transfer(self, event: SenderEvent) -> None:
        if isinstance(event, Pushed):
            self.totals["pushed_blocks"] += len(event.blocks)
            self.totals["pushed_bytes"] += event.num_bytes
        pushed = self._pushed.get(event.reservation)
        if pushed is None:
            return
        num_ended = min(pushed.num_open, len(event.blocks)) if isinstance(event, Pushed) else pushed.num_open
        pushed.num_open -= num_ended
        now = time.monotonic()
        self._clock.ended(num_ended, now)
        num_bytes = event.num_bytes if isinstance(event, Pushed) else 0
        self._context.steps.speeds.links.ended(pushed.decode, num_ended, num_bytes, now)
        request = pushed.request
        if request is None:
            self._end_if_left(event.reservation, pushed)
            return
        match event:
            case SenderDrained():
                del self._pushed[event.reservation], request.reservations[event.reservation]
            case TransferFailed():
                is_current = request.handoff.transport_of(event.reservation) is not None
                self._meter.failed("transfer", request.timings if is_current else None)
                self._note_failure(request, event)
            case Pushed():
                return
        self._feed(request, event)

    def _note_failure(self, request: PrefillRequest, event: TransferFailed) -> None:
        self.totals["failed_pushes"] += 1
        handoff = request.handoff
        if handoff.decode is not None and (name := handoff.transport_of(event.reservation)) is not None:
            fields = self._requests.log_fields(request.sequence.key)
            log.warning("%s to %s failed: %s", name, handoff.decode.peer_id, event.cause, extra=fields)
            self._offers.failed(handoff.decode, name, time.monotonic())

    # -- instructions -------------------------------------------------------------------------------------------------

    def _feed(self, request: PrefillRequest, event: SenderHandoffEvent) -> None:
        for instruction in request.handle(event):
            self._carry_out(request, instruction)

    def _carry_out(self, request: PrefillRequest, instruction: SenderInstruction) -> None:
        key = request.sequence.key
        match instruction:
            case AskDecode(decode):
                self._meter.asked(request.timings)
                self._requests.send(decode, key, self._reserve(request, decode))
            case PushBlocks(granted, copies):
                pushed = self._reservation_of(request, granted.reservation, granted.transport)
                pushed.num_open += len(copies)
                self._hold(request, [copy.source for copy in copies])
                now = time.monotonic()
                self._clock.started(len(copies), now)
                self._context.steps.speeds.links.started(pushed.decode, len(copies), now)
                sender = self._senders[granted.transport]
                sender.push(granted.reservation, granted.endpoints, copies, granted.num_stages)
                self._meter.pushed(request.timings, len(copies))
            case StopPushing(reservation, transport):
                self._reservation_of(request, reservation, transport)  # its SenderDrained is for the machine
                self._senders[transport].abort(reservation)
            case SendTo(_, Failed(failure=kind, cause=cause)):
                self._send_failed(request, kind, cause, retriable=True)
            case SendTo(to, body):
                self._requests.send(to, key, body)
            case ReleaseBlocks():
                self._release(request)

    def _send_failed(self, request: PrefillRequest, kind: FailureKind, cause: str, *, retriable: bool) -> None:
        key = request.sequence.key
        self.totals["failed"] += 1
        self._requests.send(request.sequence.origin.router, key, Failed(failure=kind, cause=cause, retriable=retriable))
        self._context.steps.abort(key)  # it may still be queued, or in the middle of its prompt

    def _reserve(self, request: PrefillRequest, decode: PeerRef) -> Reserve:
        return Reserve(
            prompt=request.prompt,
            router=request.sequence.origin.router,
            transports=self._offers.to(decode, time.monotonic()),
            num_siblings=self._num_siblings(request, decode),
            shards=self._shards,
            processes=self._processes,
            numerics=self._context.spec.numerics,
        )

    def _num_siblings(self, request: PrefillRequest, decode: PeerRef) -> int:
        """The number of other queued samples of the request that go to this decode worker."""
        if request.prompt.num_samples == 1:
            return 0
        return sum(
            each is not request and each.handoff.decode == decode and each.handoff.state is SenderState.QUEUED
            for each in self._requests.samples_of(request.sequence.key[0])
        )

    @staticmethod
    def _handoff_of(request: PrefillRequest, first: FirstToken) -> Handoff:
        """Returns the data that decode needs besides the blocks, without a reservation so far."""
        candidates = request.candidates
        return Handoff(
            reservation="",
            index=first.index,
            token_id=first.token_id,
            num_tokens=request.prompt.num_tokens,
            num_blocks=0,
            logprobs=first.logprobs,
            cached_tokens=first.cached_tokens,
            candidate_ids=candidates.token_ids.tolist() if candidates is not None else [],
            candidate_logprobs=candidates.logprobs.tolist() if candidates is not None else [],
        )

    def _hold(self, request: PrefillRequest, blocks: Iterable[int]) -> None:
        """Holds blocks that the transport reads or that are kept for another decode worker."""
        new = [block for block in blocks if block not in request.held]
        self._context.pool.hold(new, BlockState.IN_FLIGHT)
        request.held.update(new)

    def _reservation_of(self, request: PrefillRequest, name: str, transport: str) -> PushedReservation:
        if name not in self._pushed:
            decode = request.handoff.decode
            pushed = PushedReservation(transport, decode.peer_id if decode is not None else "", request)
            self._pushed[name] = request.reservations[name] = pushed
        return self._pushed[name]

    def _release(self, request: PrefillRequest) -> None:
        self._context.pool.release(list(request.held), BlockState.IN_FLIGHT)
        request.held.clear()
        self._requests.remove(request.sequence.key)
        for name, pushed in request.reservations.items():
            pushed.request = None
            self._end_if_left(name, pushed)
        request.reservations.clear()
        self._context.steps.wake()

    def _end_if_left(self, name: str, pushed: PushedReservation) -> None:
        """Has the transport forget the reservation of an ended handoff once it has reported all of its blocks."""
        if not pushed.num_open:
            del self._pushed[name]
            self._senders[pushed.transport].abort(name)
