"""Structural tags: free text in which certain strings begin a part that follows a JSON schema.

vLLM's and SGLang's form: `{"type": "structural_tag", "structures": [{"begin": ..., "schema": {...}, "end": ...}],
"triggers": [...]}`. Where the text contains a trigger, it must go on with the `begin` of a structure that starts with
that trigger, then a value of its schema, then its `end`. For the newer form see `tag_format.py`.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import StructTag

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.grammar.schema_rewrite import rewritten
from kvrelay.grammar.tag_format import tag_format_to_lark


def structural_tag_to_lark(text: str, whitespace: str | None = None) -> str:
    """The tag, given as JSON in either form, as a Lark grammar. `whitespace` limits the whitespace of the JSON in the
    newer form. Raises GrammarError."""
    try:
        tag = json.loads(text)
        if isinstance(tag, dict) and "format" in tag:
            return tag_format_to_lark(tag["format"], whitespace)
        triggers = [_string(trigger, "triggers") for trigger in tag["triggers"]]
        tags = [_structure(structure, triggers) for structure in tag["structures"]]
    except KeyError as error:
        raise GrammarError(f"a structural tag needs {error.args[0]!r}") from None
    except GrammarError:
        raise
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise GrammarError(f"malformed structural tag: {error}") from None
    if not tags:
        raise GrammarError("a structural tag needs at least one structure")
    return str(StructTag.to_grammar(tags, assume_special=False))


def rewritten_tag(text: str) -> str | None:
    """A tag of the newer form with its schemas `rewritten`. None if no rule changes any of them."""
    try:
        tag = json.loads(text)
        num_changed = _rewrite_schemas(tag.get("format"))
    except (AttributeError, ValueError, RecursionError):
        return None
    return json.dumps(tag) if num_changed else None


def _rewrite_schemas(tag_format: Any) -> int:
    if isinstance(tag_format, list):
        return sum(_rewrite_schemas(each) for each in tag_format)
    if not isinstance(tag_format, dict):
        return 0
    if tag_format.get("type") != "json_schema":
        return sum(_rewrite_schemas(each) for each in tag_format.values())
    changed = rewritten(json.dumps(tag_format.get("json_schema")))
    if changed is None:
        return 0
    tag_format["json_schema"] = json.loads(changed)
    return 1


def _structure(structure: dict[str, Any], triggers: list[str]) -> StructTag:
    begin, end = _string(structure["begin"], "begin"), _string(structure["end"], "end")
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise GrammarError(f"no trigger is the beginning of {begin!r}")
    if not isinstance(structure["schema"], dict):
        raise TypeError("schema must be objects")
    return StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=end)


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be strings")
    return value
