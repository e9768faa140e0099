"""Parameters of a request to the engine, with the names, ranges and errors of the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.completion_request import CompletionRequest, parse_completion

_ANY_PROMPT = [0]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """docs/api.md says what each means. None: the model's own default.

    `structured_outputs` constrains the output: one of `json`, `regex`, `choice`, `grammar`, `json_object`,
    `structural_tag`. With `use_beam_search`, `n` texts of `best_of` beams are returned.

    Raises ValueError with the name of the first field that is wrong.
    """

    n: int = 1
    max_tokens: int | None = None  # None: 16, as in the HTTP API
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None  # None: random
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    speculation: Literal["off", "ngram", "suffix"] | None = None
    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool = True
    request: CompletionRequest = field(init=False, repr=False, compare=False)
    """The checked fields."""

    def __post_init__(self) -> None:
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        content = {name: _plain(value) for name, value in given.items() if value is not None}
        try:
            request = parse_completion({"model": "-", "prompt": _ANY_PROMPT, **content})
        except ApiError as error:
            raise ValueError(error.message) from None
        if request.num_sequences > request.n:
            raise ValueError("Invalid value for 'best_of': it needs 'use_beam_search' to be true")
        object.__setattr__(self, "request", request)


def _plain(value: Any) -> Any:
    """Converts a value to its JSON form."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
