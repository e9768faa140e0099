"""New prefill and decode workers under memory pressure, again and again: `python -m tests.faults.new_stacks`.

Each stack has two new processes of the real services with the hash model, pools of 60 blocks, and serves 100 mixed
requests, the first of them alone. Every token is checked. With NIXL, the first writes over a new connection may hang.
A stack is slow if a request took longer than --limit-s. The exit status is 1 if a transfer failed in a slow stack, or
if its workers had a core for most of the time that they wanted one.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.protocol.messages import Cancel, PeerRef, Reassign
from kvrelay.protocol.sampling import Sampling
from tests.fakes.hash_runner import VOCAB_SIZE, HashRunner, expected_tokens
from tests.fakes.workers import LocalWorker, StubRouter

NUM_BLOCKS, MAX_RUNNING, CONCURRENCY = 60, 16, 12
PROMPT_LENGTHS, OUTPUT_LENGTHS = (5, 20, 60, 120, 300), (1, 4, 16, 40)
MAX_ATTEMPTS = 8
PATIENCE_S = 600.0
STARVED_SHARE = 0.5
TOTALS = ("handed_over", "failed_pushes", "failed_transfers", "quarantines")


@dataclass
class StackResult:
    """Seconds of the first request and of the slowest, the attempts beyond the first, totals of both workers, and the
    share of the time in which their threads could have run that they waited for a core."""

    first_s: float
    worst_s: float
    num_retries: int
    totals: dict[str, float]
    starved_share: float = 0.0

    @property
    def is_explained(self) -> bool:
        """Whether lack of CPU explains a slow request."""
        num_failed = self.totals.get("failed_pushes", 0) + self.totals.get("failed_transfers", 0)
        return not num_failed and self.starved_share > STARVED_SHARE


def run_worker(role: str, redis_url: str, transfer: str, pipe: Connection) -> None:
    """A process of its own: says who it is, serves until it is asked for its totals, and ends."""

    async def serve() -> None:
        worker = LocalWorker(
            redis_url,
            role,
            HashRunner(num_blocks=NUM_BLOCKS),
            transfer=transfer,
            max_running=MAX_RUNNING,
            token_budget=128,
            peer_timeout_s=30.0,
        )
        pipe.send(await worker.start())
        await asyncio.to_thread(pipe.recv)
        pipe.send(worker.started.role.totals())
        worker.die()

    asyncio.run(serve())


async def serve_one(router: StubRouter, prefill: PeerRef, decode: PeerRef, name: str, rng: random.Random) -> int:
    """Retries like a router. Returns the number of attempts."""
    prompt = rng.choices(range(1, VOCAB_SIZE), k=rng.choice(PROMPT_LENGTHS))
    sampling = Sampling(temperature=0.0, max_tokens=rng.choice(OUTPUT_LENGTHS))
    for attempt in range(1, MAX_ATTEMPTS + 1):
        got = router.prefill(prefill, decode, name, prompt, sampling, attempt=attempt)
        await got.until(lambda r: bool(r.finish or r.failed or r.need_decode), PATIENCE_S)
        if got.need_decode:
            router.send(decode, name, Cancel(reason="reassigned"), attempt=attempt)
            router.send(prefill, name, Reassign(decode=None), attempt=attempt)
            await got.finished(PATIENCE_S)
        if got.finish:
            assert got.output == expected_tokens(prompt, sampling, NUM_BLOCKS * 16), f"{name}: wrong tokens"
            return attempt
    raise AssertionError(f"{name} failed {MAX_ATTEMPTS} times: {got.failed}")


async def serve_all(prefill: PeerRef, decode: PeerRef, rng: random.Random, num_requests: int) -> StackResult:
    router, times, num_retries = StubRouter(), [], 0
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int) -> None:
        nonlocal num_retries
        async with places:
            began = time.monotonic()
            num_retries += await serve_one(router, prefill, decode, f"r{number}", rng) - 1
            times.append(time.monotonic() - began)

    try:
        await one(0)
        await asyncio.gather(*(one(number) for number in range(1, num_requests)))
    finally:
        router.close()
    return StackResult(times[0], max(times), num_retries, {})


def starved_share(pids: Iterable[int]) -> float:
    """Waiting for a core over running and waiting, of all threads since their start."""
    lines = [path.read_text() for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    ran, waited = (sum(int(line.split()[column]) for line in lines) for column in (0, 1))
    return waited / max(1, ran + waited)


def run_stack(redis_url: str, transfer: str, seed: int, num_requests: int) -> StackResult:
    """Starts both workers, serves all requests and ends the workers."""
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    for role in ("prefill", "decode"):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=run_worker, args=(role, redis_url, transfer, theirs), daemon=True))
        pipes.append(ours)
        processes[-1].start()
    try:
        peers = [pipe.recv() for pipe in pipes]
        result = asyncio.run(serve_all(peers[0], peers[1], random.Random(seed), num_requests))
        result.starved_share = starved_share(process.pid for process in processes if process.pid)
        for pipe in pipes:
            pipe.send("end")
            found: dict[str, float] = pipe.recv()
            result.totals |= {name: found[name] for name in TOTALS if name in found}
        return result
    finally:
        for process in processes:
            process.kill()
            process.join()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--transfer", choices=("auto", "nixl", "zmq"), default="auto")
    parser.add_argument("--limit-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    multiprocessing.set_forkserver_preload(["torch", "tests.fakes.workers"])
    num_slow = num_unexplained = 0
    with EmbeddedRedis() as redis:
        for number in range(options.count):
            result = run_stack(redis.url, options.transfer, options.seed + number, options.requests)
            is_slow = result.worst_s > options.limit_s
            num_slow += is_slow
            num_unexplained += is_slow and not result.is_explained
            totals = ", ".join(f"{name} {value:g}" for name, value in result.totals.items())
            times = f"first {result.first_s:.2f} s, slowest {result.worst_s:.2f} s"
            share = f"{result.starved_share:.0%} waiting for a core"
            print(f"stack {number}: {times}, {share}, {result.num_retries} retries, {totals}", flush=True)
    print(f"{num_slow} of {options.count} stacks had a request above {options.limit_s:g} s")
    print(f"{num_unexplained} of them are not explained by lack of CPU")
    return 1 if num_unexplained else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
