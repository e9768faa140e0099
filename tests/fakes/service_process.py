"""Services without a model: they read the real configuration, register for real, and drain on SIGTERM.

The environment makes them misbehave: FAKE_FAIL=ROLE ends that role at start, FAKE_SLOW_START=ROLE never becomes ready,
FAKE_STUBBORN=ROLE ignores SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections import Counter

from kvrelay.config import CommonConfig, RouterConfig, WorkerConfig, load_config
from kvrelay.config.worker import Role
from kvrelay.fleet import Registry, RegistryError, WorkerIdTaken, WorkerRecord


def run_worker(role: Role) -> None:
    config = load_config(WorkerConfig, role=role)
    _begin(config, role)
    asyncio.run(_work(config))


def run_router() -> None:
    config = load_config(RouterConfig)
    _begin(config, "router")
    asyncio.run(_route(config))


def _begin(config: CommonConfig, role: str) -> None:
    print(f"{role} runs with {config.printable()}", flush=True)
    if os.environ.get("FAKE_FAIL") == role:
        sys.exit(f"{role} cannot start: this is its last word")
    if os.environ.get("FAKE_SLOW_START") == role:
        print(f"{role} waits", flush=True)
        signal.pause()


def _stop_event(role: str) -> asyncio.Event:
    stop = asyncio.Event()
    stubborn = os.environ.get("FAKE_STUBBORN") == role
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, (lambda: None) if stubborn else stop.set)
    return stop


async def _work(config: WorkerConfig) -> None:
    stop = _stop_event(config.role)
    await asyncio.gather(*(_register(config, name, stop) for name in config.started_worker_ids))


async def _register(config: WorkerConfig, worker_id: str, stop: asyncio.Event) -> None:
    registry = Registry(config.redis_url, config.redis_prefix)
    record = WorkerRecord(
        worker_id=worker_id,
        role=config.role,
        incarnation=secrets.token_hex(8),
        address="tcp://127.0.0.1:1",
        model=config.model_name,
        fingerprint="fake",
        protocol_version=1,
        block_size=config.block_size,
        num_blocks=1,
        max_model_len=1,
        vocab_size=1,
    )
    try:
        record = await registry.join(record, config.lease_ttl_s)
    except WorkerIdTaken as taken:
        record = await registry.join(record, config.lease_ttl_s, ended=taken.incarnation)
    while not stop.is_set():
        try:
            await registry.renew(record, config.lease_ttl_s)
        except RegistryError as error:
            print(error, flush=True)
        try:
            await asyncio.wait_for(stop.wait(), 0.2)
        except TimeoutError:
            continue
    await registry.leave(record)
    await registry.close()


async def _route(config: RouterConfig) -> None:
    stop = _stop_event("router")
    registry = Registry(config.redis_url, config.redis_prefix)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            roles = Counter(worker.role for worker in await registry.list_workers(config.model_name))
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"workers": roles}).encode())
        except RegistryError:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, config.host, config.port)
    await stop.wait()
    server.close()
    await registry.close()
