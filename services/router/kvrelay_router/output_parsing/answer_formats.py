"""A client's constraint of the answer as a format of a structural tag, so that more can stand around it."""

from __future__ import annotations

import json
from typing import Any

from kvrelay.protocol.grammar import Grammar, GrammarKind
from kvrelay_router.output_parsing.grammar_formats import Format, json_value, tag


def format_of(grammar: Grammar) -> Format:
    """The grammar must have been compiled, so it is well-formed. Whitespace is set for the whole tag."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return json_value(json.loads(grammar.text))
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
        case GrammarKind.CHOICE:
            choices = " | ".join(map(json.dumps, json.loads(grammar.text)))
            return {"type": "grammar", "grammar": f"start: CHOICE\nCHOICE: {choices}"}
        case GrammarKind.GRAMMAR:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            written = json.loads(grammar.text)
            return written["format"] if "format" in written else _triggered(written)


def _triggered(written: dict[str, Any]) -> Format:
    tags = [tag(each["begin"], json_value(each["schema"]), each["end"]) for each in written["structures"]]
    return {"type": "triggered_tags", "triggers": written["triggers"], "tags": tags}
