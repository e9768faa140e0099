"""Distributes what workers send, and their losses, to the sequences in progress, the fleet view and the breakers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kvrelay.logs import LimitedLog
from kvrelay.protocol.link import Delivered, LinkEvent, PeerLost, PeerRefused
from kvrelay.protocol.messages import (
    Cancel,
    Failed,
    FirstToken,
    Header,
    NeedDecode,
    PeerRef,
    PromptLogprobs,
    SequenceUsage,
    Status,
    TokenBatch,
    TokenEntry,
)
from kvrelay_router.dispatch.attempt_driver import AttemptDriver, SendMessage
from kvrelay_router.dispatch.events import FromWorker, WorkerLost
from kvrelay_router.dispatch.intake import ScoresReceived
from kvrelay_router.dispatch.placement import Placement
from kvrelay_router.dispatch.retry import PROVEN_TOKENS
from kvrelay_router.dispatch.running_request import ActiveSequence
from kvrelay_router.fleet.load import worker_key
from kvrelay_router.fleet.view import FleetView

log = logging.getLogger(__name__)


class Inbox:
    """`sequences` is the dispatcher's table of those in progress, by request and index. The inbox never changes it.

    `on_status` gets the status of workers, and `on_late_usage` block counters of sequences that are already over.
    """

    def __init__(
        self,
        sequences: Mapping[tuple[str, int], ActiveSequence],
        driver: AttemptDriver,
        placement: Placement,
        view: FleetView,
        send: SendMessage,
        on_status: Callable[[PeerRef, Status], None],
        on_late_usage: Callable[[str, int, SequenceUsage], None],
    ) -> None:
        self._sequences = sequences
        self._driver = driver
        self._placement = placement
        self._view = view
        self._send = send
        self._on_status = on_status
        self._on_late_usage = on_late_usage
        self._log = LimitedLog(log)
        self._lost: list[tuple[PeerRef, str, bool]] = []  # worker, reason, whether it is alive

    def take(self, event: LinkEvent) -> None:
        """Handles one event of the messenger completely."""
        match event:
            case Delivered():
                self._on_message(event)
            case PeerLost(peer=peer, reason=reason, is_alive=is_alive):
                self._view.lost(peer, reason, time.monotonic())
                self._report_lost_soon(peer, reason, is_alive)
            case PeerRefused(peer=peer, reason=reason):
                self._view.refused(peer, reason, time.monotonic())
                self._report_lost_soon(peer, reason, False)

    def _on_message(self, message: Delivered) -> None:
        peer, body = message.peer, message.body
        match body:
            case TokenBatch(entries=entries):
                self._on_tokens(peer, entries)
            case FirstToken():
                self._on_first_token(message, body)
            case PromptLogprobs():
                if (sequence := self._sequence_of(message)) is not None:
                    self._driver.receive_scores(sequence, peer, ScoresReceived(message.header.attempt, body))
            case NeedDecode():
                self._on_need_decode(message, body)
            case Failed():
                self._on_failed(message, body)
            case Status():
                self._on_status(peer, body)
            case _:
                self._log.warning(
                    "kind", "%s sent a %s, which a router does not take", peer.peer_id, type(body).__name__
                )

    def _sequence_of(self, message: Delivered) -> ActiveSequence | None:
        return self._sequences.get((message.header.request, message.header.sequence))

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _on_tokens(self, peer: PeerRef, entries: list[TokenEntry]) -> None:
        breakers = self._placement.breakers
        has_failures = breakers.has_failures
        for entry in entries:
            sequence = self._sequences.get((entry.request, entry.sequence))
            if has_failures and _is_success(entry, sequence):
                breakers.succeeded(worker_key(peer))
            if sequence is not None:
                self._driver.receive(sequence, peer, entry)
            elif entry.usage is not None:
                self._on_late_usage(entry.request, entry.sequence, entry.usage)

    def _on_first_token(self, message: Delivered, body: FirstToken) -> None:
        self._placement.breakers.succeeded(worker_key(message.peer))
        if (sequence := self._sequence_of(message)) is not None:
            self._driver.receive(sequence, message.peer, _entry_of(message.header, body), from_prefill=True)

    # -- handoffs and failures ----------------------------------------------------------------------------------------

    def _on_need_decode(self, message: Delivered, body: NeedDecode) -> None:
        peer, header = message.peer, message.header
        if (sequence := self._sequence_of(message)) is not None:
            self._driver.feed(sequence, FromWorker(peer, header.attempt, len(sequence.intake.output), body))
            return
        # Prefill missed the commit, and decode has finished since. Only this Cancel makes prefill free the KV.
        self._send(
            peer,
            Cancel(reason="the request is over"),
            request=header.request,
            attempt=header.attempt,
            sequence=header.sequence,
            trace=header.trace,
        )

    def _on_failed(self, message: Delivered, body: Failed) -> None:
        sequence = self._sequence_of(message)
        lacks_decode = sequence is not None and sequence.attempts.lacks_decode
        if body.retriable and not body.refused and not lacks_decode:
            # In all other cases the worker is not at fault: the request is, its deadline passed, the worker drains, or
            # there is no decode worker.
            self._count_failure(message.peer, body.cause)
        if sequence is not None:
            num_output = len(sequence.intake.output)
            self._driver.feed(sequence, FromWorker(message.peer, message.header.attempt, num_output, body))

    def _count_failure(self, peer: PeerRef, cause: str) -> None:
        if self._placement.breakers.failed(worker_key(peer), time.monotonic()):
            log.warning("%s failed several times in a row and gets no requests for a while: %s", peer.peer_id, cause)

    # -- lost workers -------------------------------------------------------------------------------------------------

    def _report_lost_soon(self, peer: PeerRef, reason: str, is_alive: bool) -> None:
        """Waits for all losses of this turn of the event loop: a retry must not be placed on another lost worker."""
        self._placement.gone(peer.peer_id)
        if not self._lost:
            asyncio.get_running_loop().call_soon(self._report_lost)
        self._lost.append((peer, reason, is_alive))

    def _report_lost(self) -> None:
        lost, self._lost = self._lost, []
        for peer, reason, is_alive in lost:
            sequences = [each for each in self._sequences.values() if each.attempts.involves(peer)]
            in_company = len({each.request_id for each in sequences if not each.is_proven}) > 1
            for sequence in sequences:
                if sequence.attempts.involves(peer):
                    was_silent = worker_key(peer) in sequence.silent_workers
                    num_output = len(sequence.intake.output)
                    event = WorkerLost(peer, num_output, reason, is_alive, was_silent, in_company)
                    self._driver.feed(sequence, event)


def _is_success(entry: TokenEntry, sequence: ActiveSequence | None) -> bool:
    """Returns whether a decode worker has proven itself: by the end of a sequence, or by `PROVEN_TOKENS` tokens.

    This is true once per attempt. A long sequence that began before the worker became faulty must not keep closing its
    breaker.
    """
    if entry.finish is not None:
        return True
    if sequence is None or entry.attempt != sequence.attempts.attempt:
        return False
    proven_at = sequence.attempts.num_resumed + PROVEN_TOKENS
    return entry.index < proven_at <= entry.index + len(entry.token_ids)


def _entry_of(header: Header, first: FirstToken) -> TokenEntry:
    """Prefill's first token as an entry like those of decode."""
    return TokenEntry(
        request=header.request,
        attempt=header.attempt,
        sequence=header.sequence,
        index=first.index,
        token_ids=[] if first.token_id is None else [first.token_id],
        logprobs=[] if first.logprobs is None else [first.logprobs],
        cached_tokens=first.cached_tokens,
        finish=first.finish,
        beams=first.beams,
    )
