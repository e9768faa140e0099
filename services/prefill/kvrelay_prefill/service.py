"""The role of a prefill worker: computes prompts in chunks and sends their first tokens to the router.

`pushes.py` hands the sequences over to decode workers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvrelay.handoff.sender import ReservationState, SenderHandoff, SenderState
from kvrelay.handoff.transports.base import TransferSender
from kvrelay.handoff.transports.sharded import ShardedSender
from kvrelay.kv.table import blocks_for
from kvrelay.logs import LimitedLog
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import (
    Cancel,
    Committed,
    FirstToken,
    Granted,
    Header,
    PeerRef,
    Prefill,
    Reassign,
    Refused,
    Released,
)
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.event_log import recorded
from kvrelay.telemetry.handoffs import HandoffTimings
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.requests import OpenRequests, deadline_of, scores_of, sequence_key
from kvrelay.worker.step_loop import StepCallbacks
from kvrelay_prefill.outgoing_handoffs import OutgoingHandoffs, PrefillRequest

log = logging.getLogger(__name__)


class PrefillRole:
    name = "prefill"

    def __init__(
        self,
        context: WorkerContext,
        senders: Mapping[str, TransferSender | ShardedSender],
    ) -> None:
        """`senders` by name: of this process's pool, or of all ranks."""
        self._context = context
        self._log = LimitedLog(log)
        self._requests: OpenRequests[PrefillRequest] = OpenRequests(context, self.name, self._cancel)
        self._outgoing = OutgoingHandoffs(context, senders, self._requests)
        self._totals: dict[str, float] = dict.fromkeys(
            ("requests", "cancelled", "prompt_blocks", "cached_blocks", "computed_blocks"), 0
        )

    # -- the shell's side ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._outgoing.start()

    def close(self) -> None:
        self._outgoing.close()

    def callbacks(self) -> StepCallbacks:
        return StepCallbacks(self._planned, self._committed, self._failed)

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def queues(self) -> dict[str, int]:
        queues = {state.value: 0 for state in SenderState if state is not SenderState.RELEASED}
        queues |= {"awaiting_grant": 0, "granted": 0, "awaiting_router": 0}
        waiting = {
            ReservationState.ASKED: "awaiting_grant",
            ReservationState.GRANTED: "granted",
            ReservationState.REFUSED: "awaiting_router",
        }
        for request in self._requests.values():
            queues[request.handoff.state.value] += 1
            if (name := waiting.get(request.handoff.reservation_state)) is not None:
                queues[name] += 1
        return queues | {
            "queued_tokens": sum(sequence.num_tokens for sequence in self._context.scheduler.waiting),
            "cancelled_requests": len(self._requests.cancelled),
        }

    def totals(self) -> dict[str, float]:
        return self._totals | self._outgoing.totals | self._outgoing.push_totals()

    def begin_drain(self) -> None:
        self._requests.draining = True

    def abandon(self, reason: str) -> None:
        for key in list(self._requests):
            self._fail(key, FailureKind.DRAINING, reason, retriable=True)

    def on_tick(self, now: float) -> None:
        for key, request in list(self._requests.items()):
            if now > request.deadline:
                cause = "the request's deadline passed on the prefill worker"
                self._fail(key, FailureKind.DEADLINE, cause, retriable=False)

    def on_peer_lost(self, peer: PeerRef, reason: str, *, replaced: bool) -> None:
        for key, request in list(self._requests.items()):
            if request.sequence.origin.router == peer:
                self._cancel(key, f"the router is gone: {reason}")
            elif request.handoff.decode == peer:
                self._outgoing.decode_lost(request, peer, reason)

    # -- messages -----------------------------------------------------------------------------------------------------

    def on_message(self, event: Delivered) -> None:
        body, key = event.body, sequence_key(event.header)
        match body:
            case Prefill():
                self._start(event.header, event.peer, body)
            case Cancel():
                self._requests.end(key, event.peer, body.reason)
            case Granted() | Refused() | Released() | Committed() | Reassign():
                self._outgoing.on_message(key, event.peer, body)
            case _:
                name = type(body).__name__
                self._log.warning("kind", "%s sent %s, which is not for a prefill worker", event.peer.peer_id, name)

    def _start(self, header: Header, router: PeerRef, body: Prefill) -> None:
        sequence = self._requests.queue(header, router, body.prompt, prefill_only=True)
        if sequence is None:
            return
        arguments = router, body.decode
        handoff = SenderHandoff(*arguments)
        handle = recorded(self._context.events, "sender", sequence.key, handoff.handle, *arguments)
        timings = HandoffTimings(key=sequence.key, trace=sequence.origin.trace)
        deadline, scores = deadline_of(body.prompt), scores_of(body.prompt)
        self._requests.add(
            PrefillRequest(sequence, body.prompt, handoff, handle, deadline, timings=timings, scores=scores)
        )
        self._totals["requests"] += 1
        self._totals["prompt_blocks"] += blocks_for(sequence.num_tokens, self._context.spec.block_size)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan) -> None:
        """Decode is asked as soon as the first chunk is scheduled; a cached prefix can leave before any forward."""
        for sequence in plan.admitted:
            self._outgoing.scheduled(self._requests[sequence.key])
        self._requests.restart_scores(plan.recomputed)

    def _committed(self, outputs: list[SequenceOutput]) -> None:
        done = {output.sequence.key for output in outputs if output.prefilled}
        for output in outputs:
            request = self._requests.get(output.sequence.key)
            if request is not None:
                self._requests.send_scores(output, request.scores)
                if output.prefilled:
                    self._prefilled(request, output)
        for key in list(self._context.scheduler.running):
            if key not in done and (request := self._requests.get(key)) is not None:
                self._outgoing.computed(request)

    def _prefilled(self, request: PrefillRequest, output: SequenceOutput) -> None:
        sequence = request.sequence
        message = FirstToken(
            index=output.index,
            token_id=output.token_ids[0] if output.token_ids else None,
            logprobs=output.logprobs[0] if output.logprobs else None,
            cached_tokens=sequence.num_cached_tokens,
            finish=output.finish,
            texts=list(output.texts),
        )
        request.candidates = output.candidates
        if output.candidates is None or output.finish is not None:  # candidates go to decode, only an end to the router
            self._requests.send(sequence.origin.router, sequence.key, message)
        num_cached = blocks_for(sequence.num_cached_tokens, self._context.spec.block_size)
        num_blocks = blocks_for(request.prompt.num_tokens, self._context.spec.block_size)  # the first token has none
        self._totals["cached_blocks"] += num_cached
        self._totals["computed_blocks"] += num_blocks - num_cached
        self._outgoing.prefilled(request, message)

    def _failed(self, sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        for sequence in sequences:
            self._fail(sequence.key, kind, cause, retriable=not kind.recurs)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _cancel(self, key: SequenceKey, reason: str) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        self._totals["cancelled"] += 1
        self._outgoing.cancel(request, reason)

    def _fail(self, key: SequenceKey, kind: FailureKind, cause: str, *, retriable: bool) -> None:
        request = self._requests.get(key)
        if request is not None:
            self._outgoing.fail(request, kind, cause, retriable=retriable)
