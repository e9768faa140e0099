"""The fields that completions and chat completions share, with the names of OpenAI, vLLM and SGLang.

Those that constrain the output are converted to one `Grammar`, whatever their form. Several must mean the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema, WrapValidator

from kvrelay.excerpts import quoted
from kvrelay.grammar.schema_rewrite import closed
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.parsing import Flag, OrDefault, RequestModel, invalid, object_schema, or_null
from kvrelay.text.request.sampling_fields import SamplingFields, TokenIds

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CHOICE_STRINGS = 10_000
MAX_LOGPROB_TOKENS = 128
TOO_DEEP = "it is nested too deeply"

ANY_OBJECT = '{"type":"object"}'


def _not_zero(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):
        raise invalid("it must be 1 or more, or -1 for what fits")
    return value


def _side(value: Any, _: Any) -> Any:
    """Accepts None, "left" or "right" and reports one error; pydantic would report one for each literal."""
    if value in (None, "left", "right"):
        return value
    raise invalid("it must be 'left' or 'right'")


class StreamOptions(RequestModel):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False


_NOT_ZERO = {"type": "integer", "minimum": -1, "not": {"const": 0}}
_TEXT: dict[str, Any] = {"type": "string"}
_SCHEMA: tuple[dict[str, Any], ...] = ({"type": "object"}, _TEXT, {"const": True})
_CHOICE = {"type": "string", "minLength": 1}
_CHOICES: dict[str, Any] = {"type": "array", "items": _CHOICE, "maxItems": MAX_CHOICE_STRINGS}
_WHITESPACE = or_null({"type": "string", "maxLength": 1024})
_TYPES = ("text", "json_object", "json_schema", "json", "structural_tag", "regex", "grammar")
_FORMAT = object_schema({"type": {"enum": list(_TYPES)}}, "type")


def _described(*schemas: dict[str, Any]) -> WithJsonSchema:
    """The description of a constraint: of these schemas, or one of the values that front ends send for none."""
    nothing = [{"type": "null"}, {"const": False}, {"const": ""}, {"type": "array", "maxItems": 0, "items": {}}]
    return WithJsonSchema({"anyOf": [*schemas, *nothing]})


_STRUCTURED = object_schema(
    {
        **{name: {} for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")},
        "whitespace_pattern": _WHITESPACE,
        "disable_any_whitespace": or_null({"type": "boolean"}),
        "disable_additional_properties": or_null({"type": "boolean"}),
    }
)


class GenerationFields(SamplingFields):
    """The fields that completions and chat completions share."""

    model: str
    stream: Flag = False
    stream_options: StreamOptions | None = None
    no_stop_trim: Flag = False  # SGLang's name of `include_stop_str_in_output`
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False
    extra_key: Annotated[str, Field(max_length=1024), OrDefault("")] = ""
    user: Annotated[str, Field(max_length=1024), OrDefault("")] = ""
    logprob_token_ids: TokenIds = Field(default_factory=list, max_length=MAX_LOGPROB_TOKENS)
    truncate_prompt_tokens: (
        Annotated[int, BeforeValidator(_not_zero), Field(ge=-1), WithJsonSchema(_NOT_ZERO)] | None
    ) = None
    truncation_side: Annotated[Literal["left", "right"] | None, WrapValidator(_side)] = None
    response_format: Annotated[Any, _described(_FORMAT)] = None
    structured_outputs: Annotated[Any, _described(_STRUCTURED)] = None
    guided_json: Annotated[Any, _described(*_SCHEMA)] = None
    guided_regex: Annotated[Any, _described(_TEXT)] = None
    guided_choice: Annotated[Any, _described(_CHOICES)] = None
    guided_grammar: Annotated[Any, _described(_TEXT)] = None
    guided_json_object: Annotated[Any, _described({"const": True})] = None
    guided_whitespace_pattern: Annotated[Any, WithJsonSchema(_WHITESPACE)] = None
    whitespace_pattern: Annotated[Any, WithJsonSchema(_WHITESPACE)] = None  # sent by outlines' client for vLLM
    json_schema_text: Annotated[Any, _described(*_SCHEMA)] = Field(default=None, alias="json_schema")
    regex: Annotated[Any, _described(_TEXT)] = None
    ebnf: Annotated[Any, _described(_TEXT)] = None
    structural_tag: Annotated[Any, _described(_TEXT, {"type": "object"})] = None

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the output is constrained to, if anything. Raises ApiError for fields that are wrong in themselves;
        whether the grammar can be compiled is checked later."""
        options = _options(self.structured_outputs, self._whitespaces)
        read = {param: _READERS[param](value, param, options) for param, value in self._constraints.items()}
        return _only(read, lambda first, second: (second, f"'{first}' and '{second}'"))

    @property
    def grammar_param(self) -> str:
        """The field that constrains the output, for error messages."""
        return next(iter(self._constraints), "")

    @property
    def whitespace_param(self) -> str:
        """The field that gives the regex for the whitespace of JSON."""
        given = [name for name, value in self._whitespaces.items() if value is not None]
        return given[0] if given else "guided_whitespace_pattern"

    @property
    def _whitespaces(self) -> dict[str, Any]:
        """The fields for the whitespace of JSON. The first one that is set has precedence."""
        own = self.structured_outputs if isinstance(self.structured_outputs, dict) else {}
        return {
            "structured_outputs.whitespace_pattern": own.get("whitespace_pattern"),
            "guided_whitespace_pattern": self.guided_whitespace_pattern,
            "whitespace_pattern": self.whitespace_pattern,
        }

    @cached_property
    def _constraints(self) -> dict[str, Any]:
        if self.model_fields_set.isdisjoint(_GRAMMAR_FIELDS):
            return {}
        given = {name: value for name in _READERS if _is_set(value := self._value_of(name))}
        if len(given) > 1 and _has_only_options(given.get("structured_outputs")):
            del given["structured_outputs"]
        return given

    def _value_of(self, param: str) -> Any:
        """The value of a request's field. None if it constrains nothing."""
        if param == "json_schema":
            return self.json_schema_text
        value = getattr(self, param)
        return None if param == "response_format" and value == {"type": "text"} else value

    @property
    def keeps_stop_string(self) -> bool:
        return self.include_stop_str_in_output or self.no_stop_trim

    @property
    def salt(self) -> str:
        """Prompts share cached blocks only if it is equal: `cache_salt`, with SGLang's `extra_key` behind it."""
        if not self.extra_key:
            return self.cache_salt
        return f"{len(self.cache_salt)}:{self.cache_salt}{self.extra_key}"

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def running_usage(self) -> bool:
        """True if all other chunks carry the usage so far as well."""
        return self.stream_options is not None and self.include_usage and self.stream_options.continuous_usage_stats

    def truncated(self, token_ids: list[int], room: int) -> list[int]:
        """Returns the prompt cut to `truncate_prompt_tokens`; `room` is the longest prompt for the value -1."""
        wanted = self.truncate_prompt_tokens
        if wanted is None:
            return token_ids
        num_kept = max(1, room) if wanted == -1 else wanted
        if len(token_ids) <= num_kept:
            return token_ids
        return token_ids[:num_kept] if self.truncation_side == "right" else token_ids[-num_kept:]

    def check_together(self, *, wants_logprobs: bool, max_tokens: int | None) -> None:
        """Raises ApiError for fields that contradict each other, or that need others."""
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "it is only allowed when 'stream' is true")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "scores of a prompt cannot be streamed")
        if self.logprob_start_len is not None and self.prompt_logprobs is None:
            raise wrong("logprob_start_len", "it needs 'prompt_logprobs'")
        is_constrained = self.grammar is not None
        self.check_search(wants_logprobs=wants_logprobs, max_tokens=max_tokens, is_constrained=is_constrained)
        if self.logprob_token_ids and not wants_logprobs:
            raise wrong("logprob_token_ids", "it needs 'logprobs'")


