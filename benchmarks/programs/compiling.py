"""A program with long instructions in each of its forks, interpreted and compiled.

The graph of the compiled program says that all forks begin with the instructions, which are then computed once, with
the prefix of the fork. The batch's common beginning is computed first, too.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

from benchmarks.peers.order import turns
from benchmarks.programs.calls import KeptCalls, best_possible_hits, tokenized
from benchmarks.programs.cpu_time import cpu_s
from kvrelay_programs import State, gen, program
from kvrelay_programs.workloads.sentences import text
from tests.fakes.stack import Stack

VARIANTS = ("no fork hint", "interpreted", "compiled")
CRITERIA = ("clarity", "order", "evidence", "tone", "length", "style")
HEAD = (
    "| run | programs/s | latency, s | CPU s per program | hit rate | of the best | same text |",
    "|---|---:|---:|---:|---:|---:|---:|",
)


@program
def judged(s: State, task: str, essay: str, rules: str) -> None:
    s += f"{task}\nEssay: {essay}\n"
    parts = s.fork(len(CRITERIA))
    for part, criterion in zip(parts, CRITERIA, strict=True):
        part += f"{rules}\nJudged by its {criterion}:" + gen("judgement", 16)
    parts.join(append=True)


def lines(stack: Stack, tokenizer: Any, num_programs: int, concurrency: int, rounds: int) -> list[str]:
    """A table of medians over the rounds, in which the variants take turns with equal texts and caches apart."""
    endpoint = KeptCalls(stack.base_url, stack.model)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in VARIANTS}
    texts: dict[str, list[str]] = {name: [] for name in VARIANTS}
    for number, order in enumerate(turns(VARIANTS, rounds + 1, "abba", 0)):
        arguments = _arguments(number, num_programs)
        for name in order:
            endpoint.salt = f"{name} {number}"
            before_s, begin = cpu_s(stack), time.perf_counter()
            states = judged.run_batch(
                arguments,
                endpoint=endpoint,
                sampling={"temperature": 0},
                num_threads=concurrency,
                progress=False,
                fork_hint=name != "no fork hint",
                compiled=name == "compiled",
            )
            seconds, used_s = time.perf_counter() - begin, cpu_s(stack) - before_s
            calls = tokenized(endpoint.take_calls(), tokenizer)
            if not number:  # for code that runs for the first time
                continue
            hits = sum(state.usage.cached_tokens for state in states)
            asked = sum(state.usage.prompt_tokens for state in states)
            latency_s = median(state.elapsed_s or 0.0 for state in states)
            shares = hits / asked, hits / best_possible_hits(calls)
            found[name].append((num_programs / seconds, latency_s, used_s / num_programs, *shares))
            texts[name] += [state.text() for state in states]
    return [*HEAD, *(_row(name, found[name], texts) for name in VARIANTS)]


def _row(name: str, outcomes: list[tuple[float, ...]], texts: dict[str, list[str]]) -> str:
    rate, latency_s, used_s, hit_rate, share = (median(values) for values in zip(*outcomes, strict=True))
    same = sum(one == other for one, other in zip(texts[name], texts["interpreted"], strict=True))
    return (
        f"| {name} | {rate:.2f} | {latency_s:.3f} | {used_s:.2f} | {hit_rate:.3f} | {share:.3f} "
        f"| {same} of {len(texts[name])} |"
    )


def _arguments(number: int, num_programs: int) -> list[dict[str, str]]:
    draw = random.Random(number)
    shared = {"task": text(draw, 60), "rules": text(draw, 150)}
    return [{**shared, "essay": text(draw, 150)} for _ in range(num_programs)]
