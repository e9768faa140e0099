"""What can be appended to a state: text, `gen`, `select`, media, blocks of a role, and arguments that a trace does not
know. Expressions are added with `+`.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

from kvrelay_programs.errors import Location, caller_location, wrong_value

MARK = "\U0010fffe"  # not a character, so no text has it
"""Begins an argument in a text."""


class TraceEnded(BaseException):
    """Not an Exception, so that a program which handles errors does not go on with what is not known."""

    def __init__(self, reason: str, location: Location) -> None:
        super().__init__(f"{location}: {reason}")
        self.reason, self.location = reason, location


class Argument:
    """Its attributes, items and calls are not known either, and in a text it is a mark. Whatever else depends on its
    value raises TraceEnded.
    """

    def __init__(self, name: str, kind: str = "argument") -> None:
        self._name, self._kind = name, kind

    def __str__(self) -> str:
        return MARK

    def __format__(self, spec: str) -> str:
        return MARK

    def __add__(self, other: Any) -> Any:
        return MARK + other

    def __radd__(self, other: Any) -> Any:
        return other + MARK

    def __getattr__(self, name: str) -> Argument:
        if name.startswith("__"):
            raise AttributeError(name)
        return Argument(f"{self._name}.{name}", self._kind)

    def __getitem__(self, key: object) -> Argument:
        return Argument(f"{self._name}[{key!r}]", self._kind)

    def __call__(self, *args: object, **kwargs: object) -> Argument:
        return Argument(f"{self._name}()", self._kind)

    def _needed(self, *args: object) -> NoReturn:
        raise TraceEnded(f"it cannot be traced on: it branches on the {self._kind} {self._name!r}", caller_location())

    __bool__ = __len__ = __iter__ = __contains__ = __int__ = __float__ = __index__ = __hash__ = _needed
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _needed


Role = Literal["system", "user", "assistant"]
Normalization = Literal["tokens", "none", "unconditional"]

_PATTERNS: dict[type, str] = {
    int: r"-?(0|[1-9][0-9]{0,17})",
    float: r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?",
    bool: r"True|False",
}


@runtime_checkable
class _PydanticModel(Protocol):
    def model_json_schema(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a video: a content part of a chat message."""

    kind: Literal["image_url", "video_url"]
    url: str

    @property
    def part(self) -> dict[str, Any]:
        return {"type": self.kind, self.kind: {"url": self.url}}


@dataclass(frozen=True, slots=True)
class Gen:
    """A generation call. `fields` are those of the request, without defaults."""

    name: str
    fields: Mapping[str, Any]
    location: Location


@dataclass(frozen=True, slots=True)
class Select:
    """A choice by likelihood."""

    name: str
    choices: tuple[str, ...]
    normalization: Normalization
    unconditional_prefix: str
    location: Location


@dataclass(frozen=True, slots=True)
class Block:
    """Parts that are one message of a role."""

    role: Role
    parts: tuple[Part, ...]
    location: Location


Part = str | Media | Gen | Select | Block


@dataclass(frozen=True, slots=True)
class Expression:
    """Parts in their order."""

    parts: tuple[Part, ...]

    def __add__(self, other: str | Expression) -> Expression:
        if not isinstance(other, str | Expression):
            return NotImplemented
        return Expression(self.parts + parts_of(other))

    def __radd__(self, other: str) -> Expression:
        if not isinstance(other, str):
            return NotImplemented
        return Expression((other, *self.parts))


def parts_of(value: str | Expression) -> tuple[Part, ...]:
    """Raises TypeError for anything but text and expressions."""
    if isinstance(value, Expression):
        return value.parts
    if isinstance(value, Argument):
        return (str(value),)
    if isinstance(value, str):
        return (value,) if value else ()
    raise TypeError(f"only text and expressions can be appended, not {type(value).__name__}; str() makes it text")