class _Options(msgspec.Struct, frozen=True):
    """Of whichever constraint there is. `whitespace`: see `Grammar`. `is_closed`: objects have no properties but those
    that their schemas name."""

    whitespace: str | None = None
    is_closed: bool = False


def _options(structured_outputs: Any, whitespaces: dict[str, Any]) -> _Options:
    param = "structured_outputs"
    own = structured_outputs if isinstance(structured_outputs, dict) else {}
    given = [_whitespace(value, name) for name, value in whitespaces.items()]
    whitespace = next((each for each in given if each is not None), None)
    if _flag(own, "disable_any_whitespace", param) and whitespace is None:
        whitespace = ""
    return _Options(whitespace, is_closed=_flag(own, "disable_additional_properties", param))


def _only(read: dict[str, Grammar], named: Callable[[str, str], tuple[str, str]]) -> Grammar | None:
    """The one constraint, which may be given several times. `named`: for an error about two, its parameter and their
    names."""
    given = list(read.items())
    for (first, one), (second, other) in pairwise(given):
        if _meaning(one) != _meaning(other):
            param, names = named(first, second)
            raise wrong(param, f"{names} both constrain the output; give one of them")
    return given[0][1] if given else None


def _meaning(grammar: Grammar) -> Grammar:
    """The same for texts of JSON that differ in whitespace, and for choices in another order."""
    text = grammar.text
    with suppress(RecursionError):  # a deep schema is equal only to the same text
        if grammar.kind == GrammarKind.JSON_SCHEMA:
            text = json.dumps(json.loads(text))
        elif grammar.kind == GrammarKind.CHOICE:
            text = json.dumps(sorted(json.loads(text)))
    return msgspec.structs.replace(grammar, text=text)


