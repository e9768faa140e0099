"""Regexes and grammars of clients in the library's notation."""

from __future__ import annotations

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from kvrelay.grammar.grammar_compiler import GrammarError

MAX_ERROR_CHARS = 1000
_ASCII_CLASSES = "dw"
"""Of \\d and \\w, as in JSON schemas: a model of random weights would find the digits of every script."""


def lark_of_regex(pattern: str) -> str:
    return str(regex_to_lark(pattern, _ASCII_CLASSES))


def lark_of_grammar(text: str, what: str) -> str:
    """The grammar, in Lark's notation or in GBNF, as Lark. `what`: its name in the GrammarError that this raises."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the library raises plain exceptions here
        raise GrammarError(shortened(f"{what} is neither in Lark's notation nor in GBNF: {error}")) from None


def shortened(message: str) -> str:
    return message if len(message) <= MAX_ERROR_CHARS else message[:MAX_ERROR_CHARS] + " ..."
