"""Workers are killed while calls of strict tools with random schemas are written: each call is valid, and one whose
decode worker was killed in its middle is that of an undisturbed run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes.random_tools import check_call, strict_call
from tests.fakes.stack import Stack
from tests.fakes.waiting import wait_until
from tests.faults.storm.processes import usual_dtype
from tests.tiny_models import build_model

pytestmark = pytest.mark.timeout(3600)
NUM_AT_ONCE = 8
LEAST_KILLS = {"prefill": 2, "decode": 3}
ARRIVAL_S = 0.2
"""What a worker sent before it was stopped has arrived by then, or the call is one that another look finds finished."""
FLAGS = ("--threads", "1", "--tool-parser", "hermes", "--prefill", "2", "--decode", "2")


class CallSoFar(NamedTuple):
    request_id: str
    name: str
    arguments: str
    finish: str


def streamed_call(stack: Stack, body: dict[str, Any]) -> Iterator[CallSoFar]:
    """Yields the call after each event of its stream."""
    name, arguments = "", ""
    with stack.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, (body["seed"], event)
            (choice,) = event["choices"]
            for part in choice["delta"].get("tool_calls") or []:
                assert part["index"] == 0
                name += part["function"].get("name") or ""
                arguments += part["function"].get("arguments") or ""
            yield CallSoFar(answer.headers["x-request-id"], name, arguments, choice["finish_reason"] or "")


class Storm:
    """Calls that are written at a time, and what kills the workers under them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._begun: dict[str, int] = {}  # request ids of the calls whose arguments come from decode, with their seeds
        self._is_over = threading.Event()
        self.calls: dict[int, tuple[str, str]] = {}  # name and arguments by seed
        self.kills: Counter[str] = Counter()
        self.interrupted: dict[int, str] = {}  # request ids by seed

    def call(self, seed: int) -> None:
        body = strict_call(self._stack.model, seed)
        call, first = CallSoFar("", "", "", ""), ""
        try:
            for call in streamed_call(self._stack, body):
                first = first or call.arguments  # may come from prefill, with what the grammar forces before it
                if call.arguments != first and not call.finish:
                    self._begun[call.request_id] = seed
        finally:
            self._begun.pop(call.request_id, None)
        assert call.finish == "tool_calls", (seed, call)
        check_call(body, call.name, call.arguments)
        self.calls[seed] = call.name, call.arguments

    def run(self, num_calls: int) -> None:
        """Runs this many calls, and more until enough workers were killed."""
        seeds = itertools.count()
        killer = ThreadPoolExecutor(1).submit(self._kill_workers)

        def run_calls() -> None:
            for seed in seeds:
                if seed >= num_calls and (self._has_killed_enough() or killer.done()):
                    return
                self.call(seed)

        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            running = [pool.submit(run_calls) for _ in range(NUM_AT_ONCE)]
        self._is_over.set()
        for each in (*running, killer):
            each.result()

    def _has_killed_enough(self) -> bool:
        return all(self.kills[role] >= least for role, least in LEAST_KILLS.items())

    def _kill_workers(self) -> None:
        for role in itertools.cycle(["decode", "decode", "prefill"]):
            while not (self._all_are_ready() and (self._kill_decode() if role == "decode" else self._kill_prefill())):
                if self._is_over.wait(0.05):
                    return
            self.kills[role] += 1

    def _all_are_ready(self) -> bool:
        states = [worker["state"] for worker in self._stack.fleet()["workers"]]
        return len(self._stack.children()) == 5 and states == ["ready"] * 4

    def _kill_prefill(self) -> bool:
        if not self._begun:
            return False
        os.kill(self._stack.children()[f"prefill-{self.kills['prefill'] % 2}"], signal.SIGKILL)
        return True

    def _kill_decode(self) -> bool:
        """Kills the worker of a call in the middle of its arguments. It is stopped first, so the call cannot end."""
        fresh = [name for name, seed in list(self._begun.items()) if seed not in self.interrupted]
        if not fresh:
            return False
        newest = fresh[-1]
        worker = self._attempts(newest)[-1]["decode"]
        if worker is None:
            return False
        process_id = self._stack.children()[worker]
        os.kill(process_id, signal.SIGSTOP)
        time.sleep(ARRIVAL_S)
        seed = self._begun.get(newest)
        if seed is None or self._attempts(newest)[-1]["decode"] != worker or self._is_finished(newest):
            os.kill(process_id, signal.SIGCONT)
            return False
        os.kill(process_id, signal.SIGKILL)
        self.interrupted[seed] = newest
        return True

    def _record(self, request_id: str) -> dict[str, Any]:
        record: dict[str, Any] = self._stack.http.get(f"/requests/{request_id}").raise_for_status().json()
        return record

    def _attempts(self, request_id: str) -> list[dict[str, Any]]:
        (sequence,) = self._record(request_id)["sequences"]
        attempts: list[dict[str, Any]] = sequence["attempts"]
        return attempts

    def _is_finished(self, request_id: str) -> bool:
        return bool(self._record(request_id)["state"] != "running")

    def check_interrupted(self) -> None:
        """Each was tried again, and is the call that the same request makes without a kill."""
        wait_until(self._all_are_ready)
        for seed, request_id in self.interrupted.items():
            assert len(self._attempts(request_id)) > 1
            *_, whole = streamed_call(self._stack, strict_call(self._stack.model, seed))
            assert self.calls[seed] == (whole.name, whole.arguments)


@pytest.mark.parametrize("num_calls", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_call_is_valid_although_workers_are_killed(tmp_path: Path, num_calls: int) -> None:
    model = build_model("qwen3", tmp_path / "model")
    with Stack(model, tmp_path, "--dtype", usual_dtype(), *FLAGS, "--max-attempts", "10") as stack:
        storm = Storm(stack)
        storm.run(num_calls)
        assert set(storm.calls) >= set(range(num_calls))
        assert len(storm.interrupted) == storm.kills["decode"] >= LEAST_KILLS["decode"]
        storm.check_interrupted()
        stack.wait_until_clean()
    print(f"{len(storm.calls)} calls, kills {dict(storm.kills)}, {len(storm.interrupted)} in the middle of a call")
