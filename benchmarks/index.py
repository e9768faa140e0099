"""The prefix index against the straightforward design: one Redis hash per block, worker to time, pipelined.

Both run here, in one run, on one redis-server, from redis-py without a C parser. 256 workers, in pairs that hold the
same blocks, as a prefill and a decode worker do.

- lookups: chains of 64, 256 and 768 blocks that two workers hold whole; one in a round trip and sixteen, as a router
  asks that has more requests than one while its replica loads; as one client sees it (on a shared machine: a lower
  bound), and the CPU time that it takes; medians of seven turns in which the two alternate, with the range of their
  factors. Beside it what a round trip of that client takes that does nothing: nothing can be faster, one at a time
- updates: blocks stored in batches of 1000, seen by one client
- memory: used_memory for each distinct block, without and with the stream (whose entries are trimmed after 30 s)
- replica: the router's lookup in its own copy
- heal: Redis is emptied; from the first reopened range to the last confirmed block, and until a router's replica is
  current again. All publishers share this process's interpreter, in a fleet each has its own.
- churn: 64 publishers store and evict at the same time; one router follows

    .venv/bin/python -m benchmarks.index --write benchmarks/results/index.md
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import redis

from kvrelay.fleet import embedded
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.index import IndexFeed, IndexPublisher, IndexReader
from kvrelay.fleet.index.layout import (
    MAX_BATCH_BLOCKS,
    MAX_SLOTS,
    STORED,
    Batch,
    decode_depths,
    encode_batch,
    encode_operations,
    index_base,
)
from kvrelay.fleet.index.scripts import IndexScripts
from kvrelay.kv.cache import Removed, Stored

NUM_WORKERS = 256
LENGTHS = (64, 256, 768)
TOGETHER = (1, 16)
TURNS = 7
BATCH = 1000
MODEL, PREFIX = "m", "kvrelay"
Hash = bytes


def make_chains(num_blocks: int) -> list[list[Hash]]:
    """One chain a pair of workers."""
    per_pair = num_blocks // (NUM_WORKERS // 2)
    return [[os.urandom(16) for _ in range(per_pair)] for _ in range(NUM_WORKERS // 2)]


class Index:
    name = "kvrelay"

    def __init__(self, client: Any) -> None:
        self._client = client
        self._scripts = IndexScripts(client, index_base(PREFIX, MODEL))
        self._ranges: dict[str, tuple[int, str, int]] = {}

    def store(self, worker: str, hashes: Sequence[Hash]) -> None:
        if worker not in self._ranges:
            range_id = f"{len(self._ranges):016x}:00000000"
            slot = self._scripts.run("open", [worker, range_id[:16], range_id, 600_000, MAX_SLOTS])
            self._ranges[worker] = (slot, range_id, 0)
        slot, range_id, seq = self._ranges[worker]
        operations = encode_operations([(STORED, hashes)])
        event = encode_batch(Batch(slot, range_id, seq + 1, operations))
        assert self._scripts.run("apply", [slot, range_id, seq + 1, 600_000, operations, event]) == b"OK"
        self._ranges[worker] = (slot, range_id, seq + 1)

    def lookup(self, *chains: Sequence[Hash]) -> list[dict[str, int]]:
        answers = self._scripts.run("lookup", [MAX_BATCH_BLOCKS, *map(b"".join, chains)])
        return list(map(decode_depths, answers))

    def drop_stream(self) -> None:
        self._client.delete(f"{index_base(PREFIX, MODEL)}:stream")


class HashPerBlock:
    """A key for each block, a field for each worker. It has no way to end a worker but to visit every key."""

    name = "a hash per block"

    def __init__(self, client: Any) -> None:
        self._client = client

    def store(self, worker: str, hashes: Sequence[Hash]) -> None:
        now = int(time.time())
        pipeline = self._client.pipeline(transaction=False)
        for block_hash in hashes:
            pipeline.hset(b"kvrelay:{m}:" + block_hash, worker, now)
        pipeline.execute()

    def lookup(self, *chains: Sequence[Hash]) -> list[dict[str, int]]:
        pipeline = self._client.pipeline(transaction=False)
        for block_hash in (each for hashes in chains for each in hashes):
            pipeline.hkeys(b"kvrelay:{m}:" + block_hash)
        answers = iter(pipeline.execute())
        return [self._depths(list(islice(answers, len(each)))) for each in chains]

    @staticmethod
    def _depths(answers: Sequence[Sequence[bytes]]) -> dict[str, int]:
        held: dict[str, int] = {}
        holders: set[bytes] | None = None
        for number, workers in enumerate(answers, 1):
            holders = set(workers) if holders is None else holders & set(workers)
            if not holders:
                break
            held.update((worker.decode(), number) for worker in holders)
        return held

    def drop_stream(self) -> None: ...


Design = Index | HashPerBlock


def server_us(client: Any) -> float:
    """CPU time of the server in microseconds."""
    cpu = client.info("cpu")
    return 1e6 * float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def measure_design(design: Design, client: Any, chains: list[list[Hash]]) -> dict[str, float]:
    """Rates a second, microseconds, bytes a block."""
    before = client.info("memory")["used_memory"]
    num_blocks = sum(map(len, chains))
    began, began_us = time.perf_counter(), server_us(client)
    for number in range(NUM_WORKERS):
        chain = chains[number // 2]
        for start in range(0, len(chain), BATCH):
            design.store(f"worker-{number}", chain[start : start + BATCH])
    found = {"updates": 2 * num_blocks / (time.perf_counter() - began)}
    found["update_us"] = (server_us(client) - began_us) / (2 * num_blocks)
    found["memory_with_stream"] = (client.info("memory")["used_memory"] - before) / num_blocks
    design.drop_stream()
    found["memory"] = (client.info("memory")["used_memory"] - before) / num_blocks
    found["ping_us"] = time_call(client.ping, 1000)
    return found


def compare_lookups(designs: Sequence[tuple[Design, Any]], chains: list[list[Hash]]) -> dict[str, dict[str, float]]:
    """Both designs in turns, so that what else runs here meets both: medians, and the range of the factors."""
    found: dict[str, dict[str, float]] = {design.name: {} for design, _ in designs}
    for length, at_once in product(LENGTHS, TOGETHER):
        runs = [
            {design.name: measure_lookups(design, client, chains, length, at_once) for design, client in designs}
            for _ in range(TURNS)
        ]
        for name, kept in found.items():
            kept |= {key: statistics.median(run[name][key] for run in runs) for key in runs[0][name]}
        for key in runs[0][Index.name]:
            factors = [run[HashPerBlock.name][key] / run[Index.name][key] for run in runs]
            factors = [1 / factor for factor in factors] if key.startswith("lookup_") and "_us_" not in key else factors
            found[Index.name] |= {f"{key}_least": min(factors), f"{key}_most": max(factors)}
    return found


def measure_lookups(
    design: Design, client: Any, chains: list[list[Hash]], length: int, at_once: int
) -> dict[str, float]:
    """Of chains of `length` that are held whole, `at_once` in each round trip: a second, and CPU microseconds."""
    rounds = max(8, (100 if isinstance(design, HashPerBlock) else 1000) // at_once)
    began, began_us, began_client = time.perf_counter(), server_us(client), time.process_time()
    for number in range(rounds):
        pairs = [(number * at_once + i) % len(chains) for i in range(at_once)]
        answers = design.lookup(*(chains[pair][:length] for pair in pairs))
        assert [answer[f"worker-{2 * pair}"] for pair, answer in zip(pairs, answers, strict=True)] == [length] * at_once
    num_lookups, key = rounds * at_once, f"{length}x{at_once}"
    client_us = 1e6 * (time.process_time() - began_client) / num_lookups
    lookup_us = (server_us(client) - began_us) / num_lookups
    return {
        f"lookup_{key}": num_lookups / (time.perf_counter() - began),
        f"lookup_us_{key}": lookup_us,
        f"both_us_{key}": client_us + lookup_us,
    }


def time_call(call: Callable[[], object], rounds: int = 20_000) -> float:
    """Microseconds, the median of five runs."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(rounds):
            call()
        times.append((time.perf_counter() - began) / rounds)
    return statistics.median(times) * 1e6


