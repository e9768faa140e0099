"""What a compiler of grammars has to do, whichever library it uses."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.grammar import llguidance_compiler
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError, TokenMask
from kvrelay.grammar.llguidance_compiler import MAX_COMPILED, LLGuidanceCompiler
from kvrelay.protocol.sampling import Grammar, GrammarKind
from tests.fakes.hostile_grammars import TOO_AMBIGUOUS

TOKENIZER_JSON = (Path(__file__).parents[3] / "models" / "demo" / "tokenizer.json").read_text(encoding="utf-8")
AMBIGUOUS = Grammar(kind=GrammarKind.GRAMMAR, text=TOO_AMBIGUOUS)
TOKENIZER = tokenizers.Tokenizer.from_str(TOKENIZER_JSON)
VOCAB_SIZE = TOKENIZER.get_vocab_size() + 40  # models pad their vocabularies
END = 2
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return LLGuidanceCompiler(TOKENIZER_JSON, VOCAB_SIZE, [END])


def allowed(mask: TokenMask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(compiler: GrammarCompiler, grammar: Grammar, seed: int) -> str | None:
    """The text of a random walk through the allowed tokens. None: it did not end."""
    chooser, matcher = random.Random(seed), compiler.compile(grammar)
    output: list[int] = []
    mask = np.zeros(compiler.mask_words, np.int32)
    for _ in range(MAX_TOKENS):
        matcher.fill(mask)
        token = chooser.choice(allowed(mask))
        assert token < VOCAB_SIZE
        if token == END:
            return str(TOKENIZER.decode(output, skip_special_tokens=False))
        matcher.accept([token])
        output.append(token)
    return None


def schema_of(**properties: Any) -> Grammar:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


@given(seed=st.integers(0, 2**32))
def test_objects_follow_their_schema(compiler: GrammarCompiler, seed: int) -> None:
    grammar = schema_of(
        kind={"enum": ["otter", 'a "quoted" one', "ötter"]},
        size={"type": "integer", "minimum": 3, "maximum": 120},
        tags={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        more={"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
    )
    text = walk(compiler, grammar, seed)
    assert text is not None  # whitespace between tokens is bounded
    found = json.loads(text)
    assert [*found] == ["kind", "size", "tags", "more"]
    assert found["kind"] in ("otter", 'a "quoted" one', "ötter") and 3 <= found["size"] <= 120
    assert 1 <= len(found["tags"]) <= 3 and {type(tag) for tag in found["tags"]} == {bool}
    assert found["more"] is None or len(found["more"]) <= 4


PATTERNS = [r"\d{3}-\d{4}", r"(ab|cd)+e?", r"[^a-z ]{1,8}", r"x?", "\\w/\n"]
LARK = 'start: "a" rest\nrest: /[0-9]{2}/ | "b"'
GBNF = 'root ::= "a" rest\nrest ::= [0-9] [0-9] | "b"'
MARKED = [LARK.replace("start:", head) for head in ("?start:", "!start:", "?start :", "!?start:", "start.2:")]


@pytest.mark.parametrize("text", [LARK, GBNF, *MARKED[:4], "// a comment\n\n" + MARKED[0]])
def test_grammars_in_both_notations(compiler: GrammarCompiler, text: str) -> None:
    for seed in range(10):
        assert re.fullmatch(r"a(\d\d|b)", walk(compiler, Grammar(kind=GrammarKind.GRAMMAR, text=text), seed) or "")


SPACED = [
    *('{"a": true}', '{ "a":  true }', '{\n    "a": true\n}', '{\r\n\t\t"a": true}', '{\n"a":\n true}'),
    '{"a": true}',
]
UNBOUNDED = [
    '{"a":   true}',
    '{\n\n"a": true}',
    '{"a" \n: true}',
    '{"a":\n' + " " * 65 + "true}",
    '{"a":\ttrue}',
    '{"a":true}\n',
]


@pytest.mark.parametrize("is_tag", [False, True])
def test_whitespace_between_the_tokens_of_json_is_bounded(compiler: GrammarCompiler, is_tag: bool) -> None:
    schema = schema_of(a={"type": "boolean"})
    tag = {"format": {"type": "json_schema", "json_schema": json.loads(schema.text)}}
    grammar = Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps(tag)) if is_tag else schema
    for text in SPACED:
        assert allows(compiler, grammar, text), text
    for text in UNBOUNDED:
        assert not allows(compiler, grammar, text), text
    free = Grammar(kind=grammar.kind, text=grammar.text, whitespace=r"[ \t\r\n]*")
    for text in [*SPACED, *UNBOUNDED[:-1]]:
        assert allows(compiler, free, text), text


def allows(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    matcher = compiler.compile(grammar)
    try:
        matcher.accept([*TOKENIZER.encode(text, add_special_tokens=False).ids, END])
    except GrammarError:
        return False
    return True


def test_whitespace_between_the_tokens_of_json_can_be_ruled_out(compiler: GrammarCompiler) -> None:
    grammar = schema_of(a={"type": "boolean"}, b={"type": "null"})
    compact = Grammar(kind=grammar.kind, text=grammar.text, whitespace="")
    assert walk(compiler, compact, 1) in ('{"a":true,"b":null}', '{"a":false,"b":null}')


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "otter"}', "otter"),
        (GrammarKind.JSON_SCHEMA, "{", "no JSON"),
        (GrammarKind.JSON_SCHEMA, '{"not": {"pattern": "a"}}', "not"),
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.JSON_SCHEMA, '{"multipleOf": 1e300}', "multipleOf"),
        (GrammarKind.JSON_SCHEMA, f'{{"multipleOf": {10**400}}}', "out of range"),
        (GrammarKind.JSON_SCHEMA, '{"multipleOf": NaN}', "no JSON"),
        (GrammarKind.JSON_SCHEMA, '{"not": {"required": ["a"]}, "allOf": 5}', "not"),
        (GrammarKind.JSON_SCHEMA, "false", "no output satisfies it"),
        (GrammarKind.GRAMMAR, "start: other", "other"),
        (GrammarKind.GRAMMAR, "", "'root'"),
        (GrammarKind.STRUCTURAL_TAG, "7", "structural tag"),
        (GrammarKind.STRUCTURAL_TAG, '{"triggers": ["<"]}', "format"),
    ],
)
def test_what_is_wrong_is_named(compiler: GrammarCompiler, kind: GrammarKind, text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        compiler.compile(Grammar(kind=kind, text=text))


@pytest.mark.parametrize(
    ("kind", "text"), [(GrammarKind.REGEX, r"[^\s\S]"), (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}')]
)
def test_a_grammar_that_nothing_satisfies_is_named_without_the_matcher_s_state(
    compiler: GrammarCompiler, kind: GrammarKind, text: str
) -> None:
    with pytest.raises(GrammarError, match=r"^no output satisfies it$"):
        compiler.compile(Grammar(kind=kind, text=text)).fill(np.zeros(compiler.mask_words, np.int32))


def test_a_grammar_that_takes_too_much_work_is_named_without_the_matcher_s_state(compiler: GrammarCompiler) -> None:
    matcher, mask = compiler.compile(AMBIGUOUS), np.zeros(compiler.mask_words, np.int32)
    (token_id,) = TOKENIZER.encode("a", add_special_tokens=False).ids

    def follow() -> None:
        for _ in range(30):
            matcher.fill(mask)
            matcher.accept([token_id])

    with pytest.raises(GrammarError, match="items") as failed:
        follow()
    assert "<state>" not in str(failed.value)


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"x":' * depth + "{}" + "}}" * depth


WORDS = "words and more " * 6000
PRODUCT = [{"anyOf": [{"properties": {f"{row}-{at}": {"type": "null"}}} for at in range(4)]} for row in range(10)]
HOSTILE = {
    "depth": (GrammarKind.JSON_SCHEMA, nested(2000)),
    "backtracking": (GrammarKind.REGEX, "(a+)+(a|aa)*(.*.*)*b{1000}"),
    "many states": (GrammarKind.REGEX, "(.*a.{15}){3}"),
    "references": (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    "circle": (GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}'),
    "brackets": (GrammarKind.GRAMMAR, "start: " + "(" * 3000),
    "doubling": (
        GrammarKind.GRAMMAR,
        "start: r0\n" + "".join(f"r{each}: r{each + 1} r{each + 1}\n" for each in range(2000)) + 'r2000: "a"',
    ),
    "choices": (GrammarKind.CHOICE, json.dumps([f"{number}" * 20 for number in range(10_000)])),
    "enum": (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [*range(15_000)]})),
    "const": (GrammarKind.JSON_SCHEMA, json.dumps({"const": WORDS})),
    "combinations": (GrammarKind.JSON_SCHEMA, json.dumps({"allOf": PRODUCT})),
    "exclusive": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"oneOf": [{"required": [f"a{each}", f"b{each}"]} for each in range(16)]}),
    ),
    "structures": (
        GrammarKind.STRUCTURAL_TAG,
        json.dumps(
            {
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<"],
                    "tags": [
                        {"begin": f"<{n}", "content": {"type": "json_schema", "json_schema": {}}, "end": ""}
                        for n in range(999)
                    ],
                }
            }
        ),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_followed(compiler: GrammarCompiler, name: str) -> None:
    """Neither crashes nor runs for long: the library's limits end the work."""
    kind, text = HOSTILE[name]
    with contextlib.suppress(GrammarError):
        walk(compiler, Grammar(kind=kind, text=text), 0)


