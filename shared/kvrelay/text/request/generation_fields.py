"""The fields that completions and chat completions share, with the names of OpenAI, vLLM and SGLang.

Those that constrain the output are converted to one `Grammar`, whatever their form. At most one of them may be set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field, WrapValidator

from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.parsing import Flag, RequestModel, invalid, or_default
from kvrelay.text.request.sampling_fields import SamplingFields, TokenIds

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CHOICE_STRINGS = 10_000
MAX_LOGPROB_TOKENS = 128
TOO_DEEP = "it is nested too deeply"

ANY_OBJECT = '{"type":"object"}'
_VALUES = ("const", "enum", "default", "examples")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")


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


class GenerationFields(SamplingFields):
    """The fields that completions and chat completions share."""

    model: str
    stream: Flag = False
    stream_options: StreamOptions | None = None
    no_stop_trim: Flag = False  # SGLang's name of `include_stop_str_in_output`
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False
    extra_key: Annotated[str, Field(max_length=1024), or_default("")] = ""
    user: Annotated[str, Field(max_length=1024), or_default("")] = ""
    logprob_token_ids: TokenIds = Field(default_factory=list, max_length=MAX_LOGPROB_TOKENS)
    truncate_prompt_tokens: Annotated[int, BeforeValidator(_not_zero), Field(ge=-1)] | None = None
    truncation_side: Annotated[Literal["left", "right"] | None, WrapValidator(_side)] = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_whitespace_pattern: Any = None
    json_schema_text: Any = Field(default=None, alias="json_schema")
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the output is constrained to, if anything. Raises ApiError for fields that are wrong in themselves;
        whether the grammar can be compiled is checked later."""
        given = self._constraints
        if not given:
            return None
        if len(given) > 1:
            first, second = list(given)[:2]
            raise wrong(second, f"'{first}' and '{second}' both constrain the output; give one of them")
        ((param, value),) = given.items()
        whitespace = _whitespace(self.guided_whitespace_pattern, "guided_whitespace_pattern")
        return _READERS[param](value, param, whitespace)

    @property
    def grammar_param(self) -> str:
        """The field that constrains the output, for error messages."""
        return next(iter(self._constraints), "")

    @property
    def whitespace_param(self) -> str:
        """The field that gives the regex for the whitespace of JSON."""
        own = self.structured_outputs
        is_own = isinstance(own, dict) and own.get("whitespace_pattern") is not None
        return "structured_outputs.whitespace_pattern" if is_own else "guided_whitespace_pattern"

    @cached_property
    def _constraints(self) -> dict[str, Any]:
        if self.model_fields_set.isdisjoint(_GRAMMAR_FIELDS):
            return {}
        return {name: value for name in _READERS if _is_set(value := self._value_of(name))}

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


def _of_response_format(value: Any, param: str, whitespace: str | None) -> Grammar:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise wrong(param, "it must be an object with a type")
    match value["type"]:
        case "json_object" | "json_schema" if isinstance(value.get("schema"), dict):  # of llama.cpp's server
            return _of_schema(value["schema"], f"{param}.schema", whitespace)
        case "json_object":
            return _of_schema(ANY_OBJECT, param, whitespace)
        case "json_schema":
            described = value.get("json_schema")
            if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
                raise wrong(f"{param}.json_schema", "it must be an object with a 'schema'")
            if not isinstance(described.get("name"), str):
                raise wrong(f"{param}.json_schema.name", "it must be a string")
            # Every schema is enforced, so `strict` changes nothing.
            if not isinstance(described.get("strict"), bool | None):
                raise wrong(f"{param}.json_schema.strict", "it must be true or false")
            return _of_schema(described["schema"], f"{param}.json_schema.schema", whitespace)
        case "structural_tag":
            return _of_tag(value, param, None)
        case "grammar" | "regex" as kind if isinstance(value.get(kind), str):
            return _READERS["guided_grammar" if kind == "grammar" else "regex"](value[kind], f"{param}.{kind}", None)
        case kind:
            known = "'text', 'json_object', 'json_schema', 'structural_tag', 'regex' and 'grammar'"
            raise wrong(f"{param}.type", f"{kind!r} is unknown; known are {known}")


