"""`kvrelay drain WORKER`: routers send the worker nothing new; its requests continue."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from kvrelay.cli.stacks import NO_STACK, STATE_DIR, add_stack_flags, named_stack
from kvrelay.config.common import CommonConfig
from kvrelay.config.loader import add_config_flag, add_flags, resolve
from kvrelay.config.router import RouterConfig
from kvrelay.flag_parser import CommandFailed, FlagParser, number
from kvrelay.fleet import Registry, RegistryError

POLL_S = 1.0
_STACK_FIELDS = {"redis_url", "redis_prefix", "served_model_name", "model", "config"}
_STACK_VARIABLES = ("KVRELAY_REDIS_URL", "KVRELAY_CONFIG")


def drain(argv: Sequence[str]) -> int:
    """Marks the worker, and waits for it with `--wait`. Raises CommandFailed."""
    arguments = drain_parser().parse(argv)
    found = _of_stack(arguments)
    config = resolve(RouterConfig, {**vars(arguments), **found}, os.environ)
    if not config.uses_redis:
        raise CommandFailed(
            "redis_url is none, and workers are marked in Redis; without it, send the worker SIGTERM: it finishes what "
            "it has, for drain_timeout_s at most, and ends",
            2,
        )
    try:
        asyncio.run(_drain(config, arguments))
    except RegistryError as error:
        is_guessed = "redis_url" not in found and not _names_redis(arguments)
        hint = f"; {NO_STACK} {STATE_DIR}: name its --state-dir, or --redis" if is_guessed else ""
        raise CommandFailed(f"{str(error).rstrip('.')}{hint}") from None
    return 0


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
    """Fields of the stack of `kvrelay up` that is named, or that runs here if nothing names a Redis."""
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


async def _drain(config: RouterConfig, arguments: argparse.Namespace) -> None:
    registry = Registry(config.redis_url, config.redis_prefix)
    try:
        if not await registry.mark_draining(config.model_name, arguments.worker, draining=not arguments.undo):
            known = ", ".join(w.worker_id for w in await registry.list_workers(config.model_name)) or "none"
            raise CommandFailed(f"no worker {arguments.worker} serves {config.model_name}; there are: {known}")
        if arguments.undo:
            print(f"{arguments.worker} takes new requests again")
            return
        print(f"{arguments.worker} drains: routers send it nothing new")
        if arguments.wait is not None:
            await _wait(registry, config.model_name, arguments)
    finally:
        await registry.close()


async def _wait(registry: Registry, model: str, arguments: argparse.Namespace) -> None:
    deadline = time.monotonic() + arguments.wait
    num_open: float | None = None
    while True:
        workers = await registry.list_workers(model)
        worker = next((each for each in workers if each.worker_id == arguments.worker), None)
        if worker is None:
            print(f"{arguments.worker} has left the fleet")
            return
        # Idle twice in a row, because a report may be older than the last request sent to the worker.
        if num_open == 0 and worker.load.get("open") == 0:
            print(f"{arguments.worker} is idle and can be stopped")
            return
        num_open = worker.load.get("open")
        if time.monotonic() >= deadline:
            has = "does not say what it has" if num_open is None else f"still has {num_open:g} requests"
            raise CommandFailed(f"{arguments.worker} {has}")
        await asyncio.sleep(POLL_S)
