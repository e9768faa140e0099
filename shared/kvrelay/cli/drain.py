"""`kvrelay drain WORKER`: routers send the worker nothing new; its requests continue."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvrelay.cli.stack_state import NO_STACK, STATE_DIR, NoStack, add_stack_flags, named_stack
from kvrelay.config.common import CommonConfig
from kvrelay.config.loader import ConfigError, add_config_flag, add_flags, resolve
from kvrelay.config.router import RouterConfig
from kvrelay.flag_parser import FlagParser
from kvrelay.flag_values import number
from kvrelay.fleet import Registry, RegistryError, WorkerRecord

POLL_S = 1.0
_STACK_FIELDS = {"redis_url", "redis_prefix", "served_model_name", "model", "config"}
_STACK_VARIABLES = ("KVRELAY_REDIS_URL", "KVRELAY_CONFIG")


def drain(argv: Sequence[str]) -> int:
    """Runs the command. Returns the exit status: 0, 1 for a failure, 2 for invalid flags."""
    arguments = drain_parser().parse(argv)
    try:
        found = _of_stack(arguments)
        config = resolve(RouterConfig, {**vars(arguments), **found}, os.environ)
    except NoStack as error:
        print(f"kvrelay drain: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"kvrelay drain: {error}", file=sys.stderr)
        return 2
    if not config.uses_redis:
        print(
            "kvrelay drain: redis_url is none, and workers are marked in Redis; without it, send the worker SIGTERM: "
            "it finishes what it has, for drain_timeout_s at most, and ends",
            file=sys.stderr,
        )
        return 2
    try:
        return asyncio.run(_drain(config, arguments))
    except RegistryError as error:
        is_guessed = "redis_url" not in found and not _names_redis(arguments)
        hint = f"; {NO_STACK} {STATE_DIR}: name its --state-dir, or --redis" if is_guessed else ""
        print(f"kvrelay drain: {str(error).rstrip('.')}{hint}", file=sys.stderr)
        return 1


def drain_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay drain",
        "Routers send the worker nothing new; what it has goes on. Stop it when it is idle.",
        usage="kvrelay drain WORKER [flags]",
    )
    parser.add_argument("worker", metavar="WORKER", help="the worker's id, as /fleet shows it")
    parser.add_argument("--undo", action="store_true", help="let it take new requests again")
    parser.add_argument("--wait", type=number(0, 86400), metavar="SECONDS", help="wait so long for it to be idle")
    add_stack_flags(parser)
    add_config_flag(parser)
    wanted = {"redis_url", "redis_prefix", "served_model_name", "model"}
    add_flags(parser, CommonConfig, frozenset(CommonConfig.model_fields) - wanted)
    return parser


def _of_stack(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of the stack of `kvrelay up` that is named, or that runs here if nothing names a Redis. Raises NoStack."""
    is_named = arguments.port is not None or arguments.state_dir is not None
    if not is_named and _names_redis(arguments):
        return {"port": 0}
    stack = named_stack(arguments)
    if stack is None:
        return {"port": 0}
    return {
        "port": stack.port,
        "redis_url": stack.redis_url,
        "redis_prefix": stack.redis_prefix,
        "served_model_name": stack.model,
    }


def _names_redis(arguments: argparse.Namespace) -> bool:
    return bool(_STACK_FIELDS & vars(arguments).keys()) or any(map(os.environ.get, _STACK_VARIABLES))


async def _drain(config: RouterConfig, arguments: argparse.Namespace) -> int:
    registry = Registry(config.redis_url, config.redis_prefix)
    try:
        if not await registry.mark_draining(config.model_name, arguments.worker, draining=not arguments.undo):
            known = ", ".join(w.worker_id for w in await registry.list_workers(config.model_name)) or "none"
            print(
                f"kvrelay drain: no worker {arguments.worker} serves {config.model_name}; there are: {known}",
                file=sys.stderr,
            )
            return 1
        if arguments.undo:
            print(f"{arguments.worker} takes new requests again")
            return 0
        print(f"{arguments.worker} drains: routers send it nothing new")
        return 0 if arguments.wait is None else await _wait(registry, config.model_name, arguments)
    finally:
        await registry.close()


async def _wait(registry: Registry, model: str, arguments: argparse.Namespace) -> int:
    deadline = time.monotonic() + arguments.wait
    num_open: float | None = None
    while True:
        worker = await _find(registry, model, arguments.worker)
        if worker is None:
            print(f"{arguments.worker} has left the fleet")
            return 0
        # Idle twice in a row, because a report may be older than the last request sent to the worker.
        if num_open == 0 and worker.load.get("open") == 0:
            print(f"{arguments.worker} is idle and can be stopped")
            return 0
        num_open = worker.load.get("open")
        if time.monotonic() >= deadline:
            has = "does not say what it has" if num_open is None else f"still has {num_open:g} requests"
            print(f"kvrelay drain: {arguments.worker} {has}", file=sys.stderr)
            return 1
        await asyncio.sleep(POLL_S)


async def _find(registry: Registry, model: str, worker_id: str) -> WorkerRecord | None:
    workers = await registry.list_workers(model)
    return next((worker for worker in workers if worker.worker_id == worker_id), None)
