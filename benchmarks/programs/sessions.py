"""What the cache gains by knowing which sessions have ended: hit rates of one worker's cache, replayed without a model.

`NUM_OPEN` sessions run at a time, and take their next turn in random order. A session begins with one of four shared
instructions, and each turn lengthens its prompt. Once it has ended, a new one begins. Pools have room for a fraction of
the blocks that all open sessions have together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from benchmarks.kv_trees import BLOCK_SIZE, ROOT
from kvrelay.kv.hashing import BlockHash, hash_blocks
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.session_blocks import SessionBlocks

NUM_OPEN = 64
NUM_TURNS = 20_000
FRACTIONS = (0.5, 0.75, 1.0, 1.5, 2.0)
MOST_TURNS = 8
TURN_BLOCKS = (4, 24)
SHARED_BLOCKS = 32
MEAN_OPEN_BLOCKS = NUM_OPEN * 14 * (MOST_TURNS + 1) // 4


@dataclass(slots=True)
class _Session:
    name: str
    num_turns: int
    hashes: list[BlockHash] = field(default_factory=list)


class _Replay:
    """One cache, with or without the ends of sessions."""

    def __init__(self, num_blocks: int, *, knows_ends: bool) -> None:
        self._knows_ends = knows_ends
        self._num_hits = self._num_asked = 0
        self._pool = BlockPool(num_blocks, BLOCK_SIZE)
        self._cache = PrefixCache(self._pool)
        self._sessions = SessionBlocks(2 * num_blocks)

    def run(self) -> float:
        """The share of asked blocks that were cached."""
        draw, tokens = random.Random(0), np.random.default_rng(0)
        shared = [_longer([], SHARED_BLOCKS, tokens) for _ in range(4)]
        number = 0
        opened: list[_Session] = []
        for _ in range(NUM_TURNS):
            while len(opened) < NUM_OPEN:
                opened.append(_Session(f"s{number}", draw.randint(1, MOST_TURNS), list(draw.choice(shared))))
                number += 1
            session = draw.choice(opened)
            session.hashes = _longer(session.hashes, draw.randint(*TURN_BLOCKS), tokens)
            self._serve(session)
            session.num_turns -= 1
            if not session.num_turns:
                opened.remove(session)
                if self._knows_ends:
                    self._cache.demote(self._sessions.end(session.name))
        return self._num_hits / self._num_asked

    def _serve(self, session: _Session) -> None:
        hashes = session.hashes
        matched = self._cache.match(hashes)
        self._num_asked, self._num_hits = self._num_asked + len(hashes), self._num_hits + len(matched)
        self._pool.hold(matched, BlockState.RUNNING)
        self._sessions.matched(session.name, hashes[: len(matched)])
        new = hashes[len(matched) :]
        blocks = matched + self._pool.allocate(len(new), BlockState.RUNNING)
        self._cache.extend(hashes[len(matched) - 1] if matched else None, new, blocks[len(matched) :])
        self._sessions.published(session.name, new)
        self._pool.release(blocks, BlockState.RUNNING)


def _longer(chain: list[BlockHash], num_blocks: int, tokens: np.random.Generator) -> list[BlockHash]:
    token_ids = tokens.integers(0, 128_000, num_blocks * BLOCK_SIZE, np.int32)
    return chain + hash_blocks(chain[-1] if chain else ROOT, token_ids, BLOCK_SIZE)


def lines() -> list[str]:
    """A table over pool sizes."""
    best = _Replay(NUM_TURNS * TURN_BLOCKS[1], knows_ends=False).run()
    rows = []
    for fraction in FRACTIONS:
        num_blocks = int(fraction * MEAN_OPEN_BLOCKS)
        without, known = (_Replay(num_blocks, knows_ends=ends).run() for ends in (False, True))
        rows.append(f"| {fraction:g} | {num_blocks} | {without:.3f} | {known:.3f} | {known / best:.3f} |")
    head = "| pool over open sessions | blocks | hit rate by last use | with ends of sessions | of the best |"
    return [head, "|---:|---:|---:|---:|---:|", *rows, "", f"Best possible: {best:.3f}."]


if __name__ == "__main__":
    print("\n".join(lines()))
