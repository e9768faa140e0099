"""Structural tags in the newer form: which texts they allow."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.sampling import Grammar, GrammarKind
from tests.unit.grammar.test_llguidance_compiler import END, TOKENIZER_JSON

TOKENIZER = tokenizers.Tokenizer.from_str(TOKENIZER_JSON)
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
CALL = {"begin": "<f=a>", "content": NUMBER, "end": "</f>"}
OTHER = {"begin": "<f=b>", "content": {"type": "any_text"}, "end": "</f>"}
CALLS = {"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL, OTHER]}
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
SEPARATED = {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ", "}


@pytest.fixture(scope="module")
def compiler() -> LLGuidanceCompiler:
    return LLGuidanceCompiler(TOKENIZER_JSON, TOKENIZER.get_vocab_size(), [END])


def allows(compiler: LLGuidanceCompiler, tag_format: Any, text: str) -> bool:
    tag = json.dumps({"type": "structural_tag", "format": tag_format})
    matcher = compiler.compile(Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=tag))
    try:
        matcher.accept([*TOKENIZER.encode(text, add_special_tokens=False).ids, END])
    except GrammarError:
        return False
    return True


CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "const_string", "value": 'a "b"'}, ['a "b"'], ["a", 'a "b" ']),
    (NUMBER, ["12"], ["x", ""]),
    ({"type": "json_schema", "json_schema": True}, ["12", "[]"], ["x"]),
    ({"type": "regex", "pattern": r"a/\d+\/\\"}, ["a/12/\\"], ["a/x/\\"]),
    ({"type": "regex", "pattern": "a\nb"}, ["a\nb"], ["ab"]),
    ({"type": "grammar", "grammar": 'root ::= "a" | "b"'}, ["a", "b"], ["ab"]),
    ({"type": "any_text"}, ["", "anything\nat all"], []),
    (THINK, ["<think></think>", "<think>a </thin b</think>"], ["<think>a", "<think>a</think> b"]),
    (
        {"type": "sequence", "elements": [THINK, NUMBER, {"type": "any_text"}]},
        ["<think>so</think>7", "<think>so</think>7 and more"],
        ["7", "<think>so</think>x"],
    ),
    ({"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "none"}]}, ["7", "none"], ["7none"]),
    (CALLS, ["", "free text", "a <f=a>7</f> b <f=b>x</f>", "<f=a>7</f>"], ["a <f=c>", "<f=a>x</f>", "a <f=a>7"]),
    (CALLS | {"at_least_one": True}, ["<f=a>7</f>", "a <f=a>7</f> b"], ["", "free text"]),
    (CALLS | {"stop_after_first": True}, ["free text", "a <f=a>7</f>"], ["<f=a>7</f> b", "<f=a>7</f><f=a>7</f>"]),
    (CALLS | {"stop_after_first": True, "at_least_one": True}, ["a <f=a>7</f>"], ["free text", "<f=a>7</f> b"]),
    (
        {"type": "tag", "begin": "<all>", "content": CALLS, "end": "</all>"},
        ["<all></all>", "<all>a <f=a>7</f> b</all>"],
        ["<all>a <f=c></all>", "<all>a</all> b"],
    ),
    (SEPARATED, ["", "<f=a>7</f>", "<f=a>7</f>, <f=b>x, y</f>"], ["x", "<f=a>7</f><f=a>7</f>", "<f=a>7</f>, "]),
    (SEPARATED | {"at_least_one": True}, ["<f=a>7</f>"], [""]),
    (SEPARATED | {"stop_after_first": True}, ["", "<f=a>7</f>"], ["<f=a>7</f>, <f=a>7</f>"]),
]


@pytest.mark.parametrize(("tag_format", "good", "bad"), CASES, ids=[json.dumps(case[0])[:60] for case in CASES])
def test_a_format_allows_its_texts_alone(
    compiler: LLGuidanceCompiler, tag_format: Any, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not allows(compiler, tag_format, text)] == []
    assert [text for text in bad if allows(compiler, tag_format, text)] == []


def nested(depth: int) -> Any:
    return NUMBER if not depth else {"type": "or", "elements": [nested(depth - 1)]}


@pytest.mark.parametrize(
    ("tag_format", "reason"),
    [
        (7, "must be an object"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "'qwen_xml_parameter'"),
        ({"type": "const_string"}, "'const_string'"),
        ({"type": "or", "elements": []}, "'or'"),
        ({"type": "tag", "begin": "a", "end": "b"}, "'content'"),
        (CALLS | {"triggers": ["<g"]}, "no trigger"),
        (CALLS | {"excludes": ["x"]}, "'excludes'"),
        ({"type": "grammar", "grammar": "("}, "neither"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, NUMBER]}, "last element"),
        ({"type": "sequence", "elements": [THINK | {"end": ""}, NUMBER]}, "last element"),
        ({"type": "sequence", "elements": [SEPARATED | {"tags": [OTHER | {"end": ""}]}, NUMBER]}, "last element"),
        (nested(40), "16 deep"),
        ({"type": "or", "elements": [NUMBER] * 5000}, "4096 formats"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_followed_is_refused(compiler: LLGuidanceCompiler, tag_format: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        allows(compiler, tag_format, "x")
