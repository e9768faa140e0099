"""Random constraints of the output, as fields of a request, and whether a text follows them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema

REGEXES = (
    r"\d{3}-\d{4}",
    "(yes|no){1,40}",
    "[^a-z ]{1,30}",
    r"(\w+ ){3,20}end",
    "always exactly these words, then [a-f]*",
)
CHOICES = ["yes", "no", "not now", "naïve 名", "a choice of many words that are forced"]


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are bounded."""
    low = rng.randint(-50, 50)
    leaves: list[dict[str, Any]] = [
        {"enum": rng.sample(["otter", "heron", "a heron", 7, None, True, "ot"], rng.randint(1, 4))},
        {"const": rng.choice(["always the same words", 12345, False])},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
        {"type": "string", "maxLength": rng.randint(0, 9)},
        {"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"},
        {"type": ["boolean", "null"]},
    ]
    kind = rng.choice(["leaf", "object", "array", "any"]) if depth else "leaf"
    if kind == "object":
        names = rng.sample(["customer_name", "is_available", "id", "naïve name", "名"], rng.randint(1, 4))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": rng.randint(0, 3)}
    if kind == "any":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return rng.choice(leaves)


def random_constraint(rng: random.Random) -> dict[str, Any]:
    """Fields of a request: mostly a schema, else a regex or choices."""
    chance = rng.random()
    if chance < 0.1:
        return {"guided_regex": rng.choice(REGEXES)}
    if chance < 0.2:
        return {"guided_choice": rng.sample(CHOICES, rng.randint(1, len(CHOICES)))}
    schema = random_schema(rng, 3)
    if chance < 0.4:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}}
    return {"structured_outputs": {"json": schema, "whitespace_pattern": rng.choice(["", "", " ?"])}}


def constrain(body: dict[str, Any], rng: random.Random) -> None:
    """Constrains the output of a request. It loses its stop strings, which may end a text anywhere."""
    body.pop("stop", None)
    body |= random_constraint(rng) | {"max_tokens": rng.choice([5, 60, 200, 400])}


def is_constrained(body: dict[str, Any]) -> bool:
    return not body.keys().isdisjoint({"guided_regex", "guided_choice", "response_format", "structured_outputs"})


def check_constraint(body: dict[str, Any], text: str) -> None:
    """Raises AssertionError, or an error of `json` or `jsonschema`, if a complete output breaks the constraint."""
    if "guided_regex" in body:
        assert re.fullmatch(body["guided_regex"], text, re.ASCII), (body, text)
    elif "guided_choice" in body:
        assert text in body["guided_choice"], (body, text)
    elif "response_format" in body:
        jsonschema.validate(json.loads(text), body["response_format"]["json_schema"]["schema"])
    else:
        jsonschema.validate(json.loads(text), body["structured_outputs"]["json"])
