"""Runs servers in turns: start, warm-up, loads, stop. What fails is recorded, and the run goes on."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.peers.cases import FIGURES, PeerCase
from benchmarks.peers.machine import package_versions
from benchmarks.peers.results import Failure, Measurement, Result, Started
from benchmarks.peers.running_server import RunningServer, ServerFailed
from benchmarks.peers.servers import NotInstalled, Server
from kvrelay.process import event_loop_factory
from kvrelay_bench.http import BadUrl, Client, ConnectionLost, Endpoint
from kvrelay_bench.load_figures import BenchSlo, figures
from kvrelay_bench.load_generator import LoadOutcome, LoadPoint, run_load

MODELS_TIMEOUT_S = 30.0
PROMPT_TOLERANCE = 0.02
"""A larger difference between the prompts' tokens as sent and as the server counts them is noted."""

MakeServer = Callable[[Path], Server]
Report = Callable[[Result], None]


class TimeIsUp(Exception):
    """The time limit of the whole run."""


class LoadFailed(Exception):
    """No request of a load succeeded. The message has the first error."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`ends_at`: monotonic time at which the run ends. `request_s`: a request that takes longer has failed."""

    start_s: float
    request_s: float
    ends_at: float = math.inf

    @property
    def remaining_s(self) -> float:
        return self.ends_at - time.monotonic()


class Runner:
    """Measures a case. Calls `report` with each result as soon as there is one."""

    def __init__(self, case: PeerCase, servers: Mapping[str, MakeServer], limits: Limits, report: Report) -> None:
        self._case = case
        self._servers = servers
        self._limits = limits
        self._report = report
        self._longest_s: dict[str, float] = {}

    def run(self, rounds: Sequence[Sequence[str]]) -> bool:
        """Runs all rounds, each a sequence of names. Returns whether the time sufficed.

        A turn that would probably exceed the limit is not begun, so that a round has either all of a server or nothing.
        """
        for number, names in enumerate(rounds):
            for name in names:
                if self._limits.remaining_s < self._longest_s.get(name, 0.0):
                    self._fail(Failure(name, number, "left out: too little of the time limit remained"))
                    continue
                say(f"round {number + 1} of {len(rounds)}: {name}")
                began = time.monotonic()
                try:
                    self._take_turn(name, number)
                except TimeIsUp:
                    self._fail(Failure(name, number, "broken off by the time limit"))
                    return False
                except (NotInstalled, ServerFailed, LoadFailed, BadUrl, OSError) as error:
                    self._fail(Failure(name, number, str(error)))
                self._longest_s[name] = max(self._longest_s.get(name, 0.0), time.monotonic() - began)
        return True

    def _take_turn(self, name: str, number: int) -> None:
        with tempfile.TemporaryDirectory(prefix="kvrelay-peers-") as folder:
            server = self._servers[name](Path(folder))
            began = time.monotonic()
            start_s = min(self._limits.start_s, max(1.0, self._limits.remaining_s))
            with RunningServer(server, Path(folder), start_s):
                seconds = time.monotonic() - began
                say(f"  ready after {seconds:.1f} s")
                versions = package_versions(server.python, server.packages)
                self._report(Started(name, number, seconds, server.about, server.commands, versions))
                with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
                    runner.run(self._measure_server(server, number))

    async def _measure_server(self, server: Server, number: int) -> None:
        client = Client(Endpoint(server.url, os.environ.get("OPENAI_API_KEY", "")))
        try:
            model = server.model or await _first_model(client)
            warm_up = await self._load(client, server, model, self._case.warm_up())
            if all(record.error for record in warm_up.records):
                raise LoadFailed(f"no request of the warm-up succeeded: {warm_up.records[0].error}")
            for point in self._case.loads(number):
                load_average = os.getloadavg()[0]
                outcome = await self._load(client, server, model, point)
                self._take(server, number, point, outcome, load_average)
        finally:
            await client.close()

    async def _load(self, client: Client, server: Server, model: str, point: LoadPoint) -> LoadOutcome:
        path = client.endpoint.path("chat/completions" if server.wire.api == "chat" else "completions")
        bodies = [client.request("POST", path, server.wire.body(model, ask)) for ask in point.asks]
        remaining_s = self._limits.remaining_s
        try:
            async with asyncio.timeout(None if remaining_s == math.inf else remaining_s):
                return await run_load(client, point, bodies, self._limits.request_s, lambda _: None)
        except TimeoutError:
            raise TimeIsUp from None

    def _take(self, server: Server, number: int, point: LoadPoint, outcome: LoadOutcome, load_average: float) -> None:
        errors = [record.error for record in outcome.records if record.error]
        if len(errors) == len(outcome.records):
            self._fail(Failure(server.name, number, f"no request succeeded: {errors[0]}", point.name))
            return
        values = {key: value for key, value in self._case.values(point, outcome).items() if math.isfinite(value)}
        notes = [*figures(outcome, BenchSlo()).doubts, *([f"first error: {errors[0]}"] if errors else [])]
        notes += _prompt_note(point, outcome)
        self._report(
            Measurement(server.name, number, point.name, values, len(outcome.records), len(errors), load_average, notes)
        )
        shown = [
            f"{figure.title} {figure.scale * values[figure.key]:,.{figure.digits}f}"
            for figure in FIGURES[self._case.name]
            if figure.key in values
        ]
        say(f"  {point.name}: {'; '.join(shown)}" + (f"; {len(errors)} FAILED" if errors else ""))

    def _fail(self, failure: Failure) -> None:
        self._report(failure)
        say(f"  {failure.server}{f', {failure.load}' if failure.load else ''}: {failure.error}")


def say(text: str) -> None:
    """Shows progress on standard error."""
    print(text, file=sys.stderr, flush=True)


async def _first_model(client: Client) -> str:
    try:
        answer = orjson.loads(await client.get("models", MODELS_TIMEOUT_S))
        return str(answer["data"][0]["id"])
    except (OSError, TimeoutError, ConnectionLost, orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise LoadFailed(f"{client.endpoint.url}/v1/models names no model: {error!r}") from error


def _prompt_note(point: LoadPoint, outcome: LoadOutcome) -> list[str]:
    """Servers that take text count other tokens than were meant, which makes their figures incomparable."""
    counted = [
        (record.num_prompt, len(ask.prompt))
        for record, ask in zip(outcome.records, point.asks, strict=True)
        if record.num_prompt
    ]
    if not counted:
        return ["the server did not count prompt tokens"]
    factor = sum(server for server, _ in counted) / sum(sent for _, sent in counted)
    return [f"prompts have {factor:.2f} times the tokens"] if abs(factor - 1) > PROMPT_TOLERANCE else []
