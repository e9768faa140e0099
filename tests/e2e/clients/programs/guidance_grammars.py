"""guidance: its clients of vLLM and SGLang with expressions, schemas, choices and recursive grammars. Asserts what it
gets, and that the library's own parser finds its captures in it.

`gen(stop=...)` is left out: the parser of guidance 0.3.1 finds no capture in a text with its stop string, nor without.
"""

import json
import re
import sys
from typing import Any

import guidance
from guidance import assistant, gen, select, system, user
from guidance.models.experimental import SglangModel, VLLMModel

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["mammal", "bird"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


@guidance(stateless=True)
def nested(lm: Any) -> Any:
    """A rule that contains itself."""
    return lm + select([select(["otter", "heron"], name="animal"), "(" + nested() + ")"])


def ask(model: Any, *grammar: Any) -> Any:
    with system():
        lm = model + "You count legs."
    with user():
        lm += "How many legs has an otter?"
    with assistant():
        for part in grammar:
            lm += part
    return lm


for kind in (VLLMModel, SglangModel):
    server = {"model": sys.argv[2], "base_url": f"{sys.argv[1]}/v1", "api_key": "none", "echo": False}
    model = kind(**server)
    found = ask(model, gen("legs", regex="[1-9] legs", max_tokens=20))
    assert re.fullmatch("[1-9] legs", found["legs"]), found["legs"]
    found = ask(model, guidance.json("animal", schema=SCHEMA))
    animal = json.loads(found["animal"])
    assert animal["kind"] in ("mammal", "bird") and 0 <= animal["legs"] <= 99, animal
    found = ask(model, select(["four", "none"], name="number") + " of " + gen("what", regex="[a-z]{1,8}"))
    assert found["number"] in ("four", "none") and re.fullmatch("[a-z]{1,8}", found["what"]), str(found)
    # Characters of several tokens, whose texts the library joins.
    found = ask(model, gen("otters", regex="(🦦|カ){1,3}"))
    assert re.fullmatch("(🦦|カ){1,3}", found["otters"]), str(found)
    # The likeliest tokens alone: an unlucky model would open one bracket behind the other.
    found = ask(kind(**server, sampling_params={"top_k": 1}), nested())
    assert found["animal"] in ("otter", "heron"), str(found)
print("done")
