"""The role of a decode worker: it runs sequences that prefill computed, and computes whole prompts if the router sends
them to it. Tokens go to the routers."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvrelay.handoff.receiver import ReceiverState
from kvrelay.handoff.transports.base import TransferReceiver
from kvrelay.handoff.transports.sharded import ShardedReceiver
from kvrelay.kv.table import blocks_for
from kvrelay.logs import LimitedLog
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import (
    Abort,
    Cancel,
    Drained,
    Failed,
    Generate,
    Handoff,
    Header,
    PeerRef,
    Reserve,
    SequenceUsage,
    TokenBatch,
    TokenEntry,
)
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import Sequence
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.requests import OpenRequests, deadline_of, scores_of, sequence_key
from kvrelay.worker.step_loop import StepCallbacks
from kvrelay_decode.incoming_handoffs import DecodeRequest, IncomingHandoffs

log = logging.getLogger(__name__)

USAGE = ("prompt_blocks", "received_blocks", "cached_blocks", "computed_blocks")
"""Totals of `SequenceUsage`."""


class DecodeRole:
    name = "decode"

    def __init__(self, context: WorkerContext, receivers: Mapping[str, TransferReceiver | ShardedReceiver]) -> None:
        self._context = context
        self._log = LimitedLog(log)
        self._requests: OpenRequests[DecodeRequest] = OpenRequests(context, self.name, self._cancel)
        self._incoming = IncomingHandoffs(context, receivers, self._requests, self._handed_over)
        self._totals: dict[str, float] = dict.fromkeys(("local_prompts", "failed", "cancelled", *USAGE), 0)

    # -- called by the shell ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._incoming.start()

    def close(self) -> None:
        self._incoming.close()

    def callbacks(self) -> StepCallbacks:
        return StepCallbacks(self._planned, self._committed, self._failed)

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def num_unfinished(self) -> int:
        # Blocks in quarantine may never be proven safe. A drain does not wait for them: a late write could only hit the
        # memory of this process, which is about to end.
        return len(self._requests) - self._incoming.num_lost

    def queues(self) -> dict[str, int]:
        queues = {state.value: 0 for state in ReceiverState if state is not ReceiverState.FREED}
        for request in self._requests.values():
            if request.handoff is not None and request.handoff.state is not ReceiverState.RUNNING:
                queues[request.handoff.state.value] += 1
        scheduler = self._context.scheduler
        return queues | {
            "waiting": len(scheduler.waiting) - scheduler.waiting.num_remote,
            "swapped": scheduler.lifecycle.offload.use.num_sequences,
            "running": len(scheduler.running),
            "queued_tokens": sum(each.num_tokens for each in scheduler.waiting if each.remote is None),
            "cancelled_requests": len(self._requests.cancelled),
            "sender_lost": self._incoming.num_lost,
        }

    def totals(self) -> dict[str, float]:
        scheduler = self._context.scheduler
        use = scheduler.lifecycle.offload.use
        totals = self._totals | self._incoming.totals
        return totals | {
            "preemptions": scheduler.num_preemptions,
            "preemptions_by_recompute": scheduler.num_preemptions - use.num_preemptions,
            "preemptions_by_swap": use.num_preemptions,
            "swap_copies_dropped": use.num_dropped,
            "swapped_out_blocks": use.num_blocks_out,
            "swapped_in_blocks": use.num_blocks_in,
            "swap_s": use.copy_s,
        }

    def begin_drain(self) -> None:
        self._requests.draining = True
        self._incoming.begin_drain()

    def abandon(self, reason: str) -> None:
        for key, _ in self._asked_first():
            self._fail(key, FailureKind.DRAINING, reason, retriable=True)

    def on_tick(self, now: float) -> None:
        self._incoming.tick_quarantine(now)
        for key, request in list(self._requests.items()):
            if request.is_quarantined:
                continue
            if now > request.deadline:
                cause = "the request's deadline passed on the decode worker"
                self._fail(key, FailureKind.DEADLINE, cause, retriable=False)
            else:
                self._incoming.check_overdue(request, now)
        self._fail_what_never_fits()
        self._incoming.admit()
        scheduler = self._context.scheduler
        if scheduler.waiting and not scheduler.running:
            # A pass looks up a bounded number of prefixes. If all of them are being received, no step follows whose
            # pass would look further.
            self._context.steps.wake()

    def _fail_what_never_fits(self) -> None:
        """Refuses sequences that never fit, so that the router assigns others at once. They would delay the queue."""
        scheduler = self._context.scheduler
        num_withheld, num_blocks = len(scheduler.blocks.withheld), scheduler.blocks.pool.num_blocks
        for sequence in scheduler.never_fitting():
            cause = (
                f"{sequence.num_tokens} tokens need more blocks than the decode worker has at present: {num_withheld} "
                f"of {num_blocks} are in quarantine, because their sender is silent"
            )
            self._fail(sequence.key, FailureKind.OUT_OF_MEMORY, cause, retriable=True, refused=True)

    def _asked_first(self) -> list[tuple[SequenceKey, DecodeRequest]]:
        """All requests, in an order in which they can be ended: what one of them frees must not be granted to another
        one that ends next, so the handoffs that only wait come first."""
        requests = list(self._requests.items())
        return sorted(requests, key=lambda item: not item[1].is_waiting)

    def on_peer_lost(self, peer: PeerRef, reason: str, *, replaced: bool) -> None:
        for key, request in self._asked_first():
            if request.sequence.origin.router == peer:
                self._cancel(key, f"the router is gone: {reason}")
        self._incoming.peer_lost(peer, replaced=replaced)

    # -- messages -----------------------------------------------------------------------------------------------------

    def on_message(self, event: Delivered) -> None:
        body, key = event.body, sequence_key(event.header)
        match body:
            case Reserve():
                self._incoming.reserve(event.header, event.peer, body)
            case Generate():
                self._generate(event.header, event.peer, body)
            case Cancel():
                self._requests.end(key, event.peer, body.reason)
            case Handoff() | Abort() | Drained():
                self._incoming.from_prefill(key, event.peer, body)
            case _:
                name = type(body).__name__
                self._log.warning("kind", "%s sent %s, which is not for a decode worker", event.peer.peer_id, name)

    def _generate(self, header: Header, router: PeerRef, body: Generate) -> None:
        sequence = self._requests.queue(header, router, body.prompt, prefill_only=False)
        if sequence is None:
            return
        deadline, first_index = deadline_of(body.prompt), sequence.num_output
        scores = scores_of(body.prompt)
        self._requests.add(DecodeRequest(sequence, deadline, first_index=first_index, scores=scores))
        self._totals["local_prompts"] += 1

    # -- steps --------------------------------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan) -> None:
        self._incoming.planned(plan)
        self._requests.restart_scores(plan.recomputed)

    def _committed(self, outputs: list[SequenceOutput]) -> None:
        """Sends the tokens of a step in one message to each router."""
        entries: dict[PeerRef, list[TokenEntry]] = {}
        for output in outputs:
            sequence = output.sequence
            request = self._requests.get(sequence.key)
            if request is not None:
                self._requests.send_scores(output, request.scores)
                if output.token_ids or output.finish is not None:
                    entries.setdefault(sequence.origin.router, []).append(self._entry(request, output))
                if output.finish is not None:
                    self._requests.remove(sequence.key)
        for router, batch in entries.items():
            self._context.messenger.send(router, TokenBatch(entries=batch))
        self._incoming.admit()

    def _entry(self, request: DecodeRequest, output: SequenceOutput) -> TokenEntry:
        if request.handoff is not None or output.index != request.first_index:
            return entry_of(output)
        size = self._context.spec.block_size
        sequence = request.sequence
        total = blocks_for(sequence.num_prompt + request.first_index, size)
        cached = blocks_for(sequence.num_cached_tokens, size)
        usage = SequenceUsage(prompt_blocks=total, cached_blocks=cached, computed_blocks=total - cached)
        self._count(usage)
        return entry_of(output, usage)

    def _handed_over(self, request: DecodeRequest, handoff: Handoff, output: SequenceOutput | None) -> None:
        """Sends the first token, in case prefill's message with it was lost."""
        assert request.handoff is not None
        received, cached = request.handoff.num_received, request.handoff.first_block
        usage = SequenceUsage(prompt_blocks=received + cached, received_blocks=received, cached_blocks=cached)
        self._count(usage)
        request_id, attempt, number = request.sequence.key
        first = TokenEntry(
            request=request_id,
            attempt=attempt,
            sequence=number,
            index=handoff.index,
            token_ids=[handoff.token_id] if handoff.token_id is not None else [],
            logprobs=[handoff.logprobs] if handoff.logprobs is not None else [],
            cached_tokens=handoff.cached_tokens,
            usage=usage,
        )
        # It may end with the prompt here, which prefill saw differently.
        entries = [first] if output is None else [first, entry_of(output)]
        self._context.messenger.send(request.sequence.origin.router, TokenBatch(entries=entries))

    def _count(self, usage: SequenceUsage) -> None:
        for name in USAGE:
            self._totals[name] += getattr(usage, name)

    def _failed(self, sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        for sequence in sequences:
            self._fail(sequence.key, kind, cause, retriable=not kind.recurs)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _cancel(self, key: SequenceKey, reason: str) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        self._totals["cancelled"] += 1
        handoff = request.handoff
        if handoff is None or handoff.state is ReceiverState.RUNNING:
            self._end(key)
        else:
            self._incoming.cancel(request, reason)

    def _fail(self, key: SequenceKey, kind: FailureKind, cause: str, *, retriable: bool, refused: bool = False) -> None:
        request = self._requests.get(key)
        if request is None or request.is_quarantined:
            return
        self._totals["failed"] += 1
        handoff = request.handoff
        if handoff is None or handoff.state is ReceiverState.RUNNING:
            # Before the commit prefill owns the request: it receives Released and finds another decode worker.
            failed = Failed(failure=kind, cause=cause, retriable=retriable, refused=refused)
            self._requests.send(request.sequence.origin.router, key, failed)
        self._cancel(key, cause)

    def _end(self, key: SequenceKey) -> None:
        self._context.steps.abort(key)
        self._requests.remove(key)
        self._incoming.made_room()


def entry_of(output: SequenceOutput, usage: SequenceUsage | None = None) -> TokenEntry:
    """The message entry for the output of a step. `usage`: for the first token of a prompt that was computed here."""
    key = output.sequence.key
    return TokenEntry(
        request=key[0],
        attempt=key[1],
        sequence=key[2],
        index=output.index,
        token_ids=[*output.token_ids],
        logprobs=[*output.logprobs],
        cached_tokens=output.sequence.num_cached_tokens if usage is not None else None,
        finish=output.finish,
        usage=usage,
        texts=list(output.texts),
    )
