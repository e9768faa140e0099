"""What workers say, and that they are gone: to the sequences it is about, the view of the fleet, and the breakers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kvrelay.protocol.link import Delivered, LinkEvent, PeerLost, PeerRefused
from kvrelay.protocol.messages import (
    Cancel,
    Failed,
    FirstToken,
    NeedDecode,
    PeerRef,
    SequenceUsage,
    Status,
    TokenBatch,
    TokenEntry,
)
from kvrelay.protocol.sampling import FinishReason
from kvrelay_router.dispatch.attempt_driver import AttemptDriver, SendMessage
from kvrelay_router.dispatch.events import (
    AttemptFailed,
    DecodeNeeded,
    Event,
    FirstTokenReceived,
    WorkerLost,
)
from kvrelay_router.dispatch.load import worker_key
from kvrelay_router.dispatch.placement import Placement
from kvrelay_router.dispatch.retry_budget import PROVEN_TOKENS
from kvrelay_router.dispatch.running_sequence import RunningSequence
from kvrelay_router.fleet_view import FleetView

log = logging.getLogger(__name__)


class Inbox:
    """`sequences` is the dispatcher's own table of those in progress, by request and index: read here, never changed.

    `on_status` and `usage_came_late` get what concerns no sequence in progress.
    """

    def __init__(
        self,
        sequences: Mapping[tuple[str, int], RunningSequence],
        runner: AttemptDriver,
        placement: Placement,
        view: FleetView,
        send: SendMessage,
        on_status: Callable[[PeerRef, Status], None],
        usage_came_late: Callable[[str, int, SequenceUsage], None],
    ) -> None:
        self._sequences = sequences
        self._runner = runner
        self._placement = placement
        self._view = view
        self._send = send
        self._on_status = on_status
        self._usage_came_late = usage_came_late
        self._gone: list[WorkerLost] = []

    def take(self, event: LinkEvent) -> None:
        """Handles an event of the messenger's to its end."""
        match event:
            case Delivered():
                self._on_message(event)
            case PeerLost(peer=peer, reason=reason, by_peer=by_peer):
                self._view.lost(peer, reason, time.monotonic())
                self._worker_gone_soon(WorkerLost(peer, reason, by_peer))
            case PeerRefused(peer=peer, reason=reason):
                self._view.refused(peer, reason, time.monotonic())
                self._worker_gone_soon(WorkerLost(peer, reason))

    def _on_message(self, message: Delivered) -> None:
        peer, header, body = message.peer, message.header, message.body
        match body:
            case TokenBatch(entries=entries):
                self._on_tokens(peer, entries)
            case FirstToken():
                self._placement.breakers.succeeded(worker_key(peer))
                self._tell(message, FirstTokenReceived(peer, header.attempt, body))
            case NeedDecode(reason=reason, excluded=excluded, lacks=lacks):
                if (header.request, header.sequence) in self._sequences:
                    self._tell(message, DecodeNeeded(peer, header.attempt, reason, frozenset(excluded), lacks))
                else:
                    self._let_go(message)
            case Failed(cause=cause, retriable=retriable, refused=refused):
                if retriable and not refused and not self._lacks_decode(message):
                    # Else no worker could serve it: the request is to blame, or its deadline, or the lack of workers,
                    # or the worker drains.
                    self._note_failure(peer, cause)
                self._tell(message, AttemptFailed(peer, header.attempt, cause, retriable, refused))
            case Status():
                self._on_status(peer, body)
            case _:
                log.warning("%s sent a %s, which is not for a router", peer.peer_id, type(body).__name__)

    def _on_tokens(self, peer: PeerRef, entries: list[TokenEntry]) -> None:
        breakers = self._placement.breakers
        is_watched = breakers.are_watching
        for entry in entries:
            sequence = self._sequences.get((entry.request, entry.sequence))
            if is_watched and _is_proof(entry, sequence):
                breakers.succeeded(worker_key(peer))
            if sequence is not None:
                self._runner.feed_tokens(sequence, peer, entry)
            elif entry.usage is not None:
                self._usage_came_late(entry.request, entry.sequence, entry.usage)

    def _lacks_decode(self, message: Delivered) -> bool:
        sequence = self._sequences.get((message.header.request, message.header.sequence))
        return sequence is not None and sequence.machine.lacks_decode

    def _note_failure(self, peer: PeerRef, cause: str) -> None:
        if self._placement.breakers.failed(worker_key(peer), time.monotonic()):
            log.warning("%s fails again and again and gets no requests for a while: %s", peer.peer_id, cause)

    def _tell(self, message: Delivered, event: Event) -> None:
        sequence = self._sequences.get((message.header.request, message.header.sequence))
        if sequence is not None:
            self._runner.feed(sequence, event)

    def _let_go(self, question: Delivered) -> None:
        """Prefill did not hear of the commit, and decode has finished since: nobody else would tell it."""
        header = question.header
        self._send(
            question.peer,
            Cancel(reason="the request is over"),
            request=header.request,
            attempt=header.attempt,
            sequence=header.sequence,
            trace=header.trace,
        )

    def _worker_gone_soon(self, loss: WorkerLost) -> None:
        """Once all that were lost at the same time are known: a retry placed on one of them would fail at once."""
        self._placement.gone(loss.worker.peer_id)
        if not self._gone:
            asyncio.get_running_loop().call_soon(self._tell_of_the_gone)
        self._gone.append(loss)

    def _tell_of_the_gone(self) -> None:
        gone, self._gone = self._gone, []
        for loss in gone:
            for sequence in list(self._sequences.values()):
                if sequence.machine.involves(loss.worker):
                    self._runner.feed(sequence, loss)


def _is_proof(entry: TokenEntry, sequence: RunningSequence | None) -> bool:
    """Whether a decode worker has done well: to the end, or for long enough. Once an attempt, so that what it began
    before it became bad does not speak for it for as long as that runs."""
    if entry.finish is not None:
        return entry.finish is not FinishReason.ABORT
    if sequence is None or entry.attempt != sequence.machine.attempt:
        return False
    proven_at = sequence.machine.num_resumed + PROVEN_TOKENS
    return entry.index < proven_at <= entry.index + len(entry.token_ids)