def gen(
    name: str,
    max_tokens: int | None = None,
    *,
    stop: str | Sequence[str] | None = None,
    regex: str | None = None,
    json_schema: Mapping[str, Any] | str | type | None = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
    dtype: type | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    min_tokens: int | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool | None = None,
    logprobs: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Expression:
    """Generates text, which the state then holds as `state[name]`.

    Omitted arguments have the value of `run(sampling=...)` or the endpoint's default. `json_schema` is a schema, its
    JSON text or a pydantic model; `choices` constrains the text to one of these, as it is sampled (`select` compares
    their likelihoods); `dtype` to the text of an int, a float or a bool. `logprobs` is a number of alternatives.
    `extra` has further fields of the request. At most one constraint is allowed; ValueError otherwise.
    """
    constraint = _constraint(regex=regex, json_schema=json_schema, choices=choices, grammar=grammar, dtype=dtype)
    fields = {
        "max_tokens": max_tokens,
        "stop": [stop] if isinstance(stop, str) else stop if stop is None else list(stop),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "min_tokens": min_tokens,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop_token_ids": stop_token_ids if stop_token_ids is None else list(stop_token_ids),
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
        **constraint,
        **(extra or {}),
    }
    return Expression((Gen(_checked(name), _given(fields), caller_location()),))


def _constraint(
    *,
    regex: str | None,
    json_schema: Mapping[str, Any] | str | type | None,
    choices: Sequence[str] | None,
    grammar: str | None,
    dtype: type | None,
) -> dict[str, Any]:
    asked = {
        "regex": regex,
        "json_schema": json_schema,
        "choices": choices,
        "grammar": grammar,
        "dtype": dtype,
    }
    given = [key for key, value in asked.items() if value is not None]
    if len(given) > 1:
        raise wrong_value(f"a gen takes one constraint, not {' and '.join(given)}")
    if regex is not None:
        return {"structured_outputs": {"regex": regex}}
    if json_schema is not None:
        return {"structured_outputs": {"json": _schema(json_schema)}}
    if choices is not None:
        return {"structured_outputs": {"choice": list(_distinct(choices))}}
    if grammar is not None:
        return {"structured_outputs": {"grammar": grammar}}
    if dtype is None or dtype is str:
        return {}
    if dtype not in _PATTERNS:
        raise wrong_value(f"dtype must be int, float, bool or str, not {dtype!r}")
    return {"structured_outputs": {"regex": _PATTERNS[dtype]}}


def _schema(schema: Mapping[str, Any] | str | type) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise wrong_value(f"json_schema is not JSON: {error}") from error
    if isinstance(schema, type):
        if not isinstance(schema, _PydanticModel):
            raise wrong_value(f"json_schema must be a schema or a pydantic model, not {schema!r}")
        return schema.model_json_schema()
    if not isinstance(schema, Mapping):
        raise wrong_value("json_schema must be an object")
    return dict(schema)


def select(
    name: str,
    choices: Sequence[str],
    *,
    normalization: Normalization = "tokens",
    unconditional_prefix: str = "Answer:",
) -> Expression:
    """Appends the choice that is most likely behind the text so far.

    `normalization` of a choice's log-likelihood: "tokens" divides it by its number of tokens, "none" takes it as it is,
    "unconditional" subtracts the log-likelihood that the choice has behind `unconditional_prefix` alone (Brown et al.,
    "Language Models are Few-Shot Learners", 2020, section 2.4). Raises ValueError for no choices, an empty one, and one
    that begins another: end both with what follows in the text.
    """
    if normalization not in ("tokens", "none", "unconditional"):
        raise wrong_value(f"normalization must be 'tokens', 'none' or 'unconditional', not {normalization!r}")
    distinct = _distinct(choices)
    for shorter, longer in pairwise(sorted(distinct)):
        if longer.startswith(shorter):
            raise wrong_value(
                f"the choice {shorter!r} begins the choice {longer!r}, so their likelihoods cannot be compared; "
                "end both with what follows in the text, such as a full stop"
            )
    chosen = Select(_checked(name), distinct, normalization, unconditional_prefix, caller_location())
    return Expression((chosen,))


def system(content: str | Expression) -> Expression:
    """A message of the system."""
    return _block("system", content)


def user(content: str | Expression) -> Expression:
    """A message of the user."""
    return _block("user", content)


def assistant(content: str | Expression) -> Expression:
    """A message of the assistant, in which `gen` and `select` may stand."""
    return _block("assistant", content)


def image(source: str | Path | bytes) -> Expression:
    """An image by URL, file or bytes, for a block of the user. The endpoint refuses it if its model takes text only."""
    return Expression((Media("image_url", _url(source, "image/png")),))


def video(source: str | Path | bytes) -> Expression:
    """A video by URL, file or bytes, for a block of the user. The endpoint refuses it if its model takes text only."""
    return Expression((Media("video_url", _url(source, "video/mp4")),))


def _block(role: Role, content: str | Expression) -> Expression:
    parts = parts_of(content)
    if any(isinstance(part, Block) for part in parts):
        raise wrong_value(f"a block of the {role} cannot contain another block")
    return Expression((Block(role, parts, caller_location()),))


def _url(source: str | Path | bytes, default_type: str) -> str:
    if isinstance(source, str) and re.match(r"(https?|data):", source):
        return source
    content, guessed = source, None
    if not isinstance(content, bytes):
        content, guessed = Path(content).read_bytes(), mimetypes.guess_type(str(source))[0]
    return f"data:{guessed or default_type};base64,{base64.b64encode(content).decode()}"


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise wrong_value("a name must be text that is not empty")
    return name


def _distinct(choices: Sequence[str]) -> tuple[str, ...]:
    if isinstance(choices, str) or not choices:
        raise wrong_value("choices must be a list of at least one text")
    if any(not isinstance(choice, str) or not choice for choice in choices):
        raise wrong_value("a choice must be text that is not empty")
    if len(set(choices)) < len(choices):
        raise wrong_value("a choice is listed twice")
    return tuple(choices)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


class MessageBlocks(ABC):
    """The blocks of messages that a program's state has, whether it runs or is traced."""

    @contextmanager
    def system(self) -> Iterator[None]:
        """Content appended inside becomes a message of the system."""
        yield from self._block("system")

    @contextmanager
    def user(self) -> Iterator[None]:
        """Content appended inside becomes a message of the user."""
        yield from self._block("user")

    @contextmanager
    def assistant(self) -> Iterator[None]:
        """Content appended inside becomes a message of the assistant."""
        yield from self._block("assistant")

    @abstractmethod
    def _block(self, role: Role) -> Iterator[None]:
        """Opens a message, yields once, and closes it."""
