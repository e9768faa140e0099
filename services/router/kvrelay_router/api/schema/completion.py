"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kvrelay_router.api.errors import ApiError
from kvrelay_router.api.schema.generation import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Flag,
    FlagOn,
    GenerationFields,
    check_stream_options,
)
from kvrelay_router.api.schema.parsing import invalid, parse, wrong_type
from kvrelay_router.api.schema.unsupported import COMPLETION, refuse_unsupported

DEFAULT_MAX_TOKENS = 16

PromptItem = str | list[int]


def _prompt_list(value: Any) -> list[PromptItem]:
    """A text, a list of texts, token ids, or a list of lists of them: always as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type("it must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise invalid("it must not be empty")
    if _are_token_ids(value):
        return [value]
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and _are_token_ids(item)):
            raise wrong_type("it must be a string, a list of strings, a list of token ids, or a list of such lists")
    return value


def _are_token_ids(items: list[Any]) -> bool:
    return set(map(type, items)) <= {int}


class CompletionRequest(GenerationFields):
    """A validated completion request. Token ids are integers, but not yet held against the vocabulary."""

    prompt: Annotated[list[Any], BeforeValidator(_prompt_list)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: Flag = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: FlagOn = True

    @property
    def num_sequences(self) -> int:
        """How many continuations are drawn for each prompt."""
        return self.best_of or self.n


def parse_completion(content: dict[str, Any]) -> CompletionRequest:
    """Raises ApiError."""
    refuse_unsupported(content, COMPLETION)
    request = parse(CompletionRequest, content)
    if reason := check_stream_options(content):
        raise ApiError(f"Invalid value for 'stream_options': {reason}", param="stream_options")
    if request.best_of is not None and request.best_of < request.n:
        raise ApiError("Invalid value for 'best_of': it must not be less than 'n'", param="best_of")
    if request.num_sequences > request.n and request.stream:
        raise ApiError("Invalid value for 'best_of': results cannot be streamed", param="best_of")
    return request