def _of_response_format(value: Any, param: str, options: _Options) -> Grammar:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise wrong(param, "it must be an object with a type")
    kind = value["type"]
    is_json = kind in ("json", "json_object", "json_schema")
    if is_json and value.get("json_schema") is not None:
        return _of_described(value["json_schema"], f"{param}.json_schema", options)
    match kind:
        # TGI's types have a `value`, which is a schema with a name for `json_schema`.
        case "json_schema" if isinstance(value.get("value"), dict) and "schema" in value["value"]:
            return _of_schema(value["value"]["schema"], f"{param}.value.schema", options)
        case "json" | "json_object" | "json_schema" if value.get("value") is not None:
            return _of_schema(value["value"], f"{param}.value", options)
        case "json" | "json_object" | "json_schema" if value.get("schema") is not None:  # of llama.cpp's server
            return _of_schema(value["schema"], f"{param}.schema", options)
        case "json_object":
            return _of_schema(ANY_OBJECT, param, options)
        case "json" | "json_schema":
            raise wrong(f"{param}.json_schema", "it must be an object with a 'schema'")
        case "structural_tag":
            return _of_tag(value, param, options)
        case "regex" if isinstance(value.get("value"), str):  # of TGI
            return _of_regex(value["value"], f"{param}.value", options)
        case "grammar" | "regex" if isinstance(value.get(kind), str):
            return _READERS["guided_grammar" if kind == "grammar" else "regex"](value[kind], f"{param}.{kind}", options)
    known = "'text', 'json_object', 'json_schema', 'structural_tag', 'regex' and 'grammar'"
    raise wrong(f"{param}.type", f"{quoted(kind)} is unknown; known are {known}")


def _of_described(described: Any, param: str, options: _Options) -> Grammar:
    """OpenAI's form. Every schema is enforced; `strict` closes objects that do not say whether they are open."""
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        raise wrong(param, "it must be an object with a 'schema'")
    if not isinstance(described.get("name"), str):
        raise wrong(f"{param}.name", "it must be a string")
    if not isinstance(described.get("strict"), bool | None):
        raise wrong(f"{param}.strict", "it must be true or false")
    if described.get("strict"):
        options = msgspec.structs.replace(options, is_closed=True)
    return _of_schema(described["schema"], f"{param}.schema", options)


def _of_structured_outputs(value: Any, param: str, options: _Options) -> Grammar:
    """VLLM's field: an object with one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`.

    `disable_fallback` is about backends, of which there is one here, and is ignored.
    """
    if not isinstance(value, dict):
        raise wrong(param, "it must be an object")
    given = [name for name in _OF_STRUCTURED_OUTPUTS if _is_set(value.get(name))]
    read = {name: _READERS[_OF_STRUCTURED_OUTPUTS[name]](value[name], f"{param}.{name}", options) for name in given}
    found = _only(read, lambda first, second: (param, f"{first!r} and {second!r}"))
    if found is None:
        raise wrong(param, f"it must have one of {', '.join(map(repr, _OF_STRUCTURED_OUTPUTS))}")
    return found


def _has_only_options(value: Any) -> bool:
    """Returns whether `structured_outputs` is about another constraint."""
    return isinstance(value, dict) and not any(_is_set(value.get(name)) for name in _OF_STRUCTURED_OUTPUTS)


def _of_schema(value: Any, param: str, options: _Options) -> Grammar:
    """A schema as an object, or as JSON text."""
    schema = _loaded(value, param)
    if not isinstance(schema, dict | bool):
        raise wrong(param, "it must be a JSON schema")
    if options.is_closed:
        value = schema = _closed(schema, param)
    text = value if isinstance(value, str) else _json(schema, param)
    return _grammar(GrammarKind.JSON_SCHEMA, text, param, options.whitespace)


def _closed(schema: Any, param: str) -> Any:
    try:
        return closed(schema)
    except RecursionError:
        raise wrong(param, TOO_DEEP) from None


def _loaded(value: Any, param: str) -> Any:
    """The value of JSON text; other values as they are."""
    if not isinstance(value, str):
        return value
    _check_size(value, param)
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise wrong(param, f"it is not valid JSON: {error}") from None