def test_the_latest_grammars_are_kept_compiled(compiler: GrammarCompiler) -> None:
    grammars = [Grammar(kind=GrammarKind.REGEX, text=f"a{{{number}}}") for number in range(1, MAX_COMPILED + 20)]
    for grammar in [*grammars, *reversed(grammars)]:
        mask = np.zeros(compiler.mask_words, np.int32)
        compiler.compile(grammar).fill(mask)
        assert allowed(mask)


def test_a_model_without_an_end_or_a_tokenizer_cannot_be_constrained() -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        LLGuidanceCompiler(TOKENIZER_JSON, VOCAB_SIZE, [])
    with pytest.raises(GrammarError, match="tokenizer"):
        LLGuidanceCompiler("{}", VOCAB_SIZE, [END])


def test_a_long_forced_run_is_tokenized_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks within the run and the parts of it that are jumped over come from the first tokenization."""
    matcher, mask = compiler.compile(Grammar(kind=GrammarKind.CHOICE, text=json.dumps([WORDS]))), no_mask(compiler)
    run = list(matcher.forced())
    library = matcher._matcher  # type: ignore[attr-defined]
    monkeypatch.setattr(matcher, "_matcher", OnlyConsumes(library))
    at = 0
    while at < len(run) - 70:
        matcher.fill(mask)
        assert allowed(mask) == [run[at]]
        assert list(matcher.forced()) == run[at:]
        matcher.accept(run[at : at + 64])
        at += 64
        matcher.accept([run[at]])
        at += 1
    monkeypatch.setattr(matcher, "_matcher", library)
    matcher.accept(run[at:])
    matcher.fill(mask)
    assert allowed(mask) == [END]
    assert TOKENIZER.decode(run) == WORDS


class OnlyConsumes:
    def __init__(self, matcher: Any) -> None:
        self.consume_tokens, self.is_error = matcher.consume_tokens, matcher.is_error


def no_mask(compiler: GrammarCompiler) -> TokenMask:
    return np.zeros(compiler.mask_words, np.int32)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (True, None),
        ({"type": "string", "format": "byte", "maxLength": 40}, None),
        ({"type": ["string", "null"], "not": {"type": "string"}}, [None]),
        ({"enum": ["a", "b", 7], "not": {"const": "a"}}, ["b", 7]),
        ({"enum": [1, 2, 3], "if": {"enum": [2, 3]}, "then": {"const": 3}}, [1, 3]),
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "$defs": {
                    "cat": {"properties": {"is": {"const": "cat"}}, "required": ["is"], "additionalProperties": False}
                    | {"type": "object"},
                    "dog": {"properties": {"is": {"const": "dog"}}, "required": ["is"], "additionalProperties": False}
                    | {"type": "object"},
                },
            },
            [{"is": "cat"}, {"is": "dog"}],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"const": 1}, "b": {"const": 2}},
                "dependentRequired": {"a": ["b"]},
                "unevaluatedProperties": False,
            },
            [{}, {"b": 2}, {"a": 1, "b": 2}],
        ),
        (
            {
                "type": "object",
                "properties": {"land": {"enum": ["X", "Y"]}, "zip": {"enum": [1, 2]}},
                "required": ["land", "zip"],
                "additionalProperties": False,
                "if": {"properties": {"land": {"const": "X"}}, "required": ["land"]},
                "then": {"properties": {"zip": {"const": 1}}},
                "else": {"properties": {"zip": {"const": 2}}},
            },
            [{"land": "X", "zip": 1}, {"land": "Y", "zip": 2}],
        ),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_schemas_that_are_rewritten_give_all_of_their_values(
    compiler: GrammarCompiler, schema: Any, values: list[Any] | None
) -> None:
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), whitespace="")
    texts = [walk(compiler, grammar, seed) for seed in range(40)]
    found = [json.loads(text) for text in texts if text is not None]
    assert found and all(jsonschema.Draft202012Validator(schema).is_valid(each) for each in found)
    if values is not None:
        assert {json.dumps(each, sort_keys=True) for each in found} == {json.dumps(each) for each in values}


def test_large_grammars_are_kept_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = LLGuidanceCompiler(TOKENIZER_JSON, VOCAB_SIZE, [END])
    grammars = [
        Grammar(kind=GrammarKind.CHOICE, text=json.dumps([f"{number} {choice}" for choice in range(300)]))
        for number in range(8)
    ]
    each = llguidance_compiler._estimated_bytes(grammars[0])
    monkeypatch.setattr(llguidance_compiler, "MAX_COMPILED_BYTES", 3 * each + each // 2)
    for grammar in [*grammars, grammars[-1]]:
        compiler.compile(grammar)
    assert [compiler.knows(grammar) for grammar in grammars] == [False] * 5 + [True] * 3
    assert compiler._compiled_bytes == 3 * each
    monkeypatch.setattr(llguidance_compiler, "MAX_COMPILED_BYTES", 1)
    compiler.compile(grammars[0])
    assert [compiler.knows(grammar) for grammar in grammars] == [True] + [False] * 7
