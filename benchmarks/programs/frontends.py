"""The same programs by this frontend and by SGLang's, against the same server, in turns."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.order import turns
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
    """A table. Each round has new texts, and both frontends have the same in turns, with caches apart by a prefix."""
    endpoint = Endpoint(stack.base_url, model=stack.model)
    rows = []
    with other_frontend(python, stack) as process:
        for name, each in PROGRAMS.items():
            for at_once, count in ((concurrency, num_programs), (1, 3)):
                rows.append(_row(name, each, endpoint, process, count, at_once, rounds))
    head = "| program | at once | programs/s | of SGLang's frontend | ratio | same text |"
    return [head, "|---|---:|---:|---:|---:|---:|", *rows]


def _row(
    name: str,
    each: Program,
    endpoint: Endpoint,
    process: subprocess.Popen[str],
    count: int,
    at_once: int,
    rounds: int,
) -> str:
    rates: dict[str, list[float]] = {OURS: [], THEIRS: []}
    num_same = num_texts = 0
    for number, order in enumerate(turns([OURS, THEIRS], rounds + 1, "abba", 0)):
        texts = {}
        for frontend in order:
            arguments = _marked(find_workload(name).draw(count, 100 * at_once + number), f"{frontend[:1]}{number} ")
            if frontend == OURS:
                begin = time.perf_counter()
                states = each.run_batch(
                    arguments, endpoint=endpoint, sampling={"temperature": 0}, num_threads=at_once, progress=False
                )
                seconds, texts[frontend] = time.perf_counter() - begin, [state.text() for state in states]
            else:
                answer = _ask(process, {"program": name, "arguments": arguments, "num_threads": at_once})
                seconds, texts[frontend] = answer["seconds"], answer["texts"]
            if number:  # the first round is for connections and code that runs for the first time
                rates[frontend].append(count / seconds)
        if not number:
            shared = find_workload(name).draw(count, 7)
            states = each.run_batch(shared, endpoint=endpoint, sampling={"temperature": 0}, progress=False)
            others = _ask(process, {"program": name, "arguments": shared, "num_threads": at_once})["texts"]
            num_texts = count
            num_same = sum(state.text() == other for state, other in zip(states, others, strict=True))
    ratios = [ours / theirs for ours, theirs in zip(rates[OURS], rates[THEIRS], strict=True)]
    return (
        f"| {name} | {at_once} | {median(rates[OURS]):.2f} | {median(rates[THEIRS]):.2f} "
        f"| {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {num_same} of {num_texts} |"
    )


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
