"""Handoffs on a decode worker, from prefill's Reserve to the commit: transfers, resends and quarantine.

The scheduler decides when a handoff is admitted: each waits in its queue. The machine in `receiver_handoff.py` decides
about one reservation. This module passes messages and transfers to both and carries out what they return.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

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
)
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import StepPlan
from kvrelay.scheduling.sequence import RemoteKV
from kvrelay.telemetry.event_log import recorded
from kvrelay.telemetry.handoffs import HandoffMeter, HandoffTimings
from kvrelay.transfer.base import Corrupted, ReceiverEvent, TransferReceiver
from kvrelay.transfer.sharded import ShardedReceiver
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.packed_candidates import are_in_vocabulary, unpack_candidates
from kvrelay.worker.requests import OpenRequests, deadline_of, is_same_process
from kvrelay.worker.sequences import make_sequence, sequence_key
from kvrelay_decode.overdue import STALLED_AFTER_S, OverdueTransfers
from kvrelay_decode.quarantine import Quarantine
from kvrelay_decode.receiver_events import (
    AdoptionRefused,
    Commit,
    FreeBlocks,
    HandoffAborted,
    HandoffReceived,
    PrefillLost,
    QuarantineBlocks,
    ReceiveCancelled,
    ReceiverHandoffEvent,
    ReceiverInstruction,
    RecheckBlocks,
    ReservationOpened,
    SendReleased,
    SendResend,
    StopReceiving,
    WritesDrained,
)
from kvrelay_decode.receiver_handoff import ReceiverHandoff, ReceiverState
from kvrelay_decode.request import DecodeRequest
from kvrelay_decode.reservation_transports import Reservations
from kvrelay_decode.stream import TokenStream, entry_of, first_entry_of

log = logging.getLogger(__name__)

NOT_COMMITTED = (ReceiverState.ASKED, ReceiverState.RESERVED, ReceiverState.FILLING)
RECEIVING = (ReceiverState.RESERVED, ReceiverState.FILLING)


class ReceiverDriver:
    """`requests` are all requests of the role, local prompts included."""

    def __init__(
        self,
        context: WorkerContext,
        receivers: Mapping[str, TransferReceiver | ShardedReceiver],
        requests: OpenRequests[DecodeRequest],
        stream: TokenStream,
    ) -> None:
        self.totals: dict[str, float] = dict.fromkeys(
            ("handoffs_committed", "resends", "corrupted_blocks", "failed_transfers", "quarantines"), 0
        )
        self._context = context
        self._scheduler = context.scheduler
        self._reservations = Reservations(receivers, context.messenger.me.incarnation, context.spec)
        self._requests = requests
        self._stream = stream
        self._overdue = OverdueTransfers(self._reservations.needs_quarantine)
        self._quarantine = Quarantine(has_ended, can_be_seen)
        self._meter = HandoffMeter(
            "decode", context.spec.block_bytes, context.instruments, context.metrics, context.tracer, context.recent
        )
        self._withheld: frozenset[SequenceKey] = frozenset()  # quarantined sequences that may stay here for ever
        self._not_stepped: dict[SequenceKey, HandoffTimings] = {}  # committed, and in no step so far

    def start(self) -> None:
        """Starts the transports. Needs a running event loop."""
        self._reservations.start(self._on_transfer)

    def close(self) -> None:
        self._reservations.close()

    @property
    def num_lost(self) -> int:
        """Reservations in quarantine whose sender is silent and not proven to have stopped writing."""
        return self._quarantine.num_lost

    @property
    def num_resent(self) -> int:
        """Reservations whose missing blocks were requested again."""
        return sum(request.handoff is not None and request.handoff.awaits_resend for request in self._requests.values())

    # -- from the role ------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuses every handoff that waits for its reservation."""
        for request in list(self._requests.values()):
            if request.handoff is not None and request.handoff.state is ReceiverState.ASKED:
                self._refuse(request, "the decode worker is draining")

    def admit(self) -> None:
        """Begins the transfers of the handoffs that the scheduler admits now. To be called after every change that may
        allow an admission; the scheduler also admits handoffs with each plan."""
        for sequence in self._scheduler.reserve():
            self._begin_transfer(self._requests[sequence.key])

    def planned(self, plan: StepPlan) -> None:
        """A step was planned: handoffs were admitted with it, and others are in their first step."""
        for sequence in plan.reservations:
            self._begin_transfer(self._requests[sequence.key])
        if self._not_stepped:
            for key in [key for key in self._not_stepped if key not in self._requests]:
                del self._not_stepped[key]
            for row in plan.rows:
                timings = self._not_stepped.pop(row.sequence.key, None)
                if timings is not None:
                    self._meter.first_step(timings, row.sequence.key)

    def made_room(self) -> None:
        """Blocks or places among the running sequences were freed."""
        self._context.steps.wake()
        self.admit()

    def cancel(self, request: DecodeRequest, reason: str) -> None:
        """Ends a handoff that is not committed, and tells prefill."""
        handoff = _machine_of(request)
        if handoff.state in NOT_COMMITTED:
            self._meter.failed("cancelled", request.timings)
        if handoff.state is ReceiverState.ASKED:
            self._refuse(request, reason)
        else:
            self._feed(request, ReceiveCancelled(reason))

    def peer_lost(self, peer: PeerRef, *, replaced: bool) -> None:
        """A prefill worker is silent or gone. Only if it was `replaced` is it certain that it is gone."""
        lost = [each for each in self._requests.values() if each.prefill == peer and each.handoff is not None]
        # All leave the queue first: what one of them frees must not be reserved for another one.
        for request in lost:
            if _machine_of(request).state in NOT_COMMITTED:
                self._meter.failed("prefill_lost", request.timings)
            self._leave_queue(request)
        for request in lost:
            self._feed(request, PrefillLost())
        self._scheduler.sender_gone(peer)
        self._reservations.peer_lost(peer)
        self._overdue.peer_lost(peer)
        self._quarantine.lost(peer, time.monotonic(), replaced=replaced)

    def tick_quarantine(self, now: float) -> None:
        """Frees blocks that are proven safe, and sends Released again to senders that are silent or sent an invalid
        Drained."""
        due = self._quarantine.tick(now)
        for key in due.safe:
            request = self._requests[key]
            self._feed(request, WritesDrained())
        for key in due.ask:
            request = self._requests[key]
            reservation = _machine_of(request).reservation
            self._send_prefill(request, Released(reservation=reservation, reason="no valid Drained came"))
        overdue = self._quarantine.overdue(now)
        if overdue != self._withheld:
            self._withheld = overdue
            tables = [self._requests[key].sequence.table.ids.tolist() for key in overdue]
            self._scheduler.withhold(frozenset(block for table in tables for block in table))

    def check_overdue(self, request: DecodeRequest, now: float) -> None:
        """Requests lost blocks again, ends a transfer that stands still, and lets no sequence wait for one."""
        if request.handoff is None or request.handoff.state not in RECEIVING:
            return
        if self._overdue.has_stalled(request, now) and self._scheduler.transfer_stalled(request.sequence):
            log.warning(
                "%s has sent no block for %g s: other sequences do not wait for what it sends",
                request.prefill.peer_id if request.prefill is not None else "a prefill worker",
                STALLED_AFTER_S,
                extra=self._requests.log_fields(request.sequence.key),
            )
            self.made_room()
        if (event := self._overdue.check(request, now)) is not None:
            self._feed(request, event)

    # -- from prefill -------------------------------------------------------------------------------------------------

    def reserve(self, header: Header, prefill: PeerRef, body: Reserve) -> None:
        """Queues a handoff and answers prefill: granted, deferred or refused."""
        key = sequence_key(header)
        refusal = self._why_not(key, body)
        if refusal:
            self._requests.send(prefill, key, Refused(reason=refusal))
            return
        self._requests.supersede(key)
        known = self._requests.get(key)
        if known is not None and known.prefill == prefill and not known.is_quarantined:
            if _machine_of(known).state is ReceiverState.ASKED:
                return  # Reserve was repeated: the answer comes when the handoff is admitted
            if _machine_of(known).state is ReceiverState.RUNNING:
                self._requests.send(prefill, key, Refused(reason="the handoff was committed here before"))
                return
        if known is not None:
            self._requests.cancel(key, "another prefill worker took over")
        if key in self._requests:
            self._requests.send(prefill, key, Refused(reason="slots of an earlier reservation are in quarantine"))
            return
        try:
            request = self._make_request(header, prefill, body)
            self._scheduler.add(request.sequence)
        except (ValueError, OverflowError) as error:
            self._requests.send(prefill, key, Refused(reason=str(error)))
            return
        self._requests.add(request)
        self._meter.asked(request.timings)
        self.admit()
        if _machine_of(request).state is ReceiverState.ASKED:
            self._send_prefill(request, Deferred(reason="no room for the prompt's blocks now"))

    def from_prefill(self, key: SequenceKey, prefill: PeerRef, body: Handoff | Abort | Drained) -> None:
        """A message about a handoff, admitted or not. Does nothing for the handoff of another prefill worker."""
        request = self._handoff_of(key, prefill)
        if request is None or request.handoff is None:
            return
        if body.reservation and body.reservation != request.handoff.reservation:
            return
        match body:
            case Handoff() if request.handoff.state in RECEIVING and (wrong := self._why_wrong(request, body)):
                self.cancel(request, wrong)
            case Handoff():
                self._meter.complete(request.timings)
                self._feed(request, HandoffReceived(body))
                self._overdue.handed(request, time.monotonic(), is_repeated=body.resend > 0)
            case Abort():  # after the commit it changes nothing: from then on only the router ends the request
                if request.handoff.state in NOT_COMMITTED:
                    self._meter.failed("aborted", request.timings)
                self._leave_queue(request)
                self._feed(request, HandoffAborted())
            case Drained() if request.is_quarantined:
                self._quarantine.drained(key)
            case Drained():
                pass

    def _handoff_of(self, key: SequenceKey, prefill: PeerRef) -> DecodeRequest | None:
        """The handoff of this prefill worker."""
        request = self._requests.get(key)
        if request is None or request.prefill is None or not is_same_process(request.prefill, prefill):
            return None
        return request

    def _why_wrong(self, request: DecodeRequest, body: Handoff) -> str:
        """What the handoff message says that cannot be; empty if nothing. The decoder has checked each field alone."""
        sequence, handoff, vocab_size = request.sequence, _machine_of(request), self._context.spec.vocab_size
        if (body.index, body.num_tokens) != (request.first_index, sequence.num_tokens):
            return f"the handoff is about {body.num_tokens} tokens and output {body.index}, not this sequence"
        if body.num_blocks != handoff.num_granted or body.resend > handoff.num_resend_requests:
            return f"{body.num_blocks} blocks of {handoff.num_granted} were handed over, as answer {body.resend}"
        if (body.candidates is not None) != (sequence.sampling.beams is not None):
            return "a beam search is handed over with candidates, and no other sequence"
        if body.token_id is not None and body.token_id >= vocab_size:
            return f"token {body.token_id} was handed over; the vocabulary has {vocab_size}"
        if body.candidates is not None and not are_in_vocabulary(body.candidates, vocab_size):
            return f"a candidate outside the vocabulary of {vocab_size} was handed over"
        if body.logprobs is not None and not body.logprobs.is_paired:
            return "not every token of the handoff has its log-probability"
        return ""

    def _make_request(self, header: Header, prefill: PeerRef, body: Reserve) -> DecodeRequest:
        max_running = self._context.scheduler.limits.max_running
        sequence = make_sequence(header, body.prompt, body.router, self._context.spec, max_running)
        num_blocks = blocks_for(sequence.num_tokens, self._context.spec.block_size)
        if body.num_blocks != num_blocks:
            raise ValueError(f"{body.num_blocks} blocks are offered, the prompt has {num_blocks}")
        transport = self._reservations.choose_transport(prefill, body.transports)
        sequence.remote = RemoteKV(prefill, num_to_come=body.num_siblings)
        handoff = ReceiverHandoff()
        return DecodeRequest(
            sequence,
            deadline_of(body.prompt),
            handoff=handoff,
            handle=recorded(self._context.events, "receiver", sequence.key, handoff),
            prefill=prefill,
            processes=tuple(body.processes) or (body.process,),
            transport=transport,
            shards=body.shards,
            first_index=sequence.num_output,
            timings=HandoffTimings(key=sequence.key, trace=sequence.trace),
        )

    def _why_not(self, key: SequenceKey, body: Reserve) -> str:
        if self._requests.draining:
            return "the decode worker is draining"
        if key in self._requests.cancelled:
            return "the request was cancelled"
        return self._reservations.why_none_in_common(body.transports, body.shards)

    # -- the queue ----------------------------------------------------------------------------------------------------

    def _begin_transfer(self, request: DecodeRequest) -> None:
        """Tells prefill where the missing blocks go. The scheduler has reserved them."""
        assert request.prefill is not None
        sequence = request.sequence
        first_block = sequence.num_published  # those before it were found in the prefix cache
        blocks = sequence.table.ids.tolist()
        reservation = self._reservations.name(sequence.key)
        needs_quarantine = self._reservations.needs_quarantine(request.transport)
        self._feed(request, ReservationOpened(reservation, first_block, len(blocks), needs_quarantine))
        slots = blocks[first_block:]
        granted = self._reservations.open(reservation, request.transport, first_block, slots, request.shards)
        self._send_prefill(request, granted)
        self._overdue.granted(request, time.monotonic())
        self._meter.granted(request.timings, request.transport)
        request.timings.num_blocks = len(slots)
        self._context.steps.wake()  # a local prompt may be next in the queue

    def _refuse(self, request: DecodeRequest, reason: str) -> None:
        self._leave_queue(request)
        self._requests.remove(request.sequence.key)
        self._send_prefill(request, Refused(reason=reason))

    def _leave_queue(self, request: DecodeRequest) -> None:
        """Takes a handoff that is not admitted out of the scheduler's queue."""
        if _machine_of(request).state is ReceiverState.ASKED:
            self._scheduler.abort(request.sequence.key)
            self._context.steps.wake()  # another sequence may be next now

    # -- instructions -------------------------------------------------------------------------------------------------

    def _on_transfer(self, event: ReceiverEvent) -> None:
        request = self._requests.get(self._reservations.key_of(event.reservation))
        if request is None:
            return
        self._overdue.landed(request, time.monotonic())
        self._scheduler.transfer_progressed(request.sequence)
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
                self.totals["quarantines"] += 1
                self._quarantine.add(sequence.key, request.prefill, request.processes, time.monotonic())
                self._scheduler.quarantine(sequence)
                self.made_room()  # a place among the running sequences; others may also have waited for its prefix
            case FreeBlocks(num_whole):
                # A commit that failed has appended the first token, whose KV is not here.
                prompt_end = sequence.num_prompt + request.first_index
                self._scheduler.release(sequence, min(num_whole * self._context.spec.block_size, prompt_end))
                self.made_room()
            case SendResend(reservation, blocks, number, corrupted):
                self.totals["resends"] += 1
                request.timings.num_resends += 1
                resend = Resend(reservation=reservation, blocks=list(blocks), number=number, corrupted=corrupted)
                self._send_prefill(request, resend)
            case RecheckBlocks(reservation, blocks):
                self._reservations.recheck(reservation, request.transport, blocks)
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
        try:
            candidates = unpack_candidates(handoff.candidates) if handoff.candidates is not None else None
            output = self._context.steps.adopt(sequence, candidates)
        except (ValueError, OverflowError) as error:
            fields = self._requests.log_fields(sequence.key)
            log.warning("this worker cannot run a sequence that was handed over: %s", error, extra=fields)
            self._feed(request, AdoptionRefused(str(error)))
            return
        self._reservations.forget(handoff.reservation)
        self._send_prefill(request, Committed(reservation=handoff.reservation))
        self._meter.committed(request.timings, sequence.key)
        self._not_stepped[sequence.key] = request.timings
        machine = _machine_of(request)
        self._stream.put(
            sequence.router, first_entry_of(sequence.key, handoff, machine.num_received, machine.first_block)
        )
        self.totals["handoffs_committed"] += 1
        if output is not None:  # a beam search that ends with the prompt, which prefill saw differently
            self._stream.put(sequence.router, entry_of(output))
            self._requests.remove(sequence.key)
        self.admit()  # others may have waited for this prefix

    def _send_prefill(
        self, request: DecodeRequest, body: Granted | Deferred | Refused | Committed | Resend | Released
    ) -> None:
        assert request.prefill is not None
        self._requests.send(request.prefill, request.sequence.key, body)


def _machine_of(request: DecodeRequest) -> ReceiverHandoff:
    assert request.handoff is not None
    return request.handoff
