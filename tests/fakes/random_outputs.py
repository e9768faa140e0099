"""Random outputs of models that call tools: well-formed, mutated, odd and cut."""

from __future__ import annotations

import random
from typing import Any

from tests.fakes.call_families import SYNTAX, Call, Family

ODD: tuple[str, ...] = ("\\ud83e", "\\udda6", "NaN", "1e999", "'a' 'b'", "1 + 2", "#", "\\x4", "\0", "\u00a0", "0x1F")
ODD += ("{}", "()", "(1)", "9" * 25, "-0", "[" * 150, '"a": 1, "a": 2', "\ufffd", "\\u00e9", "</think>", "<think>")
VALUES: list[dict[str, Any]] = [
    {},
    {"city": "Zürich 🦦", "days": 3, "tags": ["a", {"b": [1.5, None, True]}], "note": None},
    {"city": "a \"b\" 'c' \\ \n {x} </tool_call> <tool_call>", "days": -2},
    {"city": "</function>\n</tool_call>", "note": "<arg_key>x</arg_key>"},
    {"days": 10**30, "tags": [[[[[0.1]]]], "\u2028"]},
]


def random_calls(rng: random.Random) -> list[Call]:
    return [(rng.choice(["weather", "now"]), rng.choice(VALUES)) for _ in range(rng.randint(1, 2))]


def mutated(rng: random.Random, family: Family, text: str) -> str:
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(text))
        cut = rng.choice([0, 0, 1, 1, 2, 5, 20])
        piece = rng.choice(["", rng.choice([*SYNTAX, *family.pieces, *ODD]), text[at : at + rng.randint(1, 30)]])
        text = text[:at] + piece + text[at + cut :]
    return text


def random_output(rng: random.Random, family: Family) -> str:
    text = family.calls(random_calls(rng))
    if rng.random() < 0.2:
        text = "".join(rng.choices([*SYNTAX, *family.pieces, *ODD], k=rng.randint(0, 20)))
    if rng.random() < 0.6:
        text = mutated(rng, family, text)
    return rng.choice(["", "", "So: ", "<think>Hm</think>\n"]) + text
