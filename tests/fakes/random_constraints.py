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
GRAMMARS = (
    ('root ::= "(" inner ")"\ninner ::= [a-c]{2,20}', r"\([a-c]{2,20}\)"),
    ('root ::= item (", " item){1,9}\nitem ::= "otter" | "a heron" | [0-9]+', "ITEM(, ITEM){1,9}"),
    ('start: pair (";" pair)*\npair: KEY "=" /[0-9]{1,3}/\nKEY: "width" | "height"', "PAIR(;PAIR)*"),
)
"""In both notations, each with a regex for the same texts."""
_FIELDS = {
    "guided_regex", "guided_choice", "guided_grammar", "structural_tag", "response_format", "structured_outputs"
}  # fmt: skip
_PARTS = {"ITEM": "(otter|a heron|[0-9]+)", "PAIR": "((width|height)=[0-9]{1,3})"}
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


def random_tag(rng: random.Random) -> dict[str, Any]:
    """A structural tag: a value between two strings, or free text in which each "e" begins a value."""
    schema = random_schema(rng, 1)
    if rng.random() < 0.6:
        content = {"type": "json_schema", "json_schema": schema}
        return {"format": {"type": "tag", "begin": "<value>", "content": content, "end": "</value>"}}
    return {"triggers": ["e"], "structures": [{"begin": "e=", "schema": schema, "end": ";"}]}


def random_constraint(rng: random.Random) -> dict[str, Any]:
    """Fields of a request: mostly a schema, else a regex, choices, a grammar or a structural tag."""
    chance = rng.random()
    if chance < 0.08:
        return {"guided_regex": rng.choice(REGEXES)}
    if chance < 0.16:
        return {"guided_choice": rng.sample(CHOICES, rng.randint(1, len(CHOICES)))}
    if chance < 0.26:
        return {"guided_grammar": rng.choice(GRAMMARS)[0]}
    if chance < 0.36:
        return {"structural_tag": random_tag(rng)}
    schema = random_schema(rng, 3)
    if chance < 0.5:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}}
    return {"structured_outputs": {"json": schema, "whitespace_pattern": rng.choice(["", "", " ?"])}}


def constrain(body: dict[str, Any], rng: random.Random) -> None:
    """Constrains the output of a request, half of them with drafts. It loses its stop strings, which may end a text
    anywhere."""
    body.pop("stop", None)
    body |= random_constraint(rng) | {"max_tokens": rng.choice([5, 60, 200, 400])}
    if rng.random() < 0.5:
        body["speculation"] = rng.choice(["ngram", "suffix"])


def is_constrained(body: dict[str, Any]) -> bool:
    return not body.keys().isdisjoint(_FIELDS)


def check_constraint(body: dict[str, Any], text: str) -> None:
    """Raises AssertionError, or an error of `json` or `jsonschema`, if a complete output breaks the constraint."""
    if "guided_regex" in body:
        assert re.fullmatch(body["guided_regex"], text, re.ASCII), (body, text)
    elif "guided_choice" in body:
        assert text in body["guided_choice"], (body, text)
    elif "guided_grammar" in body:
        pattern = dict(GRAMMARS)[body["guided_grammar"]]
        for name, part in _PARTS.items():
            pattern = pattern.replace(name, part)
        assert re.fullmatch(pattern, text, re.ASCII), (body, text)
    elif "structural_tag" in body:
        _check_tag(body["structural_tag"], text)
    elif "response_format" in body:
        jsonschema.validate(json.loads(text), body["response_format"]["json_schema"]["schema"])
    else:
        jsonschema.validate(json.loads(text), body["structured_outputs"]["json"])


def _check_tag(tag: dict[str, Any], text: str) -> None:
    if "format" in tag:
        begin, schema, end = tag["format"]["begin"], tag["format"]["content"]["json_schema"], tag["format"]["end"]
        assert text.startswith(begin) and text.endswith(end), (tag, text)
        jsonschema.validate(json.loads(text[len(begin) : -len(end)]), schema)
        return
    (structure,), (trigger,) = tag["structures"], tag["triggers"]
    begin, end = structure["begin"], structure["end"]
    at = text.find(trigger)
    while at >= 0:
        assert text.startswith(begin, at), (tag, text)
        at += len(begin)
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
        value, at = json.JSONDecoder().raw_decode(text, at)
        jsonschema.validate(value, structure["schema"])
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
        assert text.startswith(end, at), (tag, text)
        at = text.find(trigger, at + len(end))
