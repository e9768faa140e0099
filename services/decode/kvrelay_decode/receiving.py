"""What a decode worker takes over from prefill: wishes, reservations, landing blocks, the commit, quarantine.

The machine in `receiver_handoff.py` decides about one reservation. This module decides whether there is room for
another one, feeds the machines events and carries out their instructions, until the scheduler owns the sequence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import blocks_for
from kvrelay.process_identity import can_be_seen, has_ended
from kvrelay.protocol.messages import (
    Abort,
    Committed,
    Deferred,
    Drained,
    Granted,
    Handoff,
    Header,
    PeerRef,
    Refused,
    Released,
    Resend,
    Reserve,
    SequenceUsage,
    TokenEntry,
)
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import StepPlan
from kvrelay.telemetry.event_log import recorded
from kvrelay.telemetry.handoffs import HandoffMeter, HandoffTimings
from kvrelay.transfer.base import Corrupted, ReceiverEvent, TransferReceiver
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.packed_candidates import unpack_candidates
from kvrelay.worker.requests import OpenRequests, deadline_of
from kvrelay.worker.sequences import PromptRefused, make_sequence, sequence_key
from kvrelay_decode.quarantine import Quarantine
from kvrelay_decode.receiver_events import (
    AdoptionRefused,
    Commit,
    FreeBlocks,
    HandoffAborted,
    HandoffOverdue,
    HandoffReceived,
    PrefillLost,
    QuarantineBlocks,
    ReceiveCancelled,
    ReceiverHandoffEvent,
    ReceiverInstruction,
    ReservationOpened,
    SendReleased,
    SendResend,
    StopReceiving,
    WritesDrained,
)
from kvrelay_decode.receiver_handoff import ReceiverHandoff, ReceiverState
from kvrelay_decode.request import DecodeRequest
from kvrelay_decode.reservations import Reservations
from kvrelay_decode.stream import TokenStream, entry_of
from kvrelay_decode.wishes import Wishes

log = logging.getLogger(__name__)

WAITING = (ReceiverState.ASKED, ReceiverState.RESERVED, ReceiverState.FILLING)
RESEND_AFTER_S = 1.0
"""Blocks that did not land this long after the handoff message, and after the last block, are asked for again; then
after twice this time, and so on."""


class Receiving:
    """See the module's text. `requests` are all of the role's; `arrivals` numbers those that begin here."""

    def __init__(
        self,
        context: WorkerContext,
        receivers: dict[str, TransferReceiver],
        requests: OpenRequests[DecodeRequest],
        stream: TokenStream,
        arrivals: Iterator[int],
    ) -> None:
        self.totals: dict[str, float] = dict.fromkeys(
            ("handoffs_committed", "resends", "corrupted_blocks", "failed_transfers", "quarantines"), 0
        )
        self._context = context
        self._reservations = Reservations(receivers, context.pool.num_blocks, context.messenger.me.incarnation)
        self._requests = requests
        self._stream = stream
        self._arrivals = arrivals
        self._wishes = Wishes(context.scheduler, context.blocks, requests, self._is_within_share)
        self._quarantine = Quarantine(has_ended, can_be_seen)
        self._meter = HandoffMeter(
            "decode", context.spec.block_bytes, context.instruments, context.metrics, context.tracer, context.recent
        )
        self._not_stepped: dict[SequenceKey, HandoffTimings] = {}  # committed, and in no step so far
        context.scheduler.gate = self._wishes.gate

    def start(self) -> None:
        """The event loop runs: blocks may land."""
        self._reservations.start(self._on_transfer)

    def close(self) -> None:
        """Stops the transports."""
        self._reservations.close()

    @property
    def num_lost(self) -> int:
        """Reservations in quarantine whose sender fell silent, without a proof so far that it cannot write."""
        return self._quarantine.num_lost

    @property
    def num_resent(self) -> int:
        """Reservations that wait for blocks that they asked for again."""
        return sum(request.handoff is not None and request.handoff.awaits_resend for request in self._requests.values())

    # -- from the role ------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Nothing is granted any more."""
        for request in list(self._wishes):
            self._refuse_wish(request, "the decode worker is draining")

    def grant_wishes(self) -> None:
        """Something changed that may allow a grant."""
        while (request := self._wishes.next(len(self._quarantine))) is not None:
            if not self._grant(request):
                return

    def planned(self, plan: StepPlan) -> None:
        """A step begins: for some it is the first since their commit."""
        if self._not_stepped:
            for key in [key for key in self._not_stepped if key not in self._requests]:
                del self._not_stepped[key]
            for row in plan.rows:
                timings = self._not_stepped.pop(row.sequence.key, None)
                if timings is not None:
                    self._meter.first_step(timings, row.sequence.key)

    def made_room(self) -> None:
        """Blocks are free: for the scheduler, and for those that wait here."""
        self._context.steps.wake()
        self.grant_wishes()

    def give_up(self, request: DecodeRequest, reason: str) -> None:
        """Ends what is not committed yet. Prefill hears of it."""
        handoff = _machine_of(request)
        if handoff.state in WAITING:
            self._meter.failed("cancelled", request.timings)
        if handoff.state is ReceiverState.ASKED:
            self._refuse_wish(request, reason)
        else:
            self._feed(request, ReceiveCancelled(reason))

    def peer_lost(self, peer: PeerRef, *, replaced: bool) -> None:
        """A prefill worker is silent, or gone; the last is sure only where it was `replaced`."""
        for request in list(self._requests.values()):
            if request.prefill == peer and request.handoff is not None:
                self._drop_wish(request)
                if request.handoff.state in WAITING:
                    self._meter.failed("prefill_lost", request.timings)
                self._feed(request, PrefillLost())
        self._reservations.peer_lost(peer)
        self._quarantine.lost(peer, time.monotonic(), replaced=replaced)

    def tick_quarantine(self, now: float) -> None:
        """Frees what is proven safe, and asks silent senders again."""
        due = self._quarantine.tick(now)
        for key in due.safe:
            request = self._requests[key]
            self._feed(request, WritesDrained())
        for key in due.ask:
            request = self._requests[key]
            reservation = _machine_of(request).reservation
            self._send_prefill(request, Released(reservation=reservation, reason="its sender was silent"))

    def check_overdue(self, request: DecodeRequest, now: float) -> None:
        """Asks for blocks that were lost on the way."""
        if request.handoff is None:
            return
        # Longer after each question: a crowded network must not get more to carry for it.
        if now - request.last_progress > RESEND_AFTER_S * 2**request.handoff.num_silent_rounds:
            request.last_progress = now
            self._feed(request, HandoffOverdue())

    # -- from prefill -------------------------------------------------------------------------------------------------

    def reserve(self, header: Header, prefill: PeerRef, body: Reserve) -> None:
        """A handoff is asked for: granted, deferred, or refused."""
        key = sequence_key(header)
        refusal = self._why_not(key, body)
        if refusal:
            self._requests.send(prefill, key, Refused(reason=refusal))
            return
        self._requests.supersede(key)
        known = self._requests.get(key)
        if known is not None and known.prefill == prefill:
            return  # a wish that was asked again; it is granted when its turn comes
        if known is not None:
            self._requests.cancel(key, "another prefill worker took over")
        if key in self._requests:
            self._requests.send(prefill, key, Refused(reason="slots of an earlier reservation are in quarantine"))
            return
        try:
            request = self._make_request(header, prefill, body)
        except PromptRefused as error:
            self._requests.send(prefill, key, Refused(reason=str(error)))
            return
        self._requests.add(request)
        self._meter.asked(request.timings)
        self._wishes.add(request)
        self.grant_wishes()
        if _machine_of(request).state is ReceiverState.ASKED:
            self._send_prefill(request, Deferred(reason="no room for the prompt's blocks now"))

    def from_prefill(self, key: SequenceKey, body: Handoff | Abort | Drained) -> None:
        """About a reservation, or about a wish."""
        request = self._requests.get(key)
        if request is None or request.handoff is None:
            return
        if body.reservation and body.reservation != request.handoff.reservation:
            return
        match body:
            case Handoff():
                self._meter.complete(request.timings)
                request.last_progress = time.monotonic()
                self._feed(request, HandoffReceived(body))
            case Abort():  # one that crossed the commit changes nothing: the request is the router's to end from there
                self._drop_wish(request)
                if request.handoff.state in WAITING:
                    self._meter.failed("aborted", request.timings)
                self._feed(request, HandoffAborted())
            case Drained() if request.is_quarantined:
                self._quarantine.drained(key)
            case Drained():
                pass  # nobody waits for it

    def _make_request(self, header: Header, prefill: PeerRef, body: Reserve) -> DecodeRequest:
        max_running = self._context.scheduler.limits.max_running
        sequence = make_sequence(header, body.prompt, body.router, self._context.spec, max_running)
        if not self._context.scheduler.group_samples:
            sequence.sample_group = ""
        handoff = ReceiverHandoff()
        return DecodeRequest(
            sequence,
            deadline_of(body.prompt),
            handoff=handoff,
            handle=recorded(self._context.events, "receiver", sequence.key, handoff),
            prefill=prefill,
            process=body.process,
            transport=self._reservations.choose_transport(prefill, body.transports),
            first_index=sequence.num_output,
            num_siblings=body.num_siblings,
            arrival=next(self._arrivals),
            timings=HandoffTimings(key=sequence.key, trace=sequence.trace),
        )

    def _why_not(self, key: SequenceKey, body: Reserve) -> str:
        if self._requests.draining:
            return "the decode worker is draining"
        if key in self._requests.cancelled:
            return "the request was cancelled"
        return self._reservations.why_none_in_common(body.transports)

    # -- room ---------------------------------------------------------------------------------------------------------

    def _is_within_share(self, request: DecodeRequest, num_wanted: int) -> bool:
        return request.prefill is None or self._reservations.is_within_share(
            request.prefill, request.transport, num_wanted
        )

    def _grant(self, request: DecodeRequest) -> bool:
        assert request.prefill is not None
        sequence = request.sequence
        if not self._context.blocks.admit(sequence, BlockState.RESERVED):
            return False
        self._wishes.granted(request)
        first_block = blocks_for(sequence.num_computed, self._context.spec.block_size)
        blocks = sequence.table.ids.tolist()
        reservation = self._reservations.name(sequence.key)
        needs_quarantine = self._reservations.needs_quarantine(request.transport)
        self._feed(request, ReservationOpened(reservation, first_block, len(blocks), needs_quarantine))
        slots = blocks[first_block:]
        granted = self._reservations.open(reservation, request.prefill, request.transport, first_block, slots)
        self._send_prefill(request, granted)
        self._meter.granted(request.timings, request.transport)
        request.timings.num_blocks = len(slots)
        self._context.steps.wake()  # local prompts may have been held back for it
        return True

    def _refuse_wish(self, request: DecodeRequest, reason: str) -> None:
        self._requests.remove(request.sequence.key)
        self._drop_wish(request)
        self._send_prefill(request, Refused(reason=reason))

    def _drop_wish(self, request: DecodeRequest) -> None:
        self._wishes.drop(request)
        self._context.steps.wake()  # local prompts may have been held back for it

    # -- instructions -------------------------------------------------------------------------------------------------

    def _on_transfer(self, event: ReceiverEvent) -> None:
        request = self._requests.get(self._reservations.key_of(event.reservation))
        if request is None:
            return
        request.last_progress = time.monotonic()
        if isinstance(event, Corrupted):
            self.totals["corrupted_blocks"] += len(event.blocks)
        self._feed(request, event)
        self._stream.flush()

    def _feed(self, request: DecodeRequest, event: ReceiverHandoffEvent) -> None:
        assert request.handle is not None
        for instruction in request.handle(event):
            self._carry_out(request, instruction)
        handoff = _machine_of(request)
        if handoff.state is ReceiverState.FREED:
            self._requests.remove(request.sequence.key)
            self._reservations.forget(handoff.reservation)

    def _carry_out(self, request: DecodeRequest, instruction: ReceiverInstruction) -> None:
        sequence = request.sequence
        match instruction:
            case StopReceiving(reservation):
                self._reservations.stop(reservation, request.transport)
            case Commit(handoff):
                self._commit(request, handoff)
            case QuarantineBlocks():
                assert request.prefill is not None
                self._wishes.settled(request)
                self.totals["quarantines"] += 1
                self._quarantine.add(sequence.key, request.prefill, request.process)
                self._context.blocks.change_block_state(sequence, BlockState.QUARANTINED)
            case FreeBlocks(num_whole):
                self._settle(request)
                prompt_end = sequence.num_prompt + request.first_index  # what a commit appended is not computed
                sequence.num_computed = min(num_whole * self._context.spec.block_size, prompt_end)
                self._context.blocks.publish(sequence)
                self._context.blocks.free(sequence)
                self.made_room()
            case SendResend(reservation, blocks, number, corrupted):
                self.totals["resends"] += 1
                request.timings.num_resends += 1
                resend = Resend(reservation=reservation, blocks=list(blocks), number=number, corrupted=corrupted)
                self._send_prefill(request, resend)
            case SendReleased(reservation, reason, transport_failed):
                if transport_failed:
                    self.totals["failed_transfers"] += 1
                    self._meter.failed("transfer", request.timings)
                released = Released(reservation=reservation, reason=reason, transport_failed=transport_failed)
                self._send_prefill(request, released)

    def _commit(self, request: DecodeRequest, handoff: Handoff) -> None:
        sequence = request.sequence
        sequence.num_computed = sequence.num_tokens
        if handoff.token_id is not None:
            sequence.tokens.append(handoff.token_id)
        self._context.blocks.change_block_state(sequence, BlockState.RUNNING)
        try:
            candidates = unpack_candidates(handoff.candidates) if handoff.candidates is not None else None
            output = self._context.steps.adopt(sequence, candidates)
        except (ValueError, OverflowError) as error:
            fields = self._requests.log_fields(sequence.key)
            log.warning("a handoff could not be taken over: %s", error, extra=fields)
            self._feed(request, AdoptionRefused(str(error)))
            return
        self._settle(request)
        self._reservations.forget(handoff.reservation)
        self._send_prefill(request, Committed(reservation=handoff.reservation))
        self._meter.committed(request.timings, sequence.key)
        self._not_stepped[sequence.key] = request.timings
        self._stream.put(sequence.router, _first_entry(request, handoff))
        self.totals["handoffs_committed"] += 1
        if output is not None:  # a beam search that ends with the prompt, which prefill saw differently
            self._stream.put(sequence.router, entry_of(output))
            self._requests.remove(sequence.key)
        self.grant_wishes()  # those that waited for this prefix

    def _settle(self, request: DecodeRequest) -> None:
        """Nothing is written for it any more, and nobody has to wait for its blocks."""
        self._wishes.settled(request)
        self._reservations.settled(request.sequence.key)

    def _send_prefill(
        self, request: DecodeRequest, body: Granted | Deferred | Refused | Committed | Resend | Released
    ) -> None:
        assert request.prefill is not None
        self._requests.send(request.prefill, request.sequence.key, body)


def _machine_of(request: DecodeRequest) -> ReceiverHandoff:
    assert request.handoff is not None
    return request.handoff


def _first_entry(request: DecodeRequest, handoff: Handoff) -> TokenEntry:
    """The first token again, for a router that did not hear it from prefill, and what the prompt's blocks cost."""
    received, cached = _machine_of(request).num_received, _machine_of(request).first_block
    key = request.sequence.key
    return TokenEntry(
        request=key[0],
        attempt=key[1],
        sequence=key[2],
        index=handoff.index,
        token_ids=[handoff.token_id] if handoff.token_id is not None else [],
        logprobs=[handoff.logprobs] if handoff.logprobs is not None else [],
        cached_tokens=handoff.cached_tokens,
        usage=SequenceUsage(prompt_blocks=received + cached, received_blocks=received, cached_blocks=cached),
    )
