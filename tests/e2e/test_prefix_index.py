"""Requests go where their prefix is, over real processes, also for a router that has never sent anybody anything."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.slow  # six services start
SMALL = ("--dtype", "float32", "--threads", "1", "--token-budget", "256", "--max-running", "64", "--num-blocks", "600")
FLAGS = (*SMALL, "--prefill", "2", "--decode", "2", "--routing-policy", "prefix_only")
PROMPT = 320
BLOCK = 16


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 2048), k=PROMPT)


def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            if condition():
                return
        except (httpx.HTTPError, KeyError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(DEMO_MODEL, tmp_path_factory.mktemp("stack"), *FLAGS) as running:
        yield running


def ask(stack: Stack, prompt: list[int], **parameters: Any) -> tuple[str, str, int]:
    """The prefill and the decode worker that served it, and the prompt tokens that were cached."""
    body = {"model": stack.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = stack.http.post("/v1/completions", json=body | parameters)
    assert answer.status_code == 200, answer.text
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-kvrelay-prefill"], answer.headers["x-kvrelay-decode"], cached


def index_of(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = stack.fleet()["prefix_index"]
    return found


def is_whole(stack: Stack) -> bool:
    """The router's replica has what the workers' caches have."""
    fleet = stack.fleet()
    index, workers = fleet["prefix_index"], fleet["workers"]
    if index["state"] != "current" or index["ranges"] != len(workers) or index["retired_ranges"]:
        return False
    if any(worker["totals"]["index_pending"] or not worker["totals"]["index_open"] for worker in workers):
        return False
    return bool(index["held"] == sum(worker["blocks"]["cached"] for worker in workers) > 0)


def redis_pid(stack: Stack) -> int:
    return next(int(child.pid) for child in psutil.Process(stack.process.pid).children() if "redis" in child.name())


def restart_router(stack: Stack) -> None:
    """What it had sent to whom is forgotten with it; only the index knows."""
    old = stack.fleet()["router"]["incarnation"]
    os.kill(stack.children()["router"], signal.SIGKILL)
    until(lambda: bool(stack.fleet()["router"]["incarnation"] != old))
    until(lambda: stack.http.get("/ready").json().get("workers") == {"prefill": 2, "decode": 2})


def test_a_new_router_sends_a_prefix_where_it_is(stack: Stack) -> None:
    first = [ask(stack, prompt_of(seed)) for seed in range(6)]
    until(lambda: is_whole(stack))
    restart_router(stack)
    until(lambda: is_whole(stack))
    for seed, (prefill, decode, _) in reversed(list(enumerate(first))):
        again = ask(stack, [*prompt_of(seed), 7, 8, 9])
        assert again == (prefill, decode, PROMPT)
    assert len({workers[:2] for workers in first}) > 1


def test_salts_share_nothing(stack: Stack) -> None:
    prompt = prompt_of(100)
    ask(stack, prompt, cache_salt="a")
    until(lambda: is_whole(stack))
    assert ask(stack, prompt, cache_salt="b")[2] == 0
    assert ask(stack, prompt, cache_salt="a")[2] == (PROMPT - 1) // BLOCK * BLOCK


def test_the_index_heals_when_redis_comes_back_empty(stack: Stack) -> None:
    first = [ask(stack, prompt_of(seed)) for seed in range(200, 204)]
    until(lambda: is_whole(stack))
    held = index_of(stack)["held"]
    os.kill(redis_pid(stack), signal.SIGKILL)  # `kvrelay up` starts another one
    until(lambda: any(worker["totals"]["index_replacements"] for worker in stack.fleet()["workers"]))
    until(lambda: is_whole(stack))
    assert index_of(stack)["held"] == held
    restart_router(stack)
    until(lambda: is_whole(stack))
    for seed, (prefill, decode, _) in enumerate(first, 200):
        assert ask(stack, [*prompt_of(seed), 7])[:2] == (prefill, decode)
