"""What the prefix cache costs at a million blocks: memory per block, and operations per second.

Three trees: one long chain; many short branches under one system prompt; a mix of conversations (20 system prompts of 4
to 64 blocks, conversations of 1 to 8 turns, 8 to 64 blocks a turn, one turn in ten answered twice). Each is filled by
whole requests, as a worker does it: match, hold, allocate, publish in chunks of 64 blocks, release. Then prefixes are
matched, the full pool serves more requests (each block of which is evicted first), and everything is evicted.

Usage: python -m benchmarks.kv_trees [--num-blocks 1000000] [--write benchmarks/results/kv_trees.md]

Each tree is measured in a process of its own, in seconds of CPU time (other processes do not count), with the garbage
collector off (it would walk the workload's lists). Bytes a block are the growth of the resident set from before the
pool was made to when it is full, less the workload's own lists, divided by the cached blocks: pool, tree, free runs and
the hashes themselves. What the C library has freed but not yet given back is not counted; after the churn that was 35
bytes a block more. The aim is 200 bytes a block, and 200,000 evicted blocks a second for the mix.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache

BLOCK_SIZE = 16
CHUNK_BLOCKS = 64
CHAIN_STEPS = 16  # requests in which the one long chain grows to the pool's size
LEAST_BLOCKS = 20_000  # of a pool in which conversations have room
MAX_TIMED_BLOCKS = 1024  # the longest operation is sought among those over at most so many blocks
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ROOT = root_hash(model="benchmark")
SHAPES = ("chain", "branches", "mix")

Chain = list[BlockHash]


class Clock:
    """Seconds and blocks by phase, and the longest single operation."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.blocks: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.longest_s = 0.0

    @contextmanager
    def phase(self, name: str, num_blocks: int) -> Iterator[None]:
        """Times one operation over `num_blocks` blocks."""
        start = time.process_time()
        yield
        elapsed = time.process_time() - start
        if num_blocks <= MAX_TIMED_BLOCKS:
            self.longest_s = max(self.longest_s, elapsed)
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        self.blocks[name] = self.blocks.get(name, 0) + num_blocks
        self.calls[name] = self.calls.get(name, 0) + 1

    def blocks_per_s(self, name: str) -> float:
        """Blocks a second over all operations of a phase."""
        return self.blocks[name] / self.seconds[name]

    def calls_per_s(self, name: str) -> float:
        """Operations a second of a phase."""
        return self.calls[name] / self.seconds[name]


def lengthen(chain: Chain, num_blocks: int, tokens: np.random.Generator) -> Chain:
    """The chain with `num_blocks` random blocks behind it."""
    token_ids = tokens.integers(0, 128_000, num_blocks * BLOCK_SIZE, np.int32)
    return chain + hash_blocks(chain[-1] if chain else ROOT, token_ids, BLOCK_SIZE)


