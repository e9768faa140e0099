"""The same programs by this frontend and by SGLang's, against the same server, in turns."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.peers.order import turns
from benchmarks.programs.cpu_time import cpu_s
from kvrelay_programs import Endpoint, Program, State, gen, program
from kvrelay_programs.workloads import find_workload
from tests.fakes.stack import Stack

SCRIPT = Path(__file__).with_name("sglang_frontend.py")
OURS, THEIRS = "kvrelay_programs", "sglang"


@program
def judge(s: State, essay: str) -> None:
    """The workload without its last step: SGLang's OpenAI backend selects by tokens of another vocabulary."""
    s += f"Essay: {essay}\n"
    dimensions = ("clarity", "order", "evidence", "tone")
    parts = s.fork(len(dimensions))
    for part, dimension in zip(parts, dimensions, strict=True):
        part += f"Judged by its {dimension}:" + gen("judgement", 64)
    parts.join(append=True)
    s += "\nSummary:" + gen("summary", 48)


PROGRAMS: Mapping[str, Program] = {
    "few-shot-20": find_workload("few-shot-20").program,
    "skeleton-of-thought": find_workload("skeleton-of-thought").program,
    "judge": judge,
    "rag": find_workload("rag").program,
}


@contextmanager
def other_frontend(python: str, stack: Stack) -> Iterator[subprocess.Popen[str]]:
    """The process of `sglang_frontend.py`."""
    command = [python, str(SCRIPT), stack.base_url, stack.model]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lines(python: str, stack: Stack, num_programs: int, concurrency: int, rounds: int) -> list[str]:
    """A table. In each round both frontends run programs of the same lengths in turns. A mark at the beginning of each
    text keeps their caches apart. CPU: that of server and client."""
    endpoint = Endpoint(stack.base_url, model=stack.model)
    with other_frontend(python, stack) as process:
        versus = _Versus(stack, endpoint, process, rounds)
        rows = [
            versus.row(name, count, at_once)
            for name in PROGRAMS
            for at_once, count in ((concurrency, num_programs), (1, min(3, num_programs)))
        ]
    head = "| program | at once | programs/s | of SGLang's frontend | ratio | its CPU time over ours | same text |"
    return [head, "|---|---:|---:|---:|---:|---:|---:|", *rows]


@dataclass(frozen=True, slots=True)
class _Versus:
    stack: Stack
    endpoint: Endpoint
    process: subprocess.Popen[str]
    rounds: int

    def row(self, name: str, count: int, at_once: int) -> str:
        draw = find_workload(name).draw
        rates: dict[str, list[float]] = {OURS: [], THEIRS: []}
        used: dict[str, list[float]] = {OURS: [], THEIRS: []}
        for number, order in enumerate(turns([OURS, THEIRS], self.rounds + 1, "abba", 0)):
            for frontend in order:
                arguments = _marked(draw(count, 100 * at_once + number), f"{frontend[:1]}{number} ")
                before_s = self._used_s()
                seconds, _ = self._run(frontend, name, arguments, at_once)
                if number:  # the first round is for connections and code that runs for the first time
                    rates[frontend].append(count / seconds)
                    used[frontend].append(self._used_s() - before_s)
        shared = draw(count, 7)
        texts = [self._run(frontend, name, shared, at_once)[1] for frontend in (OURS, THEIRS)]
        num_same = sum(one == other for one, other in zip(*texts, strict=True))
        ratios = [ours / theirs for ours, theirs in zip(rates[OURS], rates[THEIRS], strict=True)]
        cpu = median(theirs / ours for ours, theirs in zip(used[OURS], used[THEIRS], strict=True))
        return (
            f"| {name} | {at_once} | {median(rates[OURS]):.2f} | {median(rates[THEIRS]):.2f} "
            f"| {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {cpu:.2f} | {num_same} of {count} |"
        )

    def _run(
        self, frontend: str, name: str, arguments: Sequence[Mapping[str, Any]], at_once: int
    ) -> tuple[float, list[str]]:
        """Seconds, and the text of each program."""
        if frontend == THEIRS:
            answer = _ask(self.process, {"program": name, "arguments": list(arguments), "num_threads": at_once})
            return answer["seconds"], answer["texts"]
        begin = time.perf_counter()
        states = PROGRAMS[name].run_batch(
            arguments, endpoint=self.endpoint, sampling={"temperature": 0}, num_threads=at_once, progress=False
        )
        return time.perf_counter() - begin, [state.text() for state in states]

    def _used_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return cpu_s(self.stack) + float(times.user + times.system)


def _marked(arguments: Sequence[Mapping[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Texts of their own for each frontend: the first argument, with which a prompt begins, has another beginning."""
    marked = []
    for each in arguments:
        first = next(iter(each))
        marked.append({**each, first: f"{mark}{each[first]}"})
    return marked


def _ask(process: subprocess.Popen[str], request: Mapping[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("the other frontend has ended; its error is above")
    answer: dict[str, Any] = json.loads(line)
    return answer
