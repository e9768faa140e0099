"""Time of a `select` by its number of choices, behind a prefix that is cached."""

from __future__ import annotations

import random
import time
from statistics import median

from kvrelay_programs import Endpoint, State, gen, program, select
from kvrelay_programs.workloads.sentences import sentence, text

NUM_CHOICES = (1, 2, 4, 16, 64)
LONG_WORDS, SHORT_WORDS = 12, 4


@program
def choose(s: State, prefix: str, choices: list[str]) -> float:
    """Returns the seconds of the selection."""
    s += prefix + gen("begin", 1)
    s.value("begin")
    begin = time.perf_counter()
    s += select("chosen", choices)
    s.value("chosen")
    return time.perf_counter() - begin


def lines(endpoint: Endpoint, repeats: int = 7) -> list[str]:
    """A table: one choice of 12 words, and others of 4 words beside it."""
    found: dict[int, list[float]] = {number: [] for number in NUM_CHOICES}
    for repeat in range(repeats):
        draw = random.Random(repeat)
        for number in NUM_CHOICES:
            prefix = text(draw, 600)
            longest = f" {sentence(draw, LONG_WORDS)}"
            others = [f" {number:02} {sentence(draw, SHORT_WORDS)}" for number in range(number - 1)]
            state = choose.run(
                prefix=prefix, choices=[longest, *others], endpoint=endpoint, sampling={"temperature": 0}
            )
            found[number].append(state.result)
    alone = median(found[1])
    rows = [f"| {number} | {1e3 * median(each):.0f} | {median(each) / alone:.2f} |" for number, each in found.items()]
    return ["| choices | ms | over the longest alone |", "|---:|---:|---:|", *rows]
