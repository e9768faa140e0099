"""The fields of sampling, beams and stopping, of the HTTP APIs and of the embedded engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema, WrapValidator

from kvrelay.excerpts import quoted
from kvrelay.protocol.sampling import BeamSpec, SpeculationMethod
from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.parsing import (
    TOKEN_SCHEMA,
    Flag,
    FlagOn,
    OrDefault,
    RequestModel,
    invalid,
    or_null,
    wrong_type,
)

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256

MAX_CHOICES = 128
MAX_LENGTH_PENALTY = 5.0

HARMLESS_ALONE: dict[str, tuple[object, ...]] = {"length_penalty": (None, 1.0), "early_stopping": (None, False)}
"""Values that are harmless without a beam search."""
UNUSED_VALUES: dict[str, float] = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0}
"""Harmless values of the sampling fields. A beam search does not sample, so other values are mistakes."""
_LIMITED = "the tokens of a beam search cannot be limited; 'logit_bias' can make them unlikely"
EXCLUDED = {
    "logprob_token_ids": "a beam search has none",
    "allowed_token_ids": _LIMITED,
    "bad_words": _LIMITED,
    "stop": "stop strings do not end beams; 'stop_token_ids' do",
    "prompt_logprobs": "a beam search does not score its prompt",
}


def _early_stopping(value: Any, _: Any) -> Any:
    """Replaces pydantic's messages, of which there would be one for each type of the union."""
    if value is None or value == "never" or isinstance(value, bool):
        return value
    raise wrong_type("it must be true, false or 'never'")


class BeamFields(RequestModel):
    """A beam search returns `n` texts of `best_of` beams; `best_of` defaults to `n`."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), OrDefault(1)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: Flag = False
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    early_stopping: Annotated[bool | Literal["never"] | None, WrapValidator(_early_stopping)] = None

    @property
    def beams(self) -> BeamSpec | None:
        """The beam search to run, if any."""
        if not self.use_beam_search:
            return None
        return BeamSpec(
            width=self.best_of or self.n,
            num_returned=self.n,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=bool(self.early_stopping) if self.early_stopping != "never" else "never",
        )

    @property
    def num_sequences(self) -> int:
        """The number of texts to generate for each prompt."""
        return self.n if self.use_beam_search else self.best_of or self.n

    @property
    def num_samples(self) -> int:
        """The number of sequences that workers run for each prompt. A beam search is one, whatever its width."""
        return 1 if self.use_beam_search else self.num_sequences

    def check_unranked(self) -> None:
        """Raises ApiError for a request whose best samples are to be returned."""
        if self.num_sequences > self.n:
            raise wrong("best_of", "it needs 'use_beam_search' to be true")

    def check_search(self, *, wants_logprobs: bool, max_tokens: int | None, is_constrained: bool) -> None:
        """Raises ApiError for fields that contradict a beam search, or that need one."""
        if self.best_of is not None and self.best_of < self.n:
            raise wrong("best_of", "it must not be less than 'n'")
        if not self.use_beam_search:
            for name, harmless in HARMLESS_ALONE.items():
                if getattr(self, name) not in harmless:
                    raise wrong(name, "it needs 'use_beam_search' to be true")
            return
        for name, unused in UNUSED_VALUES.items():
            if getattr(self, name) not in (None, unused):
                raise wrong(name, f"a beam search draws nothing: leave it out, or set it to {unused:g}")
        for name, reason in EXCLUDED.items():
            if getattr(self, name) not in (None, []):
                raise wrong(name, reason)
        if wants_logprobs:
            raise wrong("logprobs", "a beam search has no log-probabilities of tokens, but a score of each text")
        if max_tokens == 0:
            raise wrong("max_tokens", "a beam search needs at least 1")
        if is_constrained:
            raise wrong("use_beam_search", "the output of a beam search cannot be constrained")


def _stop_list(value: Any) -> list[str]:
    """Accepts a string, a list of strings, or null for none."""
    if value is None:
        return []
    stop = [value] if isinstance(value, str) else value
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise invalid(f"at most {MAX_STOP_STRINGS} stop strings are allowed")
    if not isinstance(stop, list) or not all(isinstance(each, str) for each in stop):
        raise wrong_type("it must be a string or a list of strings")
    if not all(0 < len(each) <= MAX_STOP_CHARS for each in stop):
        raise invalid(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return stop


def _bias_map(value: Any) -> dict[int, float]:
    """Token ids are decimal strings, because JSON has only string keys."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type("it must map token ids to numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise invalid(f"at most {MAX_BIASED_TOKENS} tokens can be biased")
    if unknown := [key for key in value if not _is_token_id(key)]:
        raise invalid(f"unknown tokens {', '.join(map(quoted, unknown[:8]))}; keys must be token ids")
    biases = {}
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise wrong_type(f"the bias of token {key} must be a number")
        if not -100 <= bias <= 100:
            raise invalid(f"the bias of token {key} must be between -100 and 100")
        biases[int(key)] = float(bias)
    return biases


