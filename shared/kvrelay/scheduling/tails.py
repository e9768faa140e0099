"""The last block of a prompt, shared by the samples of one request (Kwon et al., PagedAttention, SOSP 2023, 4.4).

Full blocks are shared through the prefix cache, by their hashes. The *tail* is what the cache leaves to each sequence
to compute: the tokens behind the last block that it may reuse, one at least and a block at most. Here it is computed
once for all samples of a request, and stored once until one of them writes behind it:

1. PENDING  the first sample's step computes the tail; whoever else wants it waits (`PrefixesInProgress`).
2. LISTED   it is there. Its block is held by this list besides its sequences, so that the first sample, too, copies it
            before it writes. A sample that is admitted takes the block, and draws its first token from what the runner
            kept of the prompt's last position (`state`) instead of computing anything.
3. OVER     all who were expected have it, or none of them is here any more, or the room was needed. Sequences that
            have taken it keep their own holds, and the last of them writes in place.

A tail is never owed to anybody: a sample that does not find it computes it. So it yields to whoever needs its block,
and nothing waits for it but what `PrefixesInProgress` ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockPool, Owner
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sampling import TokenLogprobs


@dataclass(slots=True, eq=False)
class Tail:
    """`name` covers request, prompt and model. `block` is None for a tail that fills its block: nobody writes into
    that, and it is found in the prefix cache as others are. `state`: what the runner calls the kept last position; 0
    where the prompt was computed elsewhere. `num_expected`: samples that are to take it still."""

    name: BlockHash
    request: str
    block: int | None
    state: int
    num_expected: int = 0
    num_drawing: int = 0
    is_listed: bool = False
    is_over: bool = False
    scores: Seq[TokenLogprobs] = ()  # of the prompt's tokens, where they are asked for


class SharedTails:
    """The tails of one pool. See the module's text."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._listed: dict[BlockHash, Tail] = {}
        self._seen: dict[str, dict[BlockHash, set[int]]] = {}  # of requests: samples that have it, or need it no more
        self._states = count(1)
        self._forgotten: list[int] = []  # states that the runner still keeps

    def __len__(self) -> int:
        return len(self._listed)

    def __contains__(self, name: object) -> bool:
        return name in self._listed

    def get(self, name: BlockHash | None) -> Tail | None:
        """The listed tail of this name."""
        return self._listed.get(name) if name is not None else None

    def begin(self, request: str) -> None:
        """A sample of it is here."""
        self._seen.setdefault(request, {})

    def prepare(self, name: BlockHash, request: str, block: int | None, *, keep: bool) -> Tail:
        """PENDING: a sample computes it, or has just got it. `keep`: the runner is to keep the last position."""
        if block is not None:
            self._pool.hold((block,), Owner.RUNNING)
        return Tail(name, request, block, next(self._states) if keep else 0)

    def num_seen(self, name: BlockHash, request: str) -> int:
        """Samples that have a tail, or need it no more."""
        return len(self._seen.get(request, {}).get(name, ()))

    def seen_of(self, request: str) -> set[int]:
        """Those of a request, whichever prompts they had."""
        return set().union(*self._seen.get(request, {}).values())

    def list(self, tail: Tail, num_expected: int) -> None:
        """It is there from now on. OVER at once where nobody is expected, or one of its name is there already."""
        if num_expected < 1 or tail.name in self._listed or tail.request not in self._seen:
            self.withdraw(tail)
        elif not tail.is_over:
            tail.num_expected, tail.is_listed = num_expected, True
            self._listed[tail.name] = tail

    def withdraw(self, tail: Tail) -> None:
        """OVER: nobody takes it any more. What is over already stays so."""
        if tail.is_over:
            return
        tail.is_over = True
        if tail.is_listed:
            del self._listed[tail.name]
        if tail.block is not None:
            self._pool.release((tail.block,), Owner.RUNNING)
        self._forget_unused(tail)

    # -- samples ------------------------------------------------------------------------------------------------------

    def take(self, tail: Tail, sample: int) -> None:
        """A sample that holds the block now will draw from the state, if there is one."""
        tail.num_drawing += 1
        self.left(tail.name, tail.request, sample)

    def drawn(self, tail: Tail) -> None:
        """A sample that took it has its first token, or will not have it by this."""
        tail.num_drawing -= 1
        self._forget_unused(tail)

    def left(self, name: BlockHash, request: str, sample: int) -> None:
        """A sample has the tail, by whatever way, or ended without it: it is expected no more."""
        seen = self._seen.get(request)
        if seen is None or sample in (samples := seen.setdefault(name, set())):
            return
        samples.add(sample)
        if (tail := self._listed.get(name)) is not None:
            tail.num_expected -= 1
            if not tail.num_expected:
                self.withdraw(tail)

    def end(self, request: str) -> None:
        """None of a request's samples is here any more."""
        for name in self._seen.pop(request, ()):
            if (tail := self._listed.get(name)) is not None:
                self.withdraw(tail)

    # -- room ---------------------------------------------------------------------------------------------------------

    @property
    def num_idle(self) -> int:
        """Tails whose block nobody holds besides: each would free one. O(tails)."""
        return sum(self._is_idle(tail) for tail in self._listed.values())

    def free_idle(self, num_blocks: int) -> bool:
        """Ends so many idle ones, the oldest first; False, and nothing, where there are not so many. O(tails)."""
        idle = [tail for tail in self._listed.values() if self._is_idle(tail)]
        if len(idle) < num_blocks:
            return False
        for tail in idle[:num_blocks]:
            self.withdraw(tail)
        return True

    def give_up(self, block: int) -> None:
        """Ends the tail in this block, if it is one: its last holder need not copy it then. O(tails)."""
        for tail in [tail for tail in self._listed.values() if tail.block == block]:
            self.withdraw(tail)

    def _is_idle(self, tail: Tail) -> bool:
        return tail.block is not None and self._pool.num_holds(tail.block) == 1

    # -- the runner's side --------------------------------------------------------------------------------------------

    def take_forgotten(self) -> tuple[int, ...]:
        """The states that nobody will draw from: for the next step's plan, once."""
        forgotten, self._forgotten = self._forgotten, []
        return tuple(forgotten)

    def give_back_forgotten(self, states: Iterable[int]) -> None:
        """The step that was to forget them is not executed."""
        self._forgotten += states

    def _forget_unused(self, tail: Tail) -> None:
        if tail.is_over and not tail.num_drawing and tail.state:
            self._forgotten.append(tail.state)

    def check_integrity(self) -> None:
        """Every listed tail's block is held for it. Raises AssertionError."""
        for name, tail in self._listed.items():
            assert tail.name == name and tail.is_listed and not tail.is_over and tail.num_expected > 0
            assert name in self._seen[tail.request], "nobody would end it"
            if tail.block is not None:
                assert self._pool.num_holds(tail.block, Owner.RUNNING) > 0, f"nobody holds tail block {tail.block}"


def num_full_before_tail(num_tokens: int, block_size: int) -> int:
    """Blocks before a prompt's tail, which has one token at least: prefixes leave one to compute."""
    return blocks_for(num_tokens, block_size) - 1
