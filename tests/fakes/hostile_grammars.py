"""Fields of requests: grammars that nobody can follow, or that take seconds to compile."""

from __future__ import annotations

import json
from typing import Any

ENDLESS: dict[str, dict[str, Any]] = {
    "properties by many patterns": {
        "guided_json": {"patternProperties": {f"^p{number}[a-z]+$": {} for number in range(2000)}}
    },
    "a string that matches many patterns": {
        "guided_json": {"allOf": [{"type": "string", "pattern": f".*a{number}.{{9}}"} for number in range(200)]}
    },
    "a multiple of several numbers": {
        "guided_json": {"allOf": [{"type": "integer", "multipleOf": each} for each in (9973, 9967, 9949, 9941)]}
    },
    "many multiples": {
        "guided_json": {
            "type": "object",
            "properties": {f"p{number}": {"type": "integer", "multipleOf": 9000 + number} for number in range(900)},
            "required": [f"p{number}" for number in range(900)],
        }
    },
    "a large multiple": {"guided_json": {"type": "integer", "multipleOf": 9_999_991}},
    "optional characters": {"guided_regex": "(a?){9999}a{9999}"},
    "repetitions within terminals": {"guided_grammar": 'start: A\nA: B{199}\nB: C{199}\nC: D{199}\nD: "a"'},
    "a chain of rules": {
        "guided_grammar": "\n".join(f'r{each} ::= "a" [a-z]+ r{each + 1}' for each in range(4000))
        + '\nr4000 ::= "x"\nroot ::= r0'
    },
}
"""Each takes more than two seconds of CPU time without a limit."""

REFUSED: dict[str, dict[str, Any]] = {
    "a schema of a megabyte": {"guided_json": {"const": "x" * (1 << 20)}},
    "a regex of a megabyte": {"guided_regex": "a|" * (1 << 19)},
    "deep": {"guided_json": json.dumps({"type": "object"}).join(['{"items":' * 9000, "}" * 9000])},
    "a circle": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}},
    "combinations": {
        "guided_json": {"allOf": [{"anyOf": [{"required": [f"{n} {k}"]} for k in range(9)]} for n in range(9)]}
    },
    "repetitions": {"guided_regex": "((((a{99}){99}){99}){99}){99}"},
    "brackets": {"guided_grammar": "start: " + "(" * 3000},
    "brackets of GBNF": {"guided_grammar": "root ::= " + "(" * 50_000},
    "an unclosed class": {"guided_regex": "[" * 10_000},
    "too many choices": {"guided_choice": [str(number) for number in range(20_000)]},
    "deep tags": {"structural_tag": '{"format":' + '{"type":"or","elements":[' * 500 + "]}" * 500 + "}"},
}
"""Each is found wrong before it is compiled, or soon."""

HEAVY: dict[str, dict[str, Any]] = {
    "values": {"guided_json": {"enum": [*range(5000)]}},
    "states": {"guided_regex": "(a+)+(a|aa)*(.*.*)*b{1000}(.*a.{15}){3}"},
    "ambiguous": {"guided_grammar": 'start: s\ns: s s s | s s | "a"?'},
}
"""Each is followed, or refused where a machine is slow."""

TOO_AMBIGUOUS = f'start: s\ns: {" | ".join(" ".join("s" * count) for count in range(2, 40))} | "a"'
"""Compiles, and takes too much work after some tokens."""
