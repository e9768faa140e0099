"""The grammar that a sequence's output has to follow."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvrelay.protocol.limits import Text


class GrammarKind(StrEnum):
    """The language of a `Grammar`'s text."""

    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings, one of which is the output
    GRAMMAR = "grammar"  # a grammar in Lark's notation, or in GBNF
    STRUCTURAL_TAG = "structural_tag"  # free text with tagged parts that follow schemas; see `structural_tag.py`


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint, as the client wrote it. The router has compiled it once, so workers know that it can be."""

    kind: GrammarKind
    text: Text
    whitespace: Text | None = None  # a regex for the whitespace between JSON's tokens; None: any
