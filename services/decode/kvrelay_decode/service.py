"""The decode service's role: reserves blocks, takes them in, runs what was handed over, streams its tokens.

The machine in `handoff.py` decides about one reservation; this module decides whether there is room for another one,
feeds the machines events and carries out their instructions. It also computes whole prompts when the router asks.
"""

from __future__ import annotations

import itertools
import logging
import time

from kvrelay.engine.batch import SequenceKey
from kvrelay.kv.pool import Owner
from kvrelay.kv.table import blocks_for
from kvrelay.process_identity import has_ended
from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import (
    Abort,
    AnyBody,
    Cancel,
    Committed,
    Deferred,
    Drained,
    Failed,
    Generate,
    Granted,
    Handoff,
    Header,
    PeerRef,
    Prompt,
    Refused,
    Released,
    Resend,
    Reserve,
    SequenceUsage,
    Stop,
    TokenBatch,
    TokenEntry,
)
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import Sequence
from kvrelay.transfer.base import Landed, TransferReceiver
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.sequences import PromptRefused, make_sequence, sequence_key
from kvrelay.worker.step_loop import StepCallbacks
from kvrelay.worker.tombstones import Tombstones
from kvrelay_decode import handoff as machine
from kvrelay_decode.quarantine import PEER_SHARE, Quarantine
from kvrelay_decode.request import DecodeRequest
from kvrelay_decode.stream import TokenStream
from kvrelay_decode.wishes import Wishes

log = logging.getLogger(__name__)

DEADLINE_GRACE_S = 5.0
"""The router ends a request at its deadline; a worker that heard nothing does so this much later."""

RESEND_AFTER_S = 1.0
"""Blocks that did not land this long after the handoff message, and after the last block, are asked for again."""