async def measure_heal(server: EmbeddedRedis, chains: list[list[Hash]]) -> dict[str, float]:
    """Publishers of all workers, one router; then Redis is emptied."""
    publishers = [
        IndexPublisher(server.url, PREFIX, MODEL, f"worker-{number}", f"{number:016x}", ttl_s=30.0)
        for number in range(NUM_WORKERS)
    ]
    for number, publisher in enumerate(publishers):
        publisher.start()
        publisher.publish([Stored(None, tuple(chains[number // 2]))])
    await until(lambda: all(publisher.publication.is_settled for publisher in publishers))
    feed = IndexFeed(IndexReader(server.url, PREFIX, MODEL))
    began = time.perf_counter()
    feed.start()
    num_held = 2 * sum(map(len, chains))
    await until(lambda: feed.replica is not None and feed.replica.num_held == num_held)
    found = {"replica_start_s": time.perf_counter() - began}
    replica = feed.replica
    assert replica is not None
    for length in LENGTHS:
        chain = chains[7][:length]
        assert replica.match(chain) == {"worker-14": length, "worker-15": length}
        found[f"replica_hit_{length}"] = time_call(partial(replica.match, chain))
        half = [*chain[: length // 3], *(os.urandom(16) for _ in range(length - length // 3))]
        found[f"replica_part_{length}"] = time_call(partial(replica.match, half))
        miss = [os.urandom(16) for _ in range(length)]
        found[f"replica_miss_{length}"] = time_call(partial(replica.match, miss))
    await feed.close()
    with redis.Redis.from_url(server.url) as client:
        done = [publisher.publication.totals.replacements for publisher in publishers]
        client.flushall()
    began = time.perf_counter()
    await until(lambda: any(p.publication.totals.replacements > n for p, n in zip(publishers, done, strict=True)))
    found["noticed_s"] = time.perf_counter() - began
    await until(
        lambda: all(
            p.publication.totals.replacements > n and p.publication.is_settled
            for p, n in zip(publishers, done, strict=True)
        )
    )
    found["heal_s"] = time.perf_counter() - began
    for publisher in publishers:
        publisher.abandon()
    for publisher in publishers:
        publisher.close()
    return found


async def measure_churn(server: EmbeddedRedis, seconds: float = 10.0) -> dict[str, float]:
    """64 publishers that store and evict as fast as half a core lets them, and a router that follows."""
    publishers = [
        IndexPublisher(server.url, "churn", MODEL, f"worker-{number}", f"{number:016x}", ttl_s=30.0)
        for number in range(64)
    ]
    for publisher in publishers:
        publisher.start()
    feed = IndexFeed(IndexReader(server.url, "churn", MODEL))
    feed.start()
    held: list[list[list[Hash]]] = [[] for _ in publishers]
    began, num_operations, ages = time.perf_counter(), 0, []
    while time.perf_counter() - began < seconds:
        for publisher, chains in zip(publishers, held, strict=True):
            chain = [os.urandom(16) for _ in range(32)]
            chains.append(chain)
            events: list[Stored | Removed] = [Stored(None, tuple(chain))]
            if len(chains) > 64:
                events.append(Removed(tuple(reversed(chains.pop(0)))))
            publisher.publish(events)
            num_operations += 32 * len(events)
        await asyncio.sleep(0.05)
        age = feed.describe()["age_s"]
        ages.append(0.0 if age is None else float(age))
    lasted = time.perf_counter() - began
    await until(lambda: all(publisher.publication.is_settled for publisher in publishers))
    expected = 32 * sum(map(len, held))
    await until(lambda: feed.replica is not None and feed.replica.num_held == expected)
    total = feed.describe()
    await feed.close()
    for publisher in publishers:
        publisher.close()
    return {
        "churn_rate": num_operations / lasted,
        "churn_age_p50_s": statistics.median(ages),
        "churn_age_max_s": max(ages),
        "churn_resyncs": total["resyncs"],
        "churn_gaps": sum(publisher.publication.totals.gaps for publisher in publishers),
    }


async def until(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    """Waits for it. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def report(version: str, num_blocks: int, found: dict[str, dict[str, float]], fleet: dict[str, float]) -> str:
    ours, theirs = found[Index.name], found[HashPerBlock.name]

    def row(title: str, key: str, unit: str, *, less_is_better: bool = False) -> str:
        factor = theirs[key] / ours[key] if less_is_better else ours[key] / theirs[key]
        spread = f" ({ours[f'{key}_least']:.1f} to {ours[f'{key}_most']:.1f})" if f"{key}_least" in ours else ""
        return f"| {title} | {theirs[key]:,.1f} {unit} | {ours[key]:,.1f} {unit} | {factor:.1f}{spread} |"

    lines = [
        "# The prefix index",
        "",
        f"Written by `benchmarks/index.py` on {os.cpu_count()} cores of a shared {platform.machine()} machine with "
        f"Redis {version}: {NUM_WORKERS} workers, {num_blocks:,} blocks, each on two of them. Load average while it "
        f"was written: {os.getloadavg()[1]:.0f}.",
        "",
        f"| | {HashPerBlock.name} | {Index.name} | factor |",
        "|---|---|---|---|",
        *(
            line
            for n, at_once in product(LENGTHS, TOGETHER)
            for line in (
                row(f"lookups of {n} blocks, {at_once} in a round trip", f"lookup_{n}x{at_once}", "/s"),
                row("CPU for one, client and server", f"both_us_{n}x{at_once}", "us", less_is_better=True),
                row("CPU for one, server alone", f"lookup_us_{n}x{at_once}", "us", less_is_better=True),
            )
        ),
        f"| a round trip that does nothing (PING) | {theirs['ping_us']:,.1f} us | {ours['ping_us']:,.1f} us | |",
        row("updates, one client", "updates", "/s"),
        row("CPU for one, server alone", "update_us", "us", less_is_better=True),
        row("memory of a block", "memory", "bytes", less_is_better=True),
        row("with 30 s of such updates in the stream", "memory_with_stream", "bytes", less_is_better=True),
        "",
        "| replica in a router | all blocks held | a third | none |",
        "|---|---|---|---|",
        *(
            f"| {n} blocks | {fleet[f'replica_hit_{n}']:.1f} us | {fleet[f'replica_part_{n}']:.1f} us "
            f"| {fleet[f'replica_miss_{n}']:.1f} us |"
            for n in LENGTHS
        ),
        "",
        f"- A router's replica of {2 * num_blocks:,} held blocks is complete {fleet['replica_start_s']:.1f} s after it "
        "starts.",
        f"- After FLUSHALL the first worker noticed within {fleet['noticed_s']:.2f} s (renewals are a second apart); "
        f"all {2 * num_blocks:,} held blocks were back {fleet['heal_s']:.1f} s after the loss.",
        f"- Churn of 64 workers, {fleet['churn_rate']:,.0f} stores and evictions a second: the replica was "
        f"{1e3 * fleet['churn_age_p50_s']:.0f} ms behind in the median, {1e3 * fleet['churn_age_max_s']:.0f} ms at "
        f"worst; {fleet['churn_gaps']:.0f} gaps, {fleet['churn_resyncs']:.0f} reloads; equal in the end.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs everything, or with fewer blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=500_000, help="distinct blocks; two workers hold each")
    parser.add_argument("--redis-server", help="another binary than the bundled one")
    parser.add_argument("--write", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if arguments.redis_server:
        embedded.redis_executable = lambda: arguments.redis_server
    chains = make_chains(arguments.blocks)
    num_blocks = sum(map(len, chains))
    with ExitStack() as stack:
        designs: list[tuple[Design, Any]] = []
        found = {}
        for make in (HashPerBlock, Index):
            server = stack.enter_context(EmbeddedRedis())
            client = stack.enter_context(redis.Redis.from_url(server.url))
            version = str(client.info()["redis_version"])
            designs.append((make(client), client))
            found[make.name] = measure_design(*designs[-1], chains)
        for name, lookups in compare_lookups(designs, chains).items():
            found[name] |= lookups
    gc.freeze()
    with EmbeddedRedis() as server:
        fleet = asyncio.run(measure_heal(server, chains))
    with EmbeddedRedis() as server:
        fleet |= asyncio.run(measure_churn(server))
    text = report(version, num_blocks, found, fleet)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
