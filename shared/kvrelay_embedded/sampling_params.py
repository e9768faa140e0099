"""Parameters of a request to the engine, with the names, ranges and errors of the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.completion_request import CompletionRequest, parse_completion
from kvrelay.text.request.parsing import FlagOn
from kvrelay.text.request.sampling_fields import MAX_LOGPROBS, SamplingFields

_ANY_PROMPT = [0]


class SamplingParams(SamplingFields):
    """docs/api.md explains each field. None: the model's own default, and 16 for `max_tokens`.

    `structured_outputs` constrains the output: one of `json`, `regex`, `choice`, `grammar`, `json_object`,
    `structural_tag`.

    Sequences and arrays of numpy are accepted as lists. Raises ValueError with the name of the first field that is
    wrong, TypeError for an unknown name.
    """

    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    structured_outputs: dict[str, Any] | None = None
    add_special_tokens: FlagOn = True

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **fields: Any) -> None:
            for name in fields:
                if name not in SamplingParams.model_fields:
                    raise TypeError(f"SamplingParams has no field {name!r}")
            content = {name: _plain(value) for name, value in fields.items() if value is not None}
            _request_of(content)
            super().__init__(**content)

    @property
    def request(self) -> CompletionRequest:
        """The fields as those of a request. Raises ValueError if a copy has been given wrong ones."""
        return _request_of(_plain(self.model_dump(exclude_unset=True)))


def _request_of(content: dict[str, Any]) -> CompletionRequest:
    try:
        request = parse_completion({"model": "-", "prompt": _ANY_PROMPT, **content})
        request.check_unranked()
    except ApiError as error:
        raise ValueError(error.message) from None
    return request


def _plain(value: Any) -> Any:
    """Converts a value to its JSON form."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
