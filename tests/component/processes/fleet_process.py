"""Scripted workers of one fleet in one process, under leases in Redis: `fleet_process.py REDIS_URL FIRST COUNT`.

Even numbers prefill, odd ones decode. It writes a line when all have joined, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

from kvrelay.fleet import Registry
from kvrelay.process import allow_open_files
from kvrelay.protocol.link import LinkSettings
from tests.component.dispatch.fake_workers import FakeDecode, FakePrefill, FakeWorker

SETTINGS = LinkSettings(alive_interval_s=2.0, peer_timeout_s=60.0)
LEASE_S = 600.0


async def run(redis_url: str, first: int, count: int) -> None:
    registry = Registry(redis_url)
    workers: list[FakeWorker] = []
    for number in range(first, first + count):
        kind = FakeDecode if number % 2 else FakePrefill
        worker: FakeWorker = kind(f"{kind.role}-{number // 2}", settings=SETTINGS)
        worker.start()
        await registry.join(worker.record, LEASE_S)
        workers.append(worker)
    await registry.close()
    print(f"{len(workers)} workers joined", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for each in workers:
        each.kill()


if __name__ == "__main__":
    allow_open_files(None)
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