def _is_token_id(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**31


def _bad_words(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("it must be a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise invalid(f"at most {MAX_BAD_WORDS} bad words are allowed")
    if not all(isinstance(each, str) for each in value):
        raise wrong_type("it must be a list of strings")
    for each in value:
        if not (each.strip() and len(each) <= MAX_BAD_WORD_CHARS):
            raise invalid(f"a bad word must have 1 to {MAX_BAD_WORD_CHARS} characters that are not all whitespace")
    return value


def _off_if_minus_one(value: Any) -> Any:
    return 0 if value == -1 and not isinstance(value, bool) else value


def _salt(value: Any) -> Any:
    if value == "":
        raise invalid("it must not be empty; a request without it shares cached blocks")
    return "" if value is None else value


_STOP: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOPS: dict[str, Any] = {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}
_BIASES: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_BIASED_TOKENS,
}
_BAD_WORD: dict[str, Any] = {"type": "string", "pattern": r"\S", "maxLength": MAX_BAD_WORD_CHARS}
_BAD_WORDS: dict[str, Any] = {"type": "array", "maxItems": MAX_BAD_WORDS, "items": _BAD_WORD}

Stop = Annotated[
    list[str],
    BeforeValidator(_stop_list),
    WithJsonSchema({"anyOf": [_STOP, _STOPS, {"type": "null"}], "default": None}),
]
LogitBias = Annotated[dict[int, float], BeforeValidator(_bias_map), WithJsonSchema(or_null(_BIASES))]
TokenId = Annotated[int, Field(ge=0, lt=2**31), WithJsonSchema(TOKEN_SCHEMA)]
TokenIds = Annotated[list[TokenId], FailFast(), OrDefault([])]
BadWords = Annotated[list[str], BeforeValidator(_bad_words), WithJsonSchema(or_null(_BAD_WORDS))]
CacheSalt = Annotated[
    str,
    Field(max_length=1024),
    BeforeValidator(_salt),
    WithJsonSchema(or_null({"type": "string", "minLength": 1, "maxLength": 1024})),
]
Penalty = Annotated[float, Field(ge=-2, le=2), OrDefault(0.0)]


class SamplingFields(BeamFields):
    """Of all requests, HTTP's and the engine's. `validation` checks the ranges that depend on the model."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    # If one of these is None, the model's default applies.
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: (
        Annotated[
            int, Field(ge=0), BeforeValidator(_off_if_minus_one), WithJsonSchema({"type": "integer", "minimum": -1})
        ]
        | None
    ) = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: TokenIds = Field(default_factory=list, max_length=MAX_ALLOWED_TOKENS)
    bad_words: BadWords = Field(default_factory=list)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    skip_special_tokens: FlagOn = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_start_len: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    speculation: SpeculationMethod | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), OrDefault(0)] = 0
    cache_salt: CacheSalt = ""
