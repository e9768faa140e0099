"""The prefill service's role: takes prompts, computes them in chunks, hands their blocks over.

The machines in `handoff.py` decide; this module feeds them events and carries out their instructions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from kvrelay.engine.batch import SequenceKey
from kvrelay.kv.pool import Owner
from kvrelay.kv.table import blocks_for
from kvrelay.process_identity import own_identity
from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import (
    Abort,
    AnyBody,
    Cancel,
    Committed,
    Deferred,
    Drained,
    Failed,
    FirstToken,
    Granted,
    Handoff,
    Header,
    NeedDecode,
    PeerRef,
    Prefill,
    Reassign,
    Refused,
    Released,
    Resend,
    Reserve,
    Stop,
)
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.handoffs import HandoffCourse, HandoffMeter
from kvrelay.transfer.base import Pushed, SenderDrained, SenderEvent, TransferFailed, TransferSender
from kvrelay.worker.candidates import pack_candidates
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.requests import OpenRequests, deadline_of
from kvrelay.worker.sequences import sequence_key
from kvrelay.worker.step_loop import StepCallbacks
from kvrelay_prefill import handoff as machine
from kvrelay_prefill.offers import TransportOffers
from kvrelay_prefill.pushes import Pushes
from kvrelay_prefill.request import PrefillRequest

log = logging.getLogger(__name__)

_NOT_HANDED = (machine.SenderState.QUEUED, machine.SenderState.COMPUTING, machine.SenderState.SENDING)


class PrefillRole:
    """See the module's text."""

    name = "prefill"

    def __init__(
        self, context: WorkerContext, senders: dict[str, TransferSender], *, push_when: machine.PushWhen = "chunk"
    ) -> None:
        self._push_when = push_when
        self._meter = HandoffMeter(
            self.name, context.spec.block_bytes, context.instruments, context.metrics, context.tracer, context.recent
        )
        self._context = context
        self._senders = senders
        self._offers = TransportOffers(senders)
        self._process = own_identity()
        self._pushes = Pushes()
        self._requests: OpenRequests[PrefillRequest] = OpenRequests(context, self.name, self._cancel)
        self._totals: dict[str, float] = dict.fromkeys(
            (
                "requests",
                "handed_over",
                "failed",
                "cancelled",
                "pushed_blocks",
                "pushed_bytes",
                "failed_pushes",
                "prompt_blocks",
                "cached_blocks",
                "computed_blocks",
            ),
            0,
        )

    # -- the shell's side ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        for sender in self._senders.values():
            sender.start(self._on_transfer)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def callbacks(self) -> StepCallbacks:
        return StepCallbacks(self._planned, self._committed, self._failed)

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def queues(self) -> dict[str, int]:
        queues = {state.value: 0 for state in machine.SenderState if state is not machine.SenderState.RELEASED}
        queues |= {"awaiting_grant": 0, "deferred": 0, "granted": 0, "awaiting_router": 0}
        waiting = {
            machine.Reservation.ASKED: "awaiting_grant",
            machine.Reservation.DEFERRED: "deferred",
            machine.Reservation.GRANTED: "granted",
            machine.Reservation.REFUSED: "awaiting_router",
        }
        for request in self._requests.values():
            queues[request.handoff.state.value] += 1
            if (name := waiting.get(request.handoff.reservation)) is not None:
                queues[name] += 1
        return queues | {
            "queued_tokens": sum(sequence.num_tokens for sequence in self._context.scheduler.waiting),
            "tombstones": len(self._requests.tombstones),
        }

    def totals(self) -> dict[str, float]:
        counters = [sender.counters for sender in self._senders.values()]
        return self._totals | {
            "push_messages": sum(each.num_messages for each in counters),
            "push_runs": sum(each.num_runs for each in counters),
            "push_busy_s": self._pushes.busy_s(time.monotonic()),
        }

    def begin_drain(self) -> None:
        self._requests.draining = True

    def abandon(self, reason: str) -> None:
        for key in list(self._requests):
            self._fail(key, reason, retriable=True)

    def on_tick(self, now: float) -> None:
        for key, request in list(self._requests.items()):
            if now > request.deadline:
                self._fail(key, "the request's deadline passed on the prefill worker", retriable=False)

    def on_peer_lost(self, peer: PeerRef, reason: str, *, replaced: bool) -> None:
        for key, request in list(self._requests.items()):
            if request.sequence.router == peer:
                self._cancel(key, f"the router is gone: {reason}")
            elif request.handoff.decode == peer:
                self._meter.failed("decode_lost", request.course)
                self._run(key, request.handoff.decode_lost(peer, f"{peer.peer_id}: {reason}"))

    # -- messages -----------------------------------------------------------------------------------------------------

    def on_message(self, event: Delivered) -> None:
        body, key = event.body, sequence_key(event.header)
        if isinstance(body, Prefill):
            self._start(event.header, event.peer, body)
            return
        if isinstance(body, Stop | Cancel):
            self._requests.end(key, body)
            return
        request = self._requests.get(key)
        if request is None:
            self._answer_for_unknown(event.header, event.peer, body)
            return
        self._measure(request, event.peer, body)
        self._run(key, self._to_machine(request.handoff, event.peer, body))

    def _measure(self, request: PrefillRequest, peer: PeerRef, body: AnyBody) -> None:
        handoff = request.handoff
        if peer != handoff.decode:
            return  # about a reservation that was given up before
        match body:
            case Granted():
                self._meter.granted(request.course, body.transport)
            case Refused():
                self._meter.failed("refused", request.course)
            case Released():
                self._meter.failed("transfer" if body.transport_failed else "released", request.course)
            case Committed() if handoff.state is machine.SenderState.HANDED:
                self._meter.committed(request.course, request.sequence.key)
            case Resend():
                request.course.num_resends += 1
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
                self._totals["handed_over"] += 1
                return handoff.committed(body.reservation)
            case Resend():
                return handoff.resend(body.reservation, body.blocks, body.number, corrupted=body.corrupted)
            case Reassign():
                return handoff.reassigned(body.decode)
            case _:
                log.warning("%s sent %s, which is not for a prefill worker", peer.peer_id, type(body).__name__)
                return []

    def _answer_for_unknown(self, header: Header, peer: PeerRef, body: AnyBody) -> None:
        """About a request that ended here: the other side must not wait for it."""
        key = sequence_key(header)
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

    def _start(self, header: Header, router: PeerRef, body: Prefill) -> None:
        sequence = self._requests.queue(header, router, body.prompt, prefill_only=True)
        if sequence is None:
            return
        handoff = machine.SenderHandoff(body.decode, self._push_when)
        if self._context.events is not None:
            self._context.events.watch("sender", sequence.key, handoff, body.decode, self._push_when)
        course = HandoffCourse(key=sequence.key, trace=sequence.trace)
        self._requests.add(PrefillRequest(sequence, body.prompt, handoff, deadline_of(body.prompt), course=course))
        self._totals["requests"] += 1
        self._totals["prompt_blocks"] += blocks_for(sequence.num_tokens, self._context.spec.block_size)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan) -> None:
        """Decode is asked as soon as the first chunk is scheduled; a cached prefix can leave before any forward."""
        for sequence in plan.admitted:
            request = self._requests[sequence.key]
            self._run(sequence.key, request.handoff.scheduled(sequence.table.ids.tolist()))
            self._tell_computed(request)

    def _committed(self, outputs: list[SequenceOutput]) -> None:
        done = {output.sequence.key for output in outputs if output.prefilled}
        for output in outputs:
            request = self._requests.get(output.sequence.key)
            if request is not None:
                request.prompt_logprobs += output.prompt_logprobs
                if output.prefilled:
                    self._prefilled(request, output)
        for key in list(self._context.scheduler.running):
            if key not in done and (request := self._requests.get(key)) is not None:
                self._tell_computed(request)

    def _tell_computed(self, request: PrefillRequest) -> None:
        if request.handoff.state is machine.SenderState.COMPUTING:
            num_complete = request.sequence.num_computed // self._context.spec.block_size
            self._run(request.sequence.key, request.handoff.computed(num_complete))

    def _prefilled(self, request: PrefillRequest, output: SequenceOutput) -> None:
        sequence = request.sequence
        message = FirstToken(
            index=output.index,
            token_id=output.token_id,
            logprobs=output.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            cached_tokens=sequence.num_cached_tokens,
            finish=output.finish,
            beams=list(output.beams),
        )
        request.candidates = output.candidates
        if output.candidates is None or output.finish is not None:  # of a beam search the router gets its end alone
            self._requests.send(sequence.router, sequence.key, message)
        if output.finish is None:
            self._hold(request, request.handoff.blocks)
            self._context.scheduler.abort(sequence.key)  # its blocks are the handoff's from here on
        num_cached = blocks_for(sequence.num_cached_tokens, self._context.spec.block_size)
        num_blocks = blocks_for(request.prompt.num_tokens, self._context.spec.block_size)  # the first token has none
        self._totals["cached_blocks"] += num_cached
        self._totals["computed_blocks"] += num_blocks - num_cached
        self._context.steps.forget(sequence.key)
        self._meter.complete(request.course)
        self._run(sequence.key, request.handoff.prefilled(message))

    def _failed(self, sequences: list[Sequence], cause: str) -> None:
        for sequence in sequences:
            self._fail(sequence.key, cause, retriable=True)

    # -- the transport ------------------------------------------------------------------------------------------------

    def _on_transfer(self, event: SenderEvent) -> None:
        key = self._pushes.key_of(event.reservation)
        self._pushes.ended(event, time.monotonic())
        if isinstance(event, Pushed):
            self._totals["pushed_blocks"] += len(event.blocks)
            self._totals["pushed_bytes"] += event.num_bytes
        request = self._requests.get(key)
        if key is None or request is None:
            return
        match event:
            case Pushed():
                self._run(key, request.handoff.pushed(event.reservation, event.blocks))
            case SenderDrained():
                self._forget_reservation(request, event.reservation)
                self._run(key, request.handoff.drained(event.reservation))
            case TransferFailed():
                is_current = request.handoff.transport_of(event.reservation) is not None
                self._meter.failed("transfer", request.course if is_current else None)
                self._note_failure(request.handoff, event)
                self._run(key, request.handoff.transfer_failed(event.reservation, event.cause))

    def _note_failure(self, handoff: machine.SenderHandoff, event: TransferFailed) -> None:
        self._totals["failed_pushes"] += 1
        if handoff.decode is not None and (name := handoff.transport_of(event.reservation)) is not None:
            fields = self._requests.log_fields(self._pushes.key_of(event.reservation))
            log.warning("%s to %s failed: %s", name, handoff.decode.peer_id, event.cause, extra=fields)
            self._offers.failed(handoff.decode, name, time.monotonic())

    # -- instructions -------------------------------------------------------------------------------------------------

    def _run(self, key: SequenceKey, instructions: list[machine.Instruction]) -> None:
        request = self._requests[key]
        for instruction in instructions:
            self._carry_out(request, instruction)

    def _carry_out(self, request: PrefillRequest, instruction: machine.Instruction) -> None:
        key, router = request.sequence.key, request.sequence.router
        match instruction:
            case machine.AskDecode(decode):
                self._meter.asked(request.course)
                self._requests.send(decode, key, self._reserve(request, decode))
            case machine.AskRouter(reason, excluded, lacks):
                self._requests.send(router, key, NeedDecode(reason=reason, excluded=list(excluded), lacks=lacks))
            case machine.PushBlocks(reservation, transport, endpoint, copies):
                self._know_reservation(request, reservation)
                self._hold(request, [copy.source for copy in copies])
                self._pushes.begun(reservation, len(copies), time.monotonic())
                self._senders[transport].push(reservation, endpoint, copies)
                self._meter.pushed(request.course, len(copies))
            case machine.SendHandoff(decode, reservation, num_blocks, resend):
                request.course.is_handed = True
                self._requests.send(decode, key, self._handoff_message(request, reservation, num_blocks, resend))
            case machine.AbortTransfer(reservation, transport):
                self._know_reservation(request, reservation)
                self._senders[transport].abort(reservation)
            case machine.SendAbort(decode, reservation, reason):
                self._requests.send(decode, key, Abort(reservation=reservation, reason=reason))
            case machine.SendDrained(decode, reservation):
                self._requests.send(decode, key, Drained(reservation=reservation))
            case machine.FailRequest(cause):
                self._totals["failed"] += 1
                self._context.steps.abort(key)  # it may still be queued, or in the middle of its prompt
                self._requests.send(router, key, Failed(cause=cause, retriable=True))
            case machine.ReleaseBlocks():
                self._release(request)

    def _reserve(self, request: PrefillRequest, decode: PeerRef) -> Reserve:
        return Reserve(
            prompt=request.prompt,
            router=request.sequence.router,
            transports=self._offers.to(decode, time.monotonic()),
            num_blocks=len(request.handoff.blocks),
            process=self._process,
            num_siblings=self._num_siblings(request, decode, (machine.SenderState.QUEUED,)),
        )

    def _num_siblings(
        self, request: PrefillRequest, decode: PeerRef | None, states: Collection[machine.SenderState]
    ) -> int:
        """Other samples of its request in these states that go to this decode worker. O(requests)."""
        if request.prompt.num_samples == 1:
            return 0
        return sum(
            each is not request
            and each.sequence.key[0] == request.sequence.key[0]
            and each.handoff.decode == decode
            and each.handoff.state in states
            for each in self._requests.values()
        )

    def _num_unheard(self, request: PrefillRequest) -> int:
        """Samples of its request that have not come here yet, if they do: they are sent one by one. O(requests)."""
        if request.prompt.num_samples == 1:
            return 0
        heard = {key[2] for key in self._requests if key[0] == request.sequence.key[0]}
        heard |= self._context.blocks.tails.seen_of(request.sequence.key[0])
        return request.prompt.num_samples - len(heard)

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
            num_siblings=self._num_siblings(request, request.handoff.decode, _NOT_HANDED) + self._num_unheard(request),
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

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _cancel(self, key: SequenceKey, reason: str) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        self._totals["cancelled"] += 1
        self._context.steps.abort(key)
        self._run(key, request.handoff.cancel(reason))

    def _fail(self, key: SequenceKey, cause: str, *, retriable: bool) -> None:
        request = self._requests.get(key)
        if request is None or request.handoff.state is machine.SenderState.DRAINING:
            return  # whatever led there, the router knows; nothing but the transport's word ends the wait for writes
        self._totals["failed"] += 1
        self._requests.send(request.sequence.router, key, Failed(cause=cause, retriable=retriable))
        self._context.steps.abort(key)
        self._run(key, request.handoff.cancel(cause))
