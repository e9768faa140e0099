"""Time of a `select` by its number of choices, behind a prefix that is cached: one long choice, and shorter ones."""

from __future__ import annotations

import random
from statistics import median

from benchmarks.programs.cpu_time import cpu_s
from kvrelay_programs import Endpoint, State, gen, program, select
from kvrelay_programs.workloads import sentence, text
from tests.fakes.stack import Stack

NUM_CHOICES = (1, 2, 4, 16, 64)
LONG_WORDS = 12
SHORT_WORDS = (4, 1)


@program
def begin(s: State, prefix: str) -> None:
    """Has the prefix cached."""
    s += prefix + gen("begin", 1)


@program
def choose(s: State, prefix: str, choices: list[str]) -> None:
    s += prefix + select("chosen", choices)


def lines(stack: Stack, repeats: int = 7) -> list[str]:
    """A table: one choice of 12 words, and others of 4 words or of one beside it. Medians."""
    endpoint = Endpoint(stack.base_url, model=stack.model)
    rows = [
        "| words of others | choices | tokens computed | ms | over the longest alone | CPU ms | over that alone |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for num_words in SHORT_WORDS:
        found = _measured(stack, endpoint, num_words, repeats)
        _, alone_s, alone_cpu_s = found[1]
        for number, (num_tokens, wall_s, used_s) in found.items():
            wall, used = (
                f"{1e3 * wall_s:.0f} | {wall_s / alone_s:.2f}",
                f"{1e3 * used_s:.0f} | {used_s / alone_cpu_s:.2f}",
            )
            rows.append(f"| {num_words} | {number} | {num_tokens:.0f} | {wall} | {used} |")
    return rows


def _measured(stack: Stack, endpoint: Endpoint, num_words: int, repeats: int) -> dict[int, tuple[float, float, float]]:
    """By number of choices: prompt tokens that were not cached, seconds, and seconds of CPU time. Medians."""
    found: dict[int, list[tuple[float, float, float]]] = {number: [] for number in NUM_CHOICES}
    for repeat in range(-1, repeats):
        draw = random.Random(f"{num_words} {repeat}")
        for number in NUM_CHOICES:
            prefix = text(draw, 600)
            longest = f" {sentence(draw, LONG_WORDS)}"
            others = [f" {number:02} {sentence(draw, num_words)}" for number in range(number - 1)]
            begin.run(prefix=prefix, endpoint=endpoint, sampling={"temperature": 0})
            cpu_before_s = cpu_s(stack)
            state = choose.run(prefix=prefix, choices=[longest, *others], endpoint=endpoint)
            if repeat >= 0:  # the first one is for code that runs for the first time
                num_tokens = state.usage.prompt_tokens - state.usage.cached_tokens
                found[number].append((num_tokens, state.elapsed_s or 0.0, cpu_s(stack) - cpu_before_s))
    medians = {number: tuple(map(median, zip(*values, strict=True))) for number, values in found.items()}
    return {number: (values[0], values[1], values[2]) for number, values in medians.items()}