def chains(shape: str, num_blocks: int, seed: int) -> Iterator[Chain]:
    """Endless requests of a shape, each the hashes of prompt and output. `seed` also seeds the system prompts."""
    tokens, random_ = np.random.default_rng(seed), random.Random(seed)
    if shape == "chain":
        chain: Chain = []
        while True:
            chain = lengthen(chain if len(chain) < num_blocks else [], num_blocks // CHAIN_STEPS, tokens)
            yield chain
    systems = [
        lengthen([], random_.randint(4, 64) if shape == "mix" else 4, np.random.default_rng(i)) for i in range(20)
    ]
    while shape == "branches":
        yield lengthen(systems[0], random_.randint(4, 12), tokens)
    while True:
        chain = random_.choice(systems)
        for _ in range(random_.randint(1, 8)):
            if random_.random() < 0.1:
                yield lengthen(chain, random_.randint(8, 64), tokens)  # an answer that was asked for again
            chain = lengthen(chain, random_.randint(8, 64), tokens)
            yield chain


def serve(pool: BlockPool, cache: PrefixCache, hashes: Chain, clock: Clock) -> None:
    """One request's life in pool and cache. Only the phases' own operations are timed."""
    with clock.phase("match", len(hashes)):
        blocks = cache.match(hashes)
    num_cached = len(blocks)
    num_new = len(hashes) - num_cached
    with clock.phase("hold", num_cached):
        pool.hold(blocks, BlockState.RUNNING)
    with clock.phase("allocate" if num_new <= pool.num_free else "evict and allocate", num_new):
        blocks += pool.allocate(num_new, BlockState.RUNNING)
    for start in range(num_cached, len(hashes), CHUNK_BLOCKS):
        parent = hashes[start - 1] if start else None
        chunk = hashes[start : start + CHUNK_BLOCKS]
        with clock.phase("insert", len(chunk)):
            cache.extend(parent, chunk, blocks[start : start + CHUNK_BLOCKS])
    with clock.phase("release", len(hashes)):
        pool.release(blocks, BlockState.RUNNING)


def resident_bytes() -> int:
    """The process's resident set, after the C library gave back what is free."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def measure(shape: str, num_blocks: int) -> dict[str, float]:
    """Fills, matches, churns and empties one tree."""
    clock = Clock()
    requests = chains(shape, num_blocks, 1)
    next(requests)  # numpy's and hashlib's own memory comes before the count
    gc.disable()
    before = resident_bytes()
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    cache = PrefixCache(pool)
    kept: list[Chain] = []
    for hashes in requests:
        if len(hashes) - cache.peek(hashes) > pool.num_free:
            break
        serve(pool, cache, hashes, clock)
        if shape != "chain":
            kept.append(hashes)
        else:
            kept[:] = [hashes]
    workload_bytes = sum(sys.getsizeof(chain) for chain in kept) + sys.getsizeof(kept)
    used = resident_bytes() - before - workload_bytes
    result = {"cached blocks": cache.num_cached, "bytes a block": used / cache.num_cached}
    result |= {name: clock.blocks_per_s(name) for name in ("insert", "allocate", "release")}
    result |= matched(cache, kept)
    del kept, hashes  # they would keep the hashes of evicted blocks
    result |= churned(pool, cache, shape, clock)
    result["bytes a block after churn"] = (resident_bytes() - before) / cache.num_cached
    result["longest operation over at most 1,024 blocks"] = clock.longest_s * 1e3
    return result | emptied(pool, cache)


def matched(cache: PrefixCache, kept: list[Chain]) -> dict[str, float]:
    """Matches and peeks of random cached chains."""
    clock = Clock()
    for hashes in random.Random(2).choices(kept, k=20_000 if len(kept) > 1 else 3):
        with clock.phase("peek", len(hashes)):
            cache.peek(hashes)
        with clock.phase("match", len(hashes)):
            cache.match(hashes)
    return {
        "match": clock.blocks_per_s("match"),
        "blocks a match": clock.blocks["match"] / clock.calls["match"],
        "matches": clock.calls_per_s("match"),
        "peeks": clock.calls_per_s("peek"),
    }


def churned(pool: BlockPool, cache: PrefixCache, shape: str, clock: Clock) -> dict[str, float]:
    """New requests on the full pool: each block they get is evicted first."""
    requests = chains(shape, pool.num_blocks, 3)
    while clock.blocks.get("evict and allocate", 0) < pool.num_blocks:
        hashes = next(requests)
        if len(hashes) <= pool.num_blocks // 2:
            serve(pool, cache, hashes, clock)
    return {"evict and allocate": clock.blocks_per_s("evict and allocate")}


def emptied(pool: BlockPool, cache: PrefixCache) -> dict[str, float]:
    """Evicts everything, a chunk of blocks at a time; then the books must balance."""
    clock = Clock()
    start = time.process_time()
    pool.check_integrity()
    check_s = time.process_time() - start
    while cache.num_evictable:
        with clock.phase("evict", min(CHUNK_BLOCKS, cache.num_evictable)):
            cache.evict(CHUNK_BLOCKS)
    pool.check_integrity()
    if pool.num_free != pool.num_blocks:
        raise AssertionError(f"{pool.num_blocks - pool.num_free} blocks are lost")
    return {"evict": clock.blocks_per_s("evict"), "check_integrity": check_s}


ROWS = {
    "cached blocks": "{:,.0f}",
    "bytes a block": "{:.0f}",
    "bytes a block after churn": "{:.0f}",
    "match": "{:,.0f} blocks/s",
    "blocks a match": "{:,.0f}",
    "matches": "{:,.0f}/s",
    "peeks": "{:,.0f}/s",
    "insert": "{:,.0f} blocks/s",
    "allocate": "{:,.0f} blocks/s",
    "release": "{:,.0f} blocks/s",
    "evict": "{:,.0f} blocks/s",
    "evict and allocate": "{:,.0f} blocks/s",
    "longest operation over at most 1,024 blocks": "{:.0f} ms",
    "check_integrity": "{:.1f} s",
}


def report(results: dict[str, dict[str, float]], num_blocks: int) -> str:
    """The results as a Markdown page."""
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in cpu_lines if line.startswith("model name")), "unknown CPU")
    lines = [
        f"# The prefix cache at {num_blocks:,} blocks",
        "",
        f"Machine: {cpu}, {os.cpu_count()} cores (one used), {platform.system()}, "
        f"{platform.python_implementation()} {platform.python_version()}. "
        "Repeat with `python -m benchmarks.kv_trees --write benchmarks/results/kv_trees.md`; "
        "the script's head says what is measured.",
        "",
        "| | " + " | ".join(results) + " |",
        "|---|" + "---:|" * len(results),
    ]
    for name, form in ROWS.items():
        lines.append(f"| {name} | " + " | ".join(form.format(result[name]) for result in results.values()) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures every shape and prints or writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, default=1_000_000)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.num_blocks < LEAST_BLOCKS:
        parser.error(f"--num-blocks {arguments.num_blocks}: at least {LEAST_BLOCKS} are needed")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        tasks = [(shape, arguments.num_blocks) for shape in SHAPES]
        results = dict(zip(SHAPES, processes.starmap(measure, tasks, chunksize=1), strict=True))
    text = report(results, arguments.num_blocks)
    print(text)
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