def _of_any_object(value: Any, param: str, options: _Options) -> Grammar:
    if value is not True:
        raise wrong(param, "it must be true or false")
    return _of_schema(ANY_OBJECT, param, options)


def _of_choice(value: Any, param: str, _: _Options) -> Grammar:
    if isinstance(value, list) and len(value) > MAX_CHOICE_STRINGS:
        raise wrong(param, f"at most {MAX_CHOICE_STRINGS} choices are allowed")
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise wrong(param, "it must be a list of strings that are not empty")
    return _grammar(GrammarKind.CHOICE, orjson.dumps(list(dict.fromkeys(value))).decode(), param)


def _of_text(kind: GrammarKind, value: Any, param: str, _: _Options) -> Grammar:
    if not isinstance(value, str):
        raise wrong(param, "it must be a string")
    return _grammar(kind, value, param)


_of_regex, _of_grammar = partial(_of_text, GrammarKind.REGEX), partial(_of_text, GrammarKind.GRAMMAR)


def _of_tag(value: Any, param: str, options: _Options) -> Grammar:
    tag = _loaded(value, param)
    if not isinstance(tag, dict):
        raise wrong(param, "it must be an object, or JSON text")
    tag_format = tag["format"] if "format" in tag else _triggered(tag, param)
    if options.is_closed:
        tag_format = _closed_tag(tag_format, param)
    return _grammar(GrammarKind.STRUCTURAL_TAG, _json({"format": tag_format}, param), param, options.whitespace)


def _closed_tag(part: Any, param: str) -> Any:
    """A format with its schemas closed, however deep they are."""
    match part:
        case {"type": "json_schema", "json_schema": dict() as schema}:
            return part | {"json_schema": _closed(schema, param)}
        case dict():
            return {name: _closed_tag(each, param) for name, each in part.items()}
        case list():
            return [_closed_tag(each, param) for each in part]
    return part


def _triggered(tag: dict[str, Any], param: str) -> dict[str, Any]:
    """The older notation of vLLM and SGLang: if the text contains a trigger, it must continue with the `begin` of a
    structure that starts with that trigger, then a value of its schema, then its `end`."""
    structures = tag.get("structures")
    if not isinstance(structures, list) or not structures or not isinstance(tag.get("triggers"), list):
        raise wrong(param, "it needs a 'format', or 'triggers' and at least one of 'structures'")
    tags = []
    for each in structures:
        if not isinstance(each, dict) or not isinstance(each.get("schema"), dict):
            raise wrong(f"{param}.structures", "each must be an object with 'begin', 'schema' and 'end'")
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"begin": each.get("begin"), "content": content, "end": each.get("end")})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


_READERS: dict[str, Callable[[Any, str, _Options], Grammar]] = {
    "response_format": _of_response_format,
    "structured_outputs": _of_structured_outputs,
    "guided_json": _of_schema,
    "guided_regex": _of_regex,
    "guided_choice": _of_choice,
    "guided_grammar": _of_grammar,
    "guided_json_object": _of_any_object,
    "json_schema": _of_schema,
    "regex": _of_regex,
    "ebnf": _of_grammar,
    "structural_tag": _of_tag,
}

_GRAMMAR_FIELDS = (_READERS.keys() - {"json_schema"}) | {"json_schema_text"}

_OF_STRUCTURED_OUTPUTS = {
    "json": "guided_json",
    "regex": "regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
    "json_object": "guided_json_object",
    "structural_tag": "structural_tag",
}
"""The reader of each of its fields."""


def _grammar(kind: GrammarKind, text: str, param: str, whitespace: str | None = None) -> Grammar:
    _check_size(text, param)
    return Grammar(kind=kind, text=text, whitespace=whitespace)


def _json(value: Any, param: str) -> str:
    """Bodies are read up to 1,024 levels deep, and written up to 254."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        raise wrong(param, TOO_DEEP) from None


def _check_size(text: str, param: str) -> None:
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise wrong(param, f"it has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")


def _flag(fields: dict[str, Any], name: str, param: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise wrong(f"{param}.{name}", "it must be true or false")
    return bool(value)


def _whitespace(value: Any, param: str) -> str | None:
    if value is None or (isinstance(value, str) and len(value) <= 1024):
        return value
    raise wrong(param, "it must be a string of at most 1024 characters")


def _is_set(value: Any) -> bool:
    """Front ends send empty texts and lists for what is switched off. An empty schema allows any JSON."""
    return value is not None and value is not False and value not in ("", [])
