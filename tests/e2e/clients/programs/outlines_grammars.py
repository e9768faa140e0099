"""outlines: its clients of vLLM, SGLang and OpenAI with expressions, schemas and grammars. Asserts what it gets."""

import json
import re
import sys
from typing import Any, Literal

import outlines
from openai import OpenAI
from outlines import grammars
from outlines.types import CFG, JsonSchema, Regex
from pydantic import BaseModel, ConfigDict, Field

ARITHMETIC = """
?start: sum
sum: product ("+" product)~0..2
product: NUMBER ("*" NUMBER)~0..2
NUMBER: /[1-9][0-9]{0,2}/
"""
TERM = r"[1-9][0-9]{0,2}(\*[1-9][0-9]{0,2}){0,2}"
LEGS = r"[1-9] legs, (none|some) webbed"
FLAGS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=9)
    kind: Literal["mammal", "bird"]
    legs: int = Field(ge=0, le=99)


def check(model: Any, output_type: Any, fits: Any, max_tokens: int = 1000) -> None:
    """With enough tokens for all the whitespace that JSON may have."""
    for seed in range(2):
        asked = {"max_tokens": max_tokens, "seed": seed}
        text = model("How many legs has an otter?", output_type, **asked)
        assert text == "".join(model.stream("How many legs has an otter?", output_type, **asked)), text
        assert fits(text), text


client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
of_vllm, of_sglang, of_openai = (
    make(client, sys.argv[2]) for make in (outlines.from_vllm, outlines.from_sglang, outlines.from_openai)
)
for model in (of_vllm, of_sglang, of_openai):
    check(model, Animal, Animal.model_validate_json)
for model in (of_vllm, of_sglang):
    check(model, Regex(LEGS), lambda text: re.fullmatch(LEGS, text))
    check(model, Literal["four", "none"], lambda text: text in ("four", "none"))
    check(model, CFG(ARITHMETIC), lambda text: re.fullmatch(rf"{TERM}(\+{TERM}){{0,2}}", text))
    # One of the library's own, with names that it imports. The output may be cut.
    check(model, CFG(grammars.arithmetic), lambda text: re.fullmatch(r"[-+*/()0-9.eE \t]+", text), max_tokens=30)
# The library does not send an empty pattern.
with_tabs = JsonSchema(FLAGS, whitespace_pattern="\t?")
check(of_vllm, with_tabs, lambda text: text.replace("\t", "") == json.dumps(json.loads(text), separators=(",", ":")))
print("done")
