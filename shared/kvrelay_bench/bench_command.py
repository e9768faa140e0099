"""`kvrelay bench`: the command and the order of its measurements."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.flag_parser import CommandFailed, no_answer
from kvrelay.process import event_loop_factory
from kvrelay_bench.flags import BenchPlan, bench_parser, read_flags
from kvrelay_bench.http import BadUrl, Client, ConnectionLost
from kvrelay_bench.load_figures import LoadFigures, Ratio, figures
from kvrelay_bench.load_generator import LoadOutcome, LoadPoint, run_load
from kvrelay_bench.report import compared, comparison_table, load_table, remarks, report_console, value_of
from kvrelay_bench.traces import BadTrace
from kvrelay_bench.workload import Ask

__all__ = ["bench", "bench_parser"]

MODELS_TIMEOUT_S = 10.0
FORMAT_VERSION = 1
INTERRUPTED = 130


@dataclass(slots=True)
class Measured:
    """Figures of one load on one endpoint in one round."""

    point: str
    endpoint: str
    round: int
    figures: LoadFigures
    outcome: LoadOutcome = field(repr=False)

    def as_json(self, *, with_requests: bool) -> dict[str, Any]:
        """The figures as JSON types."""
        content: dict[str, Any] = {"load": self.point, "endpoint": self.endpoint, "round": self.round}
        content["is_partial"] = self.outcome.is_partial
        content["figures"] = self.figures.as_json()
        if with_requests:
            content["requests"] = [asdict(record) for record in self.outcome.records]
        return content


def bench(argv: Sequence[str]) -> int:
    """Returns the exit status: 0; 1 if no request of a load succeeded; 130 after Ctrl-C. Raises CommandFailed."""
    if any(flag == "--workload" or flag.startswith("--workload=") for flag in argv):
        return _bench_programs(argv)
    try:
        plan = read_flags(argv, os.environ)
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            load = Bench(plan)
            results = runner.run(load.run())
    except (BadTrace, BadUrl) as error:
        raise CommandFailed(str(error), 2) from None
    except KeyboardInterrupt:
        return INTERRUPTED
    if load.is_interrupted:
        print(f"kvrelay bench: interrupted{'' if results else ' before the first load'}", file=sys.stderr)
    if results:
        _tell(plan, results)
    if load.is_interrupted:
        return INTERRUPTED
    return 0 if all(each.figures.num_failed < each.figures.num_requests for each in results) else 1


def _bench_programs(argv: Sequence[str]) -> int:
    try:
        from kvrelay_bench import program_bench
    except ModuleNotFoundError as error:  # httpx, of an extra
        install = f"{sys.executable} -m pip install {error.name}"
        raise CommandFailed(f"--workload needs {error.name}: {install}", 2) from None
    return program_bench.main(argv)


class Bench:
    """Runs a plan: warm-up, then each load on each endpoint in turn."""

    def __init__(self, plan: BenchPlan) -> None:
        self._plan = plan
        self._clients = {name: Client(endpoint) for name, endpoint in plan.endpoints.items()}
        self._models: dict[str, str] = {}
        self.is_interrupted = False

    async def run(self) -> list[Measured]:
        """Runs all rounds. Cancelled during a load it returns what has been measured. Raises CommandFailed."""
        try:
            for name, client in self._clients.items():
                self._models[name] = self._plan.model or await _first_model(client)
                await self._warm_up(name, client)
            results: list[Measured] = []
            for number in range(self._plan.rounds):
                for point in self._plan.points(number):
                    for name in self._order(number):
                        if self.is_interrupted:
                            return results
                        if measured := await self._measure(name, point, number):
                            results.append(measured)
            return results
        finally:
            for client in self._clients.values():
                await client.close()

    def _order(self, number: int) -> list[str]:
        """The order of endpoints, which alternates between rounds."""
        names = list(self._clients)
        return names if number % 2 == 0 else names[::-1]

    async def _warm_up(self, name: str, client: Client) -> None:
        if not self._plan.warm_up:
            return
        point = LoadPoint("warm-up", self._plan.warm_up, concurrency=4)
        outcome = await self._run(name, client, point, f"{name}: warm-up")
        if self.is_interrupted:
            return
        errors = [record.error for record in outcome.records if record.error]
        if len(errors) == len(outcome.records):
            raise CommandFailed(f"{client.endpoint.url}: no warm-up request succeeded; first error: {errors[0]}")

    async def _measure(self, name: str, point: LoadPoint, number: int) -> Measured | None:
        """None if no request of the load has ended."""
        title = f"{name}: {point.name}" + (f", round {number + 1}" if self._plan.rounds > 1 else "")
        outcome = await self._run(name, self._clients[name], point, title)
        if not outcome.records:
            return None
        return Measured(point.name, name, number, figures(outcome, self._plan.slo), outcome)

    async def _run(self, name: str, client: Client, point: LoadPoint, title: str) -> LoadOutcome:
        with _progress(title, len(point.asks)) as on_end:
            bodies = [self._body(name, client, ask) for ask in point.asks]
            outcome = await run_load(client, point, bodies, self._plan.timeout_s, on_end, keeps_partial=True)
        self.is_interrupted = self.is_interrupted or outcome.is_partial
        return outcome

    def _body(self, name: str, client: Client, ask: Ask) -> bytes:
        wire = self._plan.wire
        # Both URLs may lead to one server, so the second endpoint must get other prompts than the first.
        salt = list(self._clients).index(name)
        path = "chat/completions" if wire.api == "chat" else "completions"
        return client.request("POST", client.endpoint.path(path), wire.body(self._models[name], ask, salt))


async def _first_model(client: Client) -> str:
    """The first model name of /v1/models. Raises CommandFailed."""
    try:
        answer = orjson.loads(await client.get("models", MODELS_TIMEOUT_S))
        return str(answer["data"][0]["id"])
    except (OSError, TimeoutError, ConnectionLost) as error:
        raise CommandFailed(no_answer(client.endpoint.url, error)) from error
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise CommandFailed(f"{client.endpoint.url} lists no model at /v1/models: give --model, or a key") from error


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar if standard error is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda ended: bar.update(task, completed=ended)


def _tell(plan: BenchPlan, results: Sequence[Measured]) -> None:
    console = report_console()
    comparing = len(plan.endpoints) > 1
    named = [(_label(each, plan), each.figures) for each in results]
    if not comparing:
        console.print(load_table(named, plan.slo))
    comparisons: dict[str, dict[str, Any]] = {}
    if comparing:
        for name, endpoint in plan.endpoints.items():
            console.print(f"{name}: {endpoint.url}", highlight=False)
        for point in dict.fromkeys(each.point for each in results):
            a, b = _whole_rounds(results, point, list(plan.endpoints))
            if a:
                console.print(comparison_table(point, a, b, plan.slo))
                comparisons[point] = {figure: _ratio(a, b, path) for figure, path in compared(plan.slo).items()}
    for line in remarks(named):
        console.print(f"- {line}", highlight=False, markup=False)
    if plan.json_path is not None:
        content = {
            "version": FORMAT_VERSION,
            "flags": plan.printable,
            "loads": [each.as_json(with_requests=plan.with_requests) for each in results],
            **({"ratios_b_over_a": comparisons} if comparing else {}),
        }
        plan.json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _whole_rounds(
    results: Sequence[Measured], point: str, endpoints: Sequence[str]
) -> tuple[list[LoadFigures], list[LoadFigures]]:
    """The figures of a load on two endpoints in the rounds that both of them have completed."""
    a, b = (
        {each.round: each.figures for each in results if (each.point, each.endpoint) == (point, side)}
        for side in endpoints
    )
    partial = {each.round for each in results if each.outcome.is_partial and each.point == point}
    rounds = sorted((a.keys() & b.keys()) - partial)
    return [a[number] for number in rounds], [b[number] for number in rounds]


def _label(measured: Measured, plan: BenchPlan) -> str:
    parts = [measured.point]
    if len(plan.endpoints) > 1:
        parts.insert(0, measured.endpoint)
    if plan.rounds > 1:
        parts.append(f"round {measured.round + 1}")
    if measured.outcome.is_partial:
        parts.append("interrupted")
    return ", ".join(parts)


def _ratio(a: Sequence[LoadFigures], b: Sequence[LoadFigures], path: str) -> dict[str, float | None]:
    ratio = Ratio.of([(value_of(one, path), value_of(other, path)) for one, other in zip(a, b, strict=True)])
    return {name: None if value != value else value for name, value in asdict(ratio).items()}
