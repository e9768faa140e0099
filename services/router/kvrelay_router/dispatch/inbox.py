"""Distributes what workers send, and their losses, to the sequences in progress, the fleet view and the breakers.
Delivers tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from kvrelay.logs import LimitedLog
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import Delivered, LinkEvent, PeerLost, PeerRefused
from kvrelay.protocol.messages import (
    Cancel,
    Failed,
    FirstToken,
    Header,
    NeedDecode,
    PeerRef,
    PromptLogprobs,
    Status,
    TokenBatch,
    TokenEntry,
)
from kvrelay.text.choice import SequenceDelta
from kvrelay_router.dispatch.attempt_driver import AttemptDriver
from kvrelay_router.dispatch.events import FromWorker, TokensArrived, WorkerLost
from kvrelay_router.dispatch.placement import Placement
from kvrelay_router.dispatch.records import RequestRecords
from kvrelay_router.dispatch.retry_budget import PROVEN_TOKENS
from kvrelay_router.dispatch.running_request import ActiveSequence, ScoresReceived
from kvrelay_router.fleet.load import worker_key
from kvrelay_router.fleet.watch import FleetWatch

log = logging.getLogger(__name__)


class Inbox:
    """`sequences` is the dispatcher's table of those in progress, by request and index. The inbox never changes it."""

    def __init__(
        self,
        sequences: Mapping[tuple[str, int], ActiveSequence],
        driver: AttemptDriver,
        placement: Placement,
        messenger: Messenger,
        watch: FleetWatch,
        records: RequestRecords,
    ) -> None:
        self.cache = {"prompt_tokens": 0, "predicted_tokens": 0, "found_tokens": 0}
        """Of computed prompts: their tokens, how many the router expected in a cache, and how many were found there."""
        self._sequences = sequences
        self._driver = driver
        self._placement = placement
        self._send = messenger.send
        self._watch = watch
        self._records = records
        self._log = LimitedLog(log)
        self._lost: list[tuple[PeerRef, str, bool]] = []  # worker, reason, whether it is alive

    def take(self, event: LinkEvent) -> None:
        """Handles one event of the messenger completely."""
        match event:
            case Delivered():
                self._on_message(event)
            case PeerLost(peer=peer, reason=reason, is_alive=is_alive):
                self._watch.view.lost(peer, reason, time.monotonic())
                self._report_lost_soon(peer, reason, is_alive)
            case PeerRefused(peer=peer, reason=reason):
                self._watch.view.refused(peer, reason, time.monotonic())
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
                    self._on_scores(sequence, peer, ScoresReceived(message.header.attempt, body))
            case NeedDecode():
                self._on_need_decode(message, body)
            case Failed():
                self._on_failed(message, body)
            case Status():
                self._watch.on_status(peer, body)
            case _:
                self._log.warning(
                    "kind", "%s sent a %s, which a router does not take", peer.peer_id, type(body).__name__
                )

    def _sequence_of(self, message: Delivered) -> ActiveSequence | None:
        return self._sequences.get((message.header.request, message.header.sequence))

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _on_tokens(self, peer: PeerRef, entries: list[TokenEntry]) -> None:
        breakers = self._placement.breakers
        has_failures = bool(breakers.by_worker)
        for entry in entries:
            sequence = self._sequences.get((entry.request, entry.sequence))
            if has_failures and _is_success(entry, sequence):
                breakers.succeeded(worker_key(peer))
            if sequence is not None:
                self._receive(sequence, peer, entry)
            elif entry.usage is not None:
                self._records.usage_came_late(entry.request, entry.sequence, entry.usage)

    def _on_first_token(self, message: Delivered, body: FirstToken) -> None:
        self._placement.breakers.succeeded(worker_key(message.peer))
        if (sequence := self._sequence_of(message)) is not None:
            self._receive(sequence, message.peer, _entry_of(message.header, body), from_prefill=True)

    def _receive(self, sequence: ActiveSequence, peer: PeerRef, entry: TokenEntry, from_prefill: bool = False) -> None:
        """Delivers the tokens of an entry, once the tokens before them have come."""
        if sequence.attempts.accepts_tokens(peer, entry.attempt, from_prefill):
            self._deliver(sequence, sequence.handle_entry(entry), from_prefill)

    def _on_scores(self, sequence: ActiveSequence, peer: PeerRef, scores: ScoresReceived) -> None:
        """Keeps log-probabilities of the prompt until all of them have come."""
        if sequence.attempts.accepts_scores(peer, scores.attempt):
            delta = sequence.handle_entry(scores)
            if delta is not None:  # tokens of decode waited for them
                self._deliver(sequence, delta, from_prefill=True)

    def _deliver(self, sequence: ActiveSequence, delta: SequenceDelta | None, from_prefill: bool) -> None:
        has_events = not sequence.attempts.is_streaming
        if delta is not None:
            has_events = has_events or delta.finish is not None
            sequence.record.num_output_tokens += len(delta.token_ids)
            if has_events or delta.cached_tokens is not None or delta.usage is not None:
                sequence.record_details(delta)
                self._count_cached(sequence, delta)
            sequence.running.deliver(delta)
            if sequence is self._driver.waits.suspect:
                self._driver.waits.suspect_got_tokens()
        if has_events:
            is_last = delta is not None and delta.finish is not None
            self._driver.feed(sequence, TokensArrived(from_prefill, delta is not None, is_last))

    def _count_cached(self, sequence: ActiveSequence, delta: SequenceDelta) -> None:
        """Counts the prompt of an attempt once, with the delta that says how much was cached."""
        if sequence.decision is not None and sequence.num_prompt_tokens and delta.cached_tokens is not None:
            self.cache["prompt_tokens"] += sequence.num_prompt_tokens
            self.cache["predicted_tokens"] += min(sequence.decision.num_cached_tokens, sequence.num_prompt_tokens)
            self.cache["found_tokens"] += delta.cached_tokens
            sequence.num_prompt_tokens = 0

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
        texts=first.texts,
    )
