"""Generative scoring, with vLLM's names: how likely a token is to follow a query with each of several items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, Field, SkipValidation, WithJsonSchema

from kvrelay.text.request.api_error import context_length_exceeded, fields_named, wrong
from kvrelay.text.request.completion_request import are_token_ids, parse_completion
from kvrelay.text.request.generation_fields import MAX_LOGPROB_TOKENS
from kvrelay.text.request.parsing import TOKEN_SCHEMA, Flag, FlagOn, OrDefault, RequestModel, invalid, parse, wrong_type
from kvrelay.text.request.sampling_fields import CacheSalt, TokenId
from kvrelay.text.service import TextService, TextTooLong
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.answer_format import AnswerFormat, finite
from kvrelay_router.openai.api_service import ApiService, known_limits
from kvrelay_router.openai.completions import plan_completion
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.planning import Plan

Text = str | list[int]
"""A text, or its tokens."""

_TEXT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": TOKEN_SCHEMA}]}
_ITEM: dict[str, Any] = {
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": TOKEN_SCHEMA}]
}
FIELD_NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}
"""The fields of a scoring, by those of the completion that it is converted to."""


def _text(value: Any) -> Text:
    if isinstance(value, str) or (isinstance(value, list) and are_token_ids(value)):
        return value
    raise wrong_type("it must be a string or a list of token ids")


def _texts(value: Any) -> list[Text]:
    if not isinstance(value, list):
        raise wrong_type("it must be a list of strings, or of lists of token ids")
    if not value:
        raise invalid("it must not be empty")
    if not all(value):
        raise invalid("it must have no empty item")
    return [_text(item) for item in value]


class ScoringRequest(RequestModel):
    """The score of an item is the probability of the first of `label_token_ids`, among all of them or, without
    `apply_softmax`, among all tokens."""

    model: str | None = None
    query: Annotated[SkipValidation[Any], BeforeValidator(_text), WithJsonSchema(_TEXT)]
    items: Annotated[
        SkipValidation[list[Any]],
        BeforeValidator(_texts),
        WithJsonSchema({"type": "array", "minItems": 1, "items": _ITEM}),
    ]
    label_token_ids: Annotated[list[TokenId], FailFast(), Field(min_length=1, max_length=MAX_LOGPROB_TOKENS)]
    apply_softmax: FlagOn = True
    item_first: Flag = False
    add_special_tokens: FlagOn = True
    cache_salt: CacheSalt = ""
    user: Annotated[str, Field(max_length=1024), OrDefault("")] = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), OrDefault(0)] = 0


def parse_scoring(content: dict[str, Any], max_items: int) -> ScoringRequest:
    """Validates a request body. Raises ApiError."""
    request = parse(ScoringRequest, content)
    if len(request.items) > max_items:
        raise wrong("items", f"at most {max_items} can be scored at once")
    return request


async def plan_scoring(service: ApiService, names: RequestNames, request: ScoringRequest) -> Plan:
    """A run for each item, of one token. Raises ApiError for every mistake in the request."""
    longest, share = (await known_limits(service.dispatcher)).max_model_len, LoopShare()
    query = await _tokens(service.text, request.query, "query", longest, special=request.add_special_tokens)
    prompts: list[list[int]] = []
    for item in request.items:
        token_ids = await _tokens(service.text, item, "items", longest, special=False)
        prompts.append([*token_ids, *query] if request.item_first else [*query, *token_ids])
        await share.pause()
    fields = {name: value for name in ("cache_salt", "user", "priority") if (value := getattr(request, name))}
    fields |= {"model": request.model or service.settings.model_name, "prompt": prompts, "max_tokens": 1}
    fields |= {"logprobs": 0, "logprob_token_ids": request.label_token_ids}
    with fields_named(FIELD_NAMES):
        plan, _ = await plan_completion(service, names, parse_completion(fields))
    return plan


async def _tokens(text: TextService, item: Text, param: str, longest: int, *, special: bool) -> list[int]:
    if not isinstance(item, str):
        return item
    try:
        return await text.encode(item, add_special_tokens=special, max_tokens=longest)
    except TextTooLong as error:
        raise context_length_exceeded(str(error), param) from None


class ScoringFormat(AnswerFormat):
    """One JSON object. `head`: the fields that it begins with."""

    def __init__(self, head: dict[str, Any], request: ScoringRequest, runs: Sequence[PromptRun]) -> None:
        self._head, self._is_softmax, self._runs = head, request.apply_softmax, runs

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        scores = [self._score(run) for run in self._runs]
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return {**self._head, "data": data, "usage": usage}

    def _score(self, run: PromptRun) -> float:
        (choice,) = run.choices
        logprobs = [finite(each) for each in choice.take_records().logprobs[0].top_logprobs]
        if not self._is_softmax:
            return math.exp(logprobs[0])
        return 1 / sum(math.exp(min(each - logprobs[0], 700.0)) for each in logprobs)
