"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SkipValidation, WithJsonSchema

from kvrelay.text.request.api_error import ApiError, wrong
from kvrelay.text.request.generation_fields import GenerationFields
from kvrelay.text.request.parsing import (
    COMPLETION,
    TOKEN_SCHEMA,
    Flag,
    FlagOn,
    OrDefault,
    invalid,
    parse,
    refuse_unsupported,
    wrong_type,
)
from kvrelay.text.request.sampling_fields import MAX_LOGPROBS

DEFAULT_MAX_TOKENS = 16

PromptItem = str | list[int]


def too_many_completions(limit: int) -> ApiError:
    return ApiError(f"At most {limit} completions can be asked for at once", param="prompt")


def _prompt_list(value: Any) -> list[PromptItem]:
    """Returns a list of prompts from a text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type("it must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise invalid("it must not be empty")
    if are_token_ids(value):
        return [value]
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and are_token_ids(item)):
            raise wrong_type("it must be a string, a list of strings, a list of token ids, or a list of such lists")
    return value


_TOKENS: dict[str, Any] = {"type": "array", "minItems": 1, "items": TOKEN_SCHEMA}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_SEVERAL: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _TOKENS]}}
_PROMPT: dict[str, Any] = {"anyOf": [_TEXT, _TOKENS, _SEVERAL]}


def are_token_ids(items: list[Any]) -> bool:
    """Returns whether these are integers. Their range is checked later."""
    return not items or (type(items[0]) is int and set(map(type, items)) == {int})


class CompletionRequest(GenerationFields):
    """Token ids are validated as integers here, and checked against the vocabulary later."""

    # `_prompt_list` has checked them: pydantic would copy each.
    prompt: Annotated[SkipValidation[list[Any]], BeforeValidator(_prompt_list), WithJsonSchema(_PROMPT)]
    echo: Flag = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: FlagOn = True
    suffix: Annotated[str, OrDefault("")] = ""


def parse_completion(content: dict[str, Any]) -> CompletionRequest:
    """Validates a request body. Raises ApiError."""
    refuse_unsupported(content, COMPLETION)
    request = parse(CompletionRequest, content)
    request.check_together(wants_logprobs=request.logprobs is not None, max_tokens=request.max_tokens)
    if request.echo and request.logprobs is not None and request.logprob_start_len is not None:
        raise wrong("logprob_start_len", "an echoed prompt with 'logprobs' is scored from its beginning")
    _check_suffix(request)
    if request.num_sequences > request.n and request.stream:
        raise wrong("best_of", "results cannot be streamed")
    if request.logprob_token_ids:
        if request.echo:
            raise wrong("logprob_token_ids", "it cannot be used with 'echo', whose prompt has the most likely tokens")
        token_ids = list(dict.fromkeys(request.logprob_token_ids))
        return request.model_copy(update={"logprob_token_ids": token_ids, "logprobs": len(token_ids)})
    return request


def _check_suffix(request: CompletionRequest) -> None:
    if not request.suffix:
        return
    if not all(isinstance(item, str) for item in request.prompt):
        raise wrong("suffix", "it needs prompts that are texts; write the tokens of a prompt around it yourself")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise wrong(name, "it cannot be used with 'suffix'")