def _of_structured_outputs(value: Any, param: str, whitespace: str | None) -> Grammar:
    """VLLM's field: an object with one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`.

    `disable_fallback` is about backends, of which there is one here, and is ignored.
    """
    if not isinstance(value, dict):
        raise wrong(param, "it must be an object")
    own_whitespace = _whitespace(value.get("whitespace_pattern"), f"{param}.whitespace_pattern")
    whitespace = whitespace if own_whitespace is None else own_whitespace
    given = [name for name in _OF_STRUCTURED_OUTPUTS if _is_set(value.get(name))]
    if len(given) > 1:
        raise wrong(param, f"{given[0]!r} and {given[1]!r} both constrain the output; give one of them")
    if not given:
        raise wrong(param, f"it must have one of {', '.join(map(repr, _OF_STRUCTURED_OUTPUTS))}")
    (name,) = given
    if _flag(value, "disable_any_whitespace", param) and whitespace is None:
        whitespace = ""
    if _flag(value, "disable_additional_properties", param) and name == "json":
        try:
            value = value | {"json": _closed(_schema_of(value["json"], f"{param}.json"))}
        except RecursionError:
            raise wrong(f"{param}.json", TOO_DEEP) from None
    return _READERS[_OF_STRUCTURED_OUTPUTS[name]](value[name], f"{param}.{name}", whitespace)


def _of_schema(value: Any, param: str, whitespace: str | None) -> Grammar:
    """A schema as an object, or as JSON text."""
    schema = _schema_of(value, param)
    text = value if isinstance(value, str) else _json(schema, param)
    return _grammar(GrammarKind.JSON_SCHEMA, text, param, whitespace)


def _schema_of(value: Any, param: str) -> dict[str, Any] | bool:
    schema = _loaded(value, param)
    if not isinstance(schema, dict | bool):
        raise wrong(param, "it must be a JSON schema")
    return schema


def _loaded(value: Any, param: str) -> Any:
    """The value of JSON text; other values as they are."""
    if not isinstance(value, str):
        return value
    _check_size(value, param)
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise wrong(param, f"it is not valid JSON: {error}") from None


def _closed(value: Any) -> Any:
    """The schema with no properties but those that it names, as in vLLM. Raises RecursionError for a deep one."""
    if isinstance(value, list):
        return [_closed(each) for each in value]
    if not isinstance(value, dict):
        return value
    closed = {name: _closed_part(name, each) for name, each in value.items()}
    if "additionalProperties" not in value and value.keys() & {"properties", "patternProperties"}:
        closed["additionalProperties"] = False
    return closed


def _closed_part(keyword: str, value: Any) -> Any:
    if keyword in _VALUES:
        return value
    if keyword in _MAPS_OF_SCHEMAS and isinstance(value, dict):
        return {name: _closed(each) for name, each in value.items()}
    return _closed(value)


def _of_any_object(value: Any, param: str, whitespace: str | None) -> Grammar:
    if value is not True:
        raise wrong(param, "it must be true or false")
    return _of_schema(ANY_OBJECT, param, whitespace)


def _of_choice(value: Any, param: str, _: str | None) -> Grammar:
    if isinstance(value, list) and len(value) > MAX_CHOICE_STRINGS:
        raise wrong(param, f"at most {MAX_CHOICE_STRINGS} choices are allowed")
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise wrong(param, "it must be a list of strings that are not empty")
    return _grammar(GrammarKind.CHOICE, orjson.dumps(list(dict.fromkeys(value))).decode(), param)


def _of_text(kind: GrammarKind, value: Any, param: str, _: str | None) -> Grammar:
    if not isinstance(value, str):
        raise wrong(param, "it must be a string")
    return _grammar(kind, value, param)


_of_regex, _of_grammar = partial(_of_text, GrammarKind.REGEX), partial(_of_text, GrammarKind.GRAMMAR)


def _of_tag(value: Any, param: str, _: str | None) -> Grammar:
    tag = _loaded(value, param)
    if not isinstance(tag, dict):
        raise wrong(param, "it must be an object, or JSON text")
    tag_format = tag["format"] if "format" in tag else _triggered(tag, param)
    return _grammar(GrammarKind.STRUCTURAL_TAG, _json({"format": tag_format}, param), param)


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


_READERS: dict[str, Callable[[Any, str, str | None], Grammar]] = {
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
