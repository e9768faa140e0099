"""Time of a `select` by its number of choices, behind a prefix that is cached."""

from __future__ import annotations

import random
from statistics import median

from benchmarks.programs.cpu_time import cpu_s
from kvrelay_programs import Endpoint, State, gen, program, select
from kvrelay_programs.workloads.sentences import sentence, text
from tests.fakes.stack import Stack

NUM_CHOICES = (1, 2, 4, 16, 64)
LONG_WORDS, SHORT_WORDS = 12, 4


@program
def begin(s: State, prefix: str) -> None:
    """Has the prefix cached."""
    s += prefix + gen("begin", 1)


@program
def choose(s: State, prefix: str, choices: list[str]) -> None:
    s += prefix + select("chosen", choices)


def lines(stack: Stack, repeats: int = 7) -> list[str]:
    """A table: one choice of 12 words, and others of 4 words beside it. Medians."""
    endpoint = Endpoint(stack.base_url, model=stack.model)
    found: dict[int, list[tuple[float, float]]] = {number: [] for number in NUM_CHOICES}
    for repeat in range(-1, repeats):
        draw = random.Random(repeat)
        for number in NUM_CHOICES:
            prefix = text(draw, 600)
            longest = f" {sentence(draw, LONG_WORDS)}"
            others = [f" {number:02} {sentence(draw, SHORT_WORDS)}" for number in range(number - 1)]
            begin.run(prefix=prefix, endpoint=endpoint, sampling={"temperature": 0})
            cpu_before_s = cpu_s(stack)
            state = choose.run(prefix=prefix, choices=[longest, *others], endpoint=endpoint)
            if repeat >= 0:  # the first one is for code that runs for the first time
                found[number].append((state.elapsed_s or 0.0, cpu_s(stack) - cpu_before_s))
    alone = [median(values) for values in zip(*found[1], strict=True)]
    rows = []
    for number, measured in found.items():
        wall_s, used_s = (median(values) for values in zip(*measured, strict=True))
        wall, used = f"{1e3 * wall_s:.0f} | {wall_s / alone[0]:.2f}", f"{1e3 * used_s:.0f} | {used_s / alone[1]:.2f}"
        rows.append(f"| {number} | {wall} | {used} |")
    head = "| choices | ms | over the longest alone | CPU ms | over the longest alone |"
    return [head, "|---:|---:|---:|---:|---:|", *rows]
