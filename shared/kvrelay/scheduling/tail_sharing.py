"""What sequences have to do with shared tails: who has which, who offers, takes and leaves it. `tails.py` says what a
tail is, and keeps those that are there."""

from __future__ import annotations

from kvrelay.kv.cache import Cache
from kvrelay.kv.hashing import BlockHash, tail_hash
from kvrelay.kv.pool import BlockPool
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.tails import SharedTails, Tail, num_full_before_tail


class TailSharing:
    """Of one pool's sequences; `is_on`: whether prefixes are shared at all."""

    def __init__(self, tails: SharedTails, pool: BlockPool, cache: Cache, *, is_on: bool) -> None:
        self._tails = tails
        self._block_size = pool.block_size
        self._cache = cache
        self._is_on = is_on
        self.num_forked = 0
        """Sequences whose next write takes a block of their own, at most: in place of one that they share."""

    def name_of(self, sequence: Sequence) -> BlockHash | None:
        """Of the tail that a sequence shares with other samples of its request; None: it shares none, or not any more.

        Samples with output differ.
        """
        if sequence.num_samples == 1 or sequence.num_output or not self._is_on:
            return None
        if sequence.beams is not None or not sequence.wants_token:
            return None
        return self._name(sequence)

    def finds(self, sequence: Sequence) -> bool:
        """Whether an admission would share a tail. O(log blocks)."""
        tail = self._tails.get(self.name_of(sequence))
        if tail is None:
            return False
        num_full = num_full_before_tail(sequence.num_tokens, self._block_size)
        hashes = sequence.block_hashes(num_full + (tail.block is None))
        return self._cache.peek(hashes) == len(hashes)

    # -- who has it first ---------------------------------------------------------------------------------------------

    def offer(self, sequence: Sequence) -> Tail | None:
        """The next step completes a sequence's prompt: others may have its tail then. None: they have it already, or
        share none. `list` follows, unless the sequence loses its blocks."""
        self.withdraw_offer(sequence)
        name = self.name_of(sequence)
        if name is None or name in self._tails:
            return None
        sequence.offers = self._tail_of(sequence, name, keep=True)
        return sequence.offers

    def withdraw_offer(self, sequence: Sequence) -> None:
        """Nobody gets the tail that a sequence was about to complete."""
        if sequence.offers is not None:
            self._tails.withdraw(sequence.offers)
            sequence.offers = None

    def list(self, sequence: Sequence, offered: Tail | None) -> None:
        """The step has landed. `offered`: with it; None: the sequence has its tail, and nobody else gets it from it."""
        self.ended(sequence)
        scores, sequence.scores = sequence.scores, []
        if offered is not None and sequence.offers is offered:
            sequence.offers = None
            if sequence.sampling.prompt_logprobs is not None:
                offered.scores = scores
                if len(scores) != sequence.num_prompt - 1:  # some were told before a preemption
                    self._tails.withdraw(offered)
            self._tails.list(offered, sequence.num_samples - self._tails.num_seen(offered.name, offered.request))

    def list_received(self, sequence: Sequence, name: BlockHash, num_others: int) -> None:
        """A sequence received a prompt, tail and all; up to so many other samples are to come."""
        self.ended(sequence)
        num_others = min(num_others, sequence.num_samples - self._tails.num_seen(name, sequence.key[0]))
        if num_others > 0 and name not in self._tails:
            self._tails.list(self._tail_of(sequence, name, keep=False), num_others)

    # -- who takes it -------------------------------------------------------------------------------------------------

    def take(self, sequence: Sequence, tail: Tail) -> None:
        """A sequence that was given the tail's block will draw its first token from it."""
        sequence.tail = tail
        self.set_forked(sequence, self.writes_into_tail(sequence))
        self._tails.take(tail, sequence.key[2])

    def drawn(self, sequence: Sequence) -> None:
        """A sequence has its first token, or will not draw it from its tail."""
        if sequence.tail is not None:
            self._tails.drawn(sequence.tail)
            sequence.tail = None

    def ended(self, sequence: Sequence) -> None:
        """A sequence has its tail, or ended without it."""
        if sequence.num_samples > 1 and self._is_on:
            self._tails.left(self._name(sequence), sequence.key[0], sequence.key[2])

    def lost_blocks(self, sequence: Sequence) -> None:
        """It offers none, draws from none, and writes nowhere."""
        self.withdraw_offer(sequence)
        self.drawn(sequence)
        self.set_forked(sequence, False)

    def writes_into_tail(self, sequence: Sequence) -> bool:
        """Whether its first output goes to the block that its prompt's tail is in: of a shared one it needs a copy."""
        return not sequence.prefill_only and sequence.num_prompt % self._block_size > 0

    def set_forked(self, sequence: Sequence, is_forked: bool) -> None:
        """Whether its next write may hit a block that others share."""
        self.num_forked += is_forked - sequence.is_forked
        sequence.is_forked = is_forked

    # -- inside -------------------------------------------------------------------------------------------------------

    def _name(self, sequence: Sequence) -> BlockHash:
        if not sequence.tail_name:
            num_full = num_full_before_tail(sequence.num_prompt, self._block_size)
            parent = sequence.block_hashes(num_full)[-1] if num_full else sequence.root
            tokens = sequence.tokens.view(num_full * self._block_size, sequence.num_prompt)
            scope = f"{'received' if sequence.arrives else 'computed'} {sequence.key[0]}"
            sequence.tail_name = tail_hash(parent, tokens, scope)
        return sequence.tail_name

    def _tail_of(self, sequence: Sequence, name: BlockHash, *, keep: bool) -> Tail:
        index, num_behind = divmod(sequence.num_prompt, self._block_size)
        block = int(sequence.table.ids[index]) if num_behind else None
        tail = self._tails.prepare(name, sequence.key[0], block, keep=keep)
        self.set_forked(sequence, self.writes_into_tail(sequence))
        return tail
