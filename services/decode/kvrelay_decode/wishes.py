"""Handoffs that wait for room on a decode worker, in the order in which they came.

A large wish at the head is waited for, so that small ones behind it do not starve it. A wish whose missing prefix is on
its way into this pool already, for another reservation, waits for that one and lets others pass: the prefix is sent and
stored once, whatever the number of sequences that share it (samples of one prompt, requests with one system prompt).
The samples of a request are granted all or nothing: with the first, room for the others is set aside (`claims.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.queue.prefixes_in_progress import PrefixesInProgress
from kvrelay.scheduling.scheduler_protocol import Scheduler
from kvrelay.scheduling.sequence import Sequence
from kvrelay_decode.claims import SampleClaims
from kvrelay_decode.request import DecodeRequest


class Wishes:
    """`requests` are all of the worker's, wishes included. `is_within_share(request, num_blocks)` says whether its
    sender may get so many blocks more; a wish beyond that lets others pass."""

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        requests: Mapping[SequenceKey, DecodeRequest],
        is_within_share: Callable[[DecodeRequest, int], bool],
    ) -> None:
        self._scheduler = scheduler
        self._is_within_share = is_within_share
        self._blocks = blocks
        self._requests = requests
        self._waiting: dict[SequenceKey, DecodeRequest] = {}
        self._claims = SampleClaims(blocks, requests, self._waiting.keys())
        self._arriving = PrefixesInProgress()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._waiting.values())

    def add(self, request: DecodeRequest) -> None:
        """A handoff was asked for."""
        self._waiting[request.sequence.key] = request

    def drop(self, request: DecodeRequest) -> None:
        """It is not wished for any more, or never was: both are fine."""
        if self._waiting.pop(request.sequence.key, None) is not None:
            self._claims.given_up(request)

    def granted(self, request: DecodeRequest) -> None:
        """It has its blocks; those behind its cached prefix are on their way."""
        sequence = request.sequence
        self._waiting.pop(sequence.key, None)
        self._claims.granted(request, self._scheduler.limits.max_running)
        if self._blocks.shares_prefixes:
            num_cached = sequence.num_computed // self._blocks.pool.block_size
            hashes = sequence.block_hashes(sequence.num_full_blocks)
            self._arriving.promise(sequence.key, hashes[num_cached:])

    def settled(self, request: DecodeRequest) -> None:
        """Its blocks are published, or given up: nobody has to wait for them any more."""
        self._arriving.withdraw(request.sequence.key)

    def next(self, num_quarantined: int = 0) -> DecodeRequest | None:
        """The wish to grant now; None if there is none, or no room for it. `num_quarantined`: requests that are over.

        Local prompts that still wait take no place: they may be waiting for this very wish. Unless room is set aside
        for them.
        """
        num_idle = num_quarantined + len(self._waiting) + len(self._scheduler.waiting)
        num_open = len(self._requests) - num_idle + self._scheduler.num_reserved_samples
        for request in self._waiting.values():
            if self._claims.has(request) and (num_cached := self._grantable(request)) is not None:
                return request if self._has_room(request, num_cached, num_open) else None
        for request in self._waiting.values():
            num_cached = self._grantable(request)
            if num_cached is not None:
                return request if self._has_room(request, num_cached, num_open) else None
        return None

    def gate(self, sequence: Sequence, num_slots: int) -> str:
        """Asked by the scheduler before it admits a local prompt, which becomes `num_slots` running sequences with the
        rest of its group: what is being received will run, and an older handoff that waits for room goes first.
        O(requests)."""
        num_receiving = sum(each.sequence.num_slots for each in self._requests.values() if each.is_received)
        num_claimed, num_claimed_blocks = self._claims.totals()
        if self._scheduler.num_slots + num_receiving + num_claimed + num_slots > self._scheduler.limits.max_running:
            return "what is being received takes the rest of max_running"
        if num_claimed_blocks:
            num_missing = self._blocks.num_at_admission(sequence) - self._blocks.num_cached_blocks(sequence)
            if num_missing + num_claimed_blocks > self._blocks.num_available:
                return "room is set aside for samples that are handed over"
        local = self._requests.get(sequence.key)
        if sequence.num_preemptions or local is None:
            return ""
        for request in self._waiting.values():
            if request.arrival > local.arrival:
                return ""
            if self._grantable(request) is not None:
                # One that lets the oldest local prompt go first waits for that and not for room: were this prompt,
                # which the queue's order prefers to the oldest, to wait for it, none of the three would ever move.
                return "" if self._yields(request) else "an older handoff waits for room"
        return ""

    def _grantable(self, request: DecodeRequest) -> int | None:
        """How many of its blocks are cached. None: it lets others pass, for the block that it misses first is on its
        way for another reservation, or its sender has its share."""
        num_cached, missing = self._blocks.first_missing(request.sequence)
        if missing is not None and missing in self._arriving:
            return None
        num_blocks = blocks_for(request.sequence.num_tokens, self._blocks.pool.block_size) - num_cached
        return num_cached if self._is_within_share(request, num_blocks) else None

    def _yields(self, request: DecodeRequest) -> bool:
        """Whether preempted sequences or older local prompts come first; reservations would starve them otherwise."""
        oldest = next(iter(self._scheduler.waiting), None)
        if oldest is None:
            return False
        local = self._requests.get(oldest.key)
        return bool(oldest.num_preemptions) or local is None or local.arrival < request.arrival

    def _has_room(self, request: DecodeRequest, num_cached: int, num_open: int) -> bool:
        scheduler, pool, sequence = self._scheduler, self._blocks.pool, request.sequence
        max_running, is_claimed = scheduler.limits.max_running, self._claims.has(request)
        if not is_claimed and self._yields(request):
            return False
        num_claimed, num_claimed_blocks = self._claims.totals()
        num_wanted = 0 if is_claimed else sequence.num_slots + self._claims.num_others(request, max_running)
        if num_open + num_claimed + self._num_more_beams() + num_wanted > max_running:
            return False
        # Running sequences grow: a block for each of them keeps a new one from preempting at once, and what the
        # scheduler expects them to take keeps it from doing so later.
        headroom = max(len(scheduler.running) + 1, scheduler.num_headroom_blocks) if num_open else 0
        if sequence.sampling.beams is not None:
            headroom += sequence.num_slots  # each beam's next token
        if not is_claimed:
            headroom += num_claimed_blocks + self._claims.num_blocks_of_others(request, max_running)
        num_missing = blocks_for(sequence.num_tokens, pool.block_size) - num_cached
        return num_missing + headroom <= self._blocks.num_available - num_cached

    def _num_more_beams(self) -> int:
        """Running sequences that the open requests are, beyond one each. O(requests)."""
        return sum(
            request.sequence.num_slots - 1 for key, request in self._requests.items() if key not in self._waiting
        )