class DecodeRole:
    """See the module's text."""

    name = "decode"

    def __init__(self, context: WorkerContext, receivers: dict[str, TransferReceiver]) -> None:
        self._context = context
        self._receivers = receivers
        self._requests: dict[SequenceKey, DecodeRequest] = {}
        self._by_reservation: dict[str, SequenceKey] = {}
        self._wishes = Wishes(context.scheduler, context.blocks, self._requests, self._is_within_share)
        context.scheduler.gate = self._wishes.gate
        self._reservation_numbers = itertools.count(1)
        self._arrivals = itertools.count(1)
        self._tombstones = Tombstones()
        self._stream = TokenStream(self._send_batch)
        self._quarantine = Quarantine(has_ended)
        self._pairs: dict[PeerRef, str] = {}  # the transport that was last taken with a prefill worker
        self._draining = False
        self._totals: dict[str, float] = dict.fromkeys(
            (
                "handoffs_committed",
                "local_prompts",
                "failed",
                "cancelled",
                "prompt_blocks",
                "received_blocks",
                "cached_blocks",
                "computed_blocks",
                "resends",
                "quarantines",
            ),
            0,
        )

    # -- the shell's side ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        for receiver in self._receivers.values():
            receiver.start(self._on_landed)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()

    def callbacks(self) -> StepCallbacks:
        return StepCallbacks(self._planned, self._committed, self._failed)

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def queues(self) -> dict[str, int]:
        queues = {state.value: 0 for state in machine.ReceiverState if state is not machine.ReceiverState.FREED}
        for request in self._requests.values():
            if request.handoff is not None and request.handoff.state is not machine.ReceiverState.RUNNING:
                queues[request.handoff.state.value] += 1
        scheduler = self._context.scheduler
        return queues | {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "queued_tokens": sum(sequence.num_tokens for sequence in scheduler.waiting),
            "tombstones": len(self._tombstones),
            "sender_lost": self._quarantine.num_lost,
        }

    def totals(self) -> dict[str, float]:
        return dict(self._totals) | {"preemptions": self._context.scheduler.num_preemptions}

    def begin_drain(self) -> None:
        self._draining = True
        for request in list(self._wishes):
            self._refuse_wish(request.sequence.key, "the decode worker is draining")

    def abandon(self, reason: str) -> None:
        for key in list(self._requests):
            self._fail(key, reason, retriable=True)

    def on_tick(self, now: float) -> None:
        self._tick_quarantine(now)
        for key, request in list(self._requests.items()):
            if request.is_quarantined:
                continue
            if now > request.deadline:
                self._fail(key, "the request's deadline passed on the decode worker", retriable=False)
            elif request.handoff is not None and now - request.last_progress > RESEND_AFTER_S:
                request.last_progress = now
                self._run(key, request.handoff.overdue())
        self._grant_wishes()

    def _tick_quarantine(self, now: float) -> None:
        due = self._quarantine.tick(now)
        for key in due.safe:
            handoff = self._requests[key].handoff
            assert handoff is not None
            self._run(key, handoff.drained())
        for key in due.ask:
            request = self._requests[key]
            assert request.handoff is not None and request.prefill is not None
            released = Released(reservation=request.handoff.reservation, reason="its sender was silent")
            self._send(request.prefill, key, released)

    def on_peer_lost(self, peer: PeerRef, reason: str, *, replaced: bool) -> None:
        for key, request in list(self._requests.items()):
            if request.sequence.router == peer:
                self._cancel(key, f"the router is gone: {reason}")
            elif request.prefill == peer and request.handoff is not None:
                self._wishes.drop(request)
                self._run(key, request.handoff.sender_lost())
        self._pairs.pop(peer, None)
        self._quarantine.lost(peer, time.monotonic(), replaced=replaced)

    # -- messages -----------------------------------------------------------------------------------------------------

    def on_message(self, event: Delivered) -> None:
        body, key = event.body, sequence_key(event.header)
        match body:
            case Reserve():
                self._reserve(event.header, event.peer, body)
            case Generate():
                self._generate(event.header, event.peer, body)
            case Stop() | Cancel():
                reason = body.reason if isinstance(body, Cancel) else "a stop string matched"
                self._cancel(key, reason)
                self._tombstones.bury(key, time.monotonic())
            case Handoff() | Abort() | Drained():
                self._from_prefill(key, body)
            case _:
                log.warning("%s sent %s, which is not for a decode worker", event.peer.peer_id, type(body).__name__)
        self._stream.flush()

    def _from_prefill(self, key: SequenceKey, body: Handoff | Abort | Drained) -> None:
        request = self._requests.get(key)
        if request is None or request.handoff is None:
            return
        if body.reservation and body.reservation != request.handoff.reservation:
            return
        match body:
            case Handoff():
                request.last_progress = time.monotonic()
                self._run(key, request.handoff.handed(body))
            case Abort():  # one that crossed the commit changes nothing: the request is the router's to end from there
                self._wishes.drop(request)
                self._run(key, request.handoff.aborted())
            case Drained() if request.is_quarantined:
                self._quarantine.drained(key)
            case Drained():
                pass  # nobody waits for it

    def _generate(self, header: Header, router: PeerRef, body: Generate) -> None:
        key = sequence_key(header)
        if key in self._tombstones or key in self._requests:
            return
        if self._draining:
            self._send(router, key, Failed(cause="the decode worker is draining", retriable=True))
            return
        self._supersede(key)
        try:
            sequence = make_sequence(header, body.prompt, router, self._context.spec)
            self._context.steps.add(sequence)
        except (ValueError, OverflowError) as error:
            self._send(router, key, Failed(cause=str(error), retriable=False))
            return
        self._requests[key] = DecodeRequest(
            sequence, self._deadline(body.prompt), first_index=sequence.num_output, arrival=next(self._arrivals)
        )
        self._totals["local_prompts"] += 1

    def _reserve(self, header: Header, prefill: PeerRef, body: Reserve) -> None:
        key = sequence_key(header)
        refusal = self._why_not(key, body)
        if refusal:
            self._send(prefill, key, Refused(reason=refusal))
            return
        self._supersede(key)
        known = self._requests.get(key)
        if known is not None and known.prefill == prefill:
            return  # a wish that was asked again; it is granted when its turn comes
        if known is not None:
            self._cancel(key, "another prefill worker took over")
        if key in self._requests:
            self._send(prefill, key, Refused(reason="slots of an earlier reservation are in quarantine"))
            return
        try:
            sequence = make_sequence(header, body.prompt, body.router, self._context.spec)
        except PromptRefused as error:
            self._send(prefill, key, Refused(reason=str(error)))
            return
        request = DecodeRequest(
            sequence,
            self._deadline(body.prompt),
            handoff=machine.ReceiverHandoff(),
            prefill=prefill,
            process=body.process,
            transport=self._choose_transport(prefill, body.transports),
            first_index=sequence.num_output,
            arrival=next(self._arrivals),
        )
        self._requests[key] = request
        self._wishes.add(request)
        self._grant_wishes()
        if request.handoff is not None and request.handoff.state is machine.ReceiverState.ASKED:
            self._send(prefill, key, Deferred(reason="no room for the prompt's blocks now"))

    def _why_not(self, key: SequenceKey, body: Reserve) -> str:
        if self._draining:
            return "the decode worker is draining"
        if key in self._tombstones:
            return "the request was cancelled"
        if not any(name in self._receivers for name in body.transports):
            return f"no common transport: {body.transports} offered, {list(self._receivers)} here"
        return ""

    def _choose_transport(self, prefill: PeerRef, offered: list[str]) -> str:
        """The sender's best that is here too; logged when it is the pair's first, or another one than before."""
        taken = next(name for name in offered if name in self._receivers)
        if self._pairs.get(prefill) != taken:
            self._pairs[prefill] = taken
            log.info(
                "KV blocks of %s come by %s: it offers %s, and %s can be taken here",
                prefill.peer_id,
                taken,
                ", ".join(offered),
                ", ".join(self._receivers),
            )
        return taken

    def _supersede(self, key: SequenceKey) -> None:
        """A newer attempt of the same sequence ends the older ones."""
        for other in [k for k in self._requests if k[0] == key[0] and k[2] == key[2] and k[1] < key[1]]:
            self._cancel(other, "a newer attempt took over")

    # -- room ---------------------------------------------------------------------------------------------------------

    def _grant_wishes(self) -> None:
        while (request := self._wishes.next(len(self._requests))) is not None:
            if not self._grant(request.sequence.key, request):
                return

    def _is_within_share(self, request: DecodeRequest, num_wanted: int) -> bool:
        """A sender that is stopped for good keeps what it may write into: that must not be the whole pool."""
        if not self._receivers[request.transport].needs_quarantine:
            return True
        held = [r for r in self._requests.values() if r.prefill == request.prefill and r.may_be_written]
        num_held = sum(len(r.sequence.table.ids) for r in held)
        return not held or num_held + num_wanted <= PEER_SHARE * self._context.pool.num_blocks

    def _grant(self, key: SequenceKey, request: DecodeRequest) -> bool:
        assert request.handoff is not None and request.prefill is not None
        sequence = request.sequence
        if not self._context.blocks.admit(sequence, Owner.RESERVED):
            return False
        self._wishes.granted(request)
        receiver = self._receivers[request.transport]
        first_block = sequence.num_computed // self._context.spec.block_size
        blocks = sequence.table.ids.tolist()
        reservation = f"{self._context.messenger.me.incarnation}-{next(self._reservation_numbers)}"
        self._by_reservation[reservation] = key
        request.handoff.granted(reservation, first_block, len(blocks), needs_quarantine=receiver.needs_quarantine)
        receiver.admit(reservation, first_block, blocks[first_block:])
        self._send(
            request.prefill,
            key,
            Granted(
                reservation=reservation,
                first_block=first_block,
                slots=blocks[first_block:],
                transport=request.transport,
                endpoint=receiver.endpoint,
            ),
        )
        return True

    def _refuse_wish(self, key: SequenceKey, reason: str) -> None:
        request = self._requests.pop(key)
        self._wishes.drop(request)
        if request.prefill is not None:
            self._send(request.prefill, key, Refused(reason=reason))

    # -- instructions -------------------------------------------------------------------------------------------------

    def _on_landed(self, event: Landed) -> None:
        key = self._by_reservation.get(event.reservation)
        request = self._requests.get(key) if key is not None else None
        if key is None or request is None or request.handoff is None:
            return
        request.last_progress = time.monotonic()
        self._run(key, request.handoff.landed(event.reservation, event.blocks))
        self._stream.flush()

    def _run(self, key: SequenceKey, instructions: list[machine.Instruction]) -> None:
        request = self._requests[key]
        for instruction in instructions:
            self._carry_out(key, request, instruction)
        if request.handoff is not None and request.handoff.state is machine.ReceiverState.FREED:
            self._forget(key, request)

    def _carry_out(self, key: SequenceKey, request: DecodeRequest, instruction: machine.Instruction) -> None:
        sequence = request.sequence
        match instruction:
            case machine.StopReceiving(reservation):
                self._receivers[request.transport].release(reservation)
            case machine.Commit(handoff):
                self._commit(key, request, handoff)
            case machine.Quarantine():
                assert request.prefill is not None
                self._wishes.settled(request)
                self._totals["quarantines"] += 1
                self._quarantine.add(key, request.prefill, request.process)
                self._context.blocks.change_owner(sequence, Owner.QUARANTINED)
            case machine.FreeBlocks(num_whole):
                self._wishes.settled(request)
                sequence.num_computed = min(num_whole * self._context.spec.block_size, sequence.num_tokens)
                self._context.blocks.publish(sequence)
                self._context.blocks.free(sequence)
                self._made_room()
            case machine.AskForMissing(reservation, blocks):
                assert request.prefill is not None
                self._totals["resends"] += 1
                self._send(request.prefill, key, Resend(reservation=reservation, blocks=list(blocks)))
            case machine.TellReleased(reservation, reason):
                assert request.prefill is not None
                self._send(request.prefill, key, Released(reservation=reservation, reason=reason))

    def _commit(self, key: SequenceKey, request: DecodeRequest, handoff: Handoff) -> None:
        assert request.handoff is not None and request.prefill is not None
        sequence = request.sequence
        received, cached = request.handoff.num_received, request.handoff.first_block
        sequence.num_computed = sequence.num_tokens
        sequence.tokens.append(handoff.token_id)
        self._wishes.settled(request)
        self._context.blocks.change_owner(sequence, Owner.RUNNING)
        self._context.steps.adopt(sequence)
        self._send(request.prefill, key, Committed(reservation=handoff.reservation))
        usage = SequenceUsage(prompt_blocks=received + cached, received_blocks=received, cached_blocks=cached)
        self._count(usage)
        self._totals["handoffs_committed"] += 1
        self._stream.put(
            sequence.router,
            TokenEntry(
                request=key[0],
                attempt=key[1],
                sequence=key[2],
                index=handoff.index,
                token_ids=[handoff.token_id],
                logprobs=[handoff.logprobs] if handoff.logprobs is not None else [],
                cached_tokens=handoff.cached_tokens,
                usage=usage,
            ),
        )
        self._grant_wishes()  # those that waited for this prefix

    def _count(self, usage: SequenceUsage) -> None:
        self._totals["prompt_blocks"] += usage.prompt_blocks
        self._totals["received_blocks"] += usage.received_blocks
        self._totals["cached_blocks"] += usage.cached_blocks
        self._totals["computed_blocks"] += usage.computed_blocks

    # -- steps --------------------------------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan) -> None:
        for sequence in plan.preempted:
            self._requests[sequence.key].prompt_logprobs.clear()

    def _committed(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = output.sequence.key
            request = self._requests.get(key)
            if request is not None:
                request.prompt_logprobs += output.prompt_logprobs
                if output.token_id is not None or output.finish is not None:
                    self._stream.put(output.sequence.router, self._entry(request, output))
                if output.finish is not None:
                    self._forget(key, request)
        self._stream.flush()
        self._grant_wishes()

    def _entry(self, request: DecodeRequest, output: SequenceOutput) -> TokenEntry:
        key = output.sequence.key
        is_first = output.index == request.first_index and request.handoff is None
        usage = self._local_usage(request) if is_first else None
        return TokenEntry(
            request=key[0],
            attempt=key[1],
            sequence=key[2],
            index=output.index,
            token_ids=[output.token_id] if output.token_id is not None else [],
            logprobs=[output.logprobs] if output.logprobs is not None else [],
            prompt_logprobs=request.prompt_logprobs if is_first else [],
            cached_tokens=output.sequence.num_cached_tokens if is_first else None,
            finish=output.finish,
            usage=usage,
        )

    def _local_usage(self, request: DecodeRequest) -> SequenceUsage:
        size = self._context.spec.block_size
        sequence = request.sequence
        total = blocks_for(sequence.num_prompt + request.first_index, size)
        cached = sequence.num_cached_tokens // size
        usage = SequenceUsage(prompt_blocks=total, cached_blocks=cached, computed_blocks=total - cached)
        self._count(usage)
        return usage

    def _failed(self, sequences: list[Sequence], cause: str) -> None:
        for sequence in sequences:
            self._fail(sequence.key, cause, retriable=True)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _cancel(self, key: SequenceKey, reason: str) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        self._totals["cancelled"] += 1
        handoff = request.handoff
        if handoff is None or handoff.state is machine.ReceiverState.RUNNING:
            self._end(key)
        elif handoff.state is machine.ReceiverState.ASKED:
            self._refuse_wish(key, reason)
        else:
            self._run(key, handoff.cancel(reason))

    def _fail(self, key: SequenceKey, cause: str, *, retriable: bool) -> None:
        request = self._requests.get(key)
        if request is None or request.is_quarantined:
            return
        self._totals["failed"] += 1
        handoff = request.handoff
        if handoff is None or handoff.state is machine.ReceiverState.RUNNING:
            # Before the commit the request is prefill's: it hears Released, and finds another decode worker.
            self._send(request.sequence.router, key, Failed(cause=cause, retriable=retriable))
        self._cancel(key, cause)

    def _end(self, key: SequenceKey) -> None:
        request = self._requests[key]
        self._context.steps.abort(key)
        self._forget(key, request)
        self._made_room()

    def _forget(self, key: SequenceKey, request: DecodeRequest) -> None:
        self._requests.pop(key, None)
        if request.handoff is not None:
            self._by_reservation.pop(request.handoff.reservation, None)

    def _made_room(self) -> None:
        self._context.steps.wake()
        self._grant_wishes()

    def _deadline(self, prompt: Prompt) -> float:
        return time.monotonic() + prompt.timeout_s + DEADLINE_GRACE_S

    def _send_batch(self, router: PeerRef, batch: TokenBatch) -> None:
        self._context.messenger.send(router, batch)

    def _send(self, peer: PeerRef, key: SequenceKey, body: AnyBody) -> None:
        request = self._requests.get(key)
        trace = request.sequence.trace if request is not None else ""
        self._context.messenger.send(peer, body, request=key[0], attempt=key[1], sequence=key[2], trace=trace)
