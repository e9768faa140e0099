"""POST /v1/select: which of several choices is the likeliest behind a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, SkipValidation, WrapValidator
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.protocol.sampling import Sampling
from kvrelay.text.chat_template import Message
from kvrelay.text.choice import Choice
from kvrelay.text.request.api_error import context_length_exceeded, wrong
from kvrelay.text.request.generation_fields import CacheSalt, FlagOn, or_default
from kvrelay.text.request.grammar_fields import GenerationFields
from kvrelay.text.request.parsing import RequestModel, invalid, parse, wrong_type
from kvrelay.text.request.validation import (
    ModelLimits,
    RequestedOutput,
    allowed_output,
    check_tokenized,
    make_sampling,
    stop_rules,
)
from kvrelay.text.service import ChatOptions, TextTooLong, count_chars
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.dispatch.interface import Ending, GenerateRequest
from kvrelay_router.http.client_watch import while_connected
from kvrelay_router.openai.answer_size import AnswerShape
from kvrelay_router.openai.answers.select_format import Normalization, ScoredGroup, SelectAnswer
from kvrelay_router.openai.api_service import ApiService, ServedModels
from kvrelay_router.openai.chat_request import ChatFields
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.planning import Plan, check_request, make_requests
from kvrelay_router.openai.shared_scores import TokenizedChoices, scored_once, tokenize_choices

PASSED_ON = ("cache_salt", "extra_key", "user", "priority")


def _choices(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise wrong_type("it must be a list of strings")
    if not value or not all(value):
        raise invalid("it must have at least one choice, and none that is empty")
    return value


def _normalization(value: Any, _: Any) -> Any:
    """Replaces pydantic's messages, of which there would be one for each value."""
    if value in ("tokens", "none", "unconditional"):
        return value
    raise invalid("it must be 'tokens', 'none' or 'unconditional'")


class SelectFields(RequestModel):
    """The fields beside the text before the choices."""

    model: str
    choices: Annotated[SkipValidation[list[str]], BeforeValidator(_choices)]
    normalization: Annotated[Normalization, WrapValidator(_normalization)] = "tokens"
    unconditional_prompt: Annotated[str, or_default("Answer:")] = "Answer:"
    cache_salt: CacheSalt = ""
    extra_key: Annotated[str, Field(max_length=1024), or_default("")] = ""
    user: Annotated[str, Field(max_length=1024), or_default("")] = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), or_default(0)] = 0

    @property
    def planned(self) -> GenerationFields:
        """As a request that scores its prompts and generates nothing."""
        given = {name: value for name in PASSED_ON if (value := getattr(self, name))}
        return GenerationFields.model_validate({"model": self.model, "max_tokens": 0, "prompt_logprobs": 0, **given})


class SelectText(SelectFields):
    prompt: Annotated[str, Field(min_length=1)]
    add_special_tokens: FlagOn = True


class SelectChat(SelectFields, ChatFields):
    pass


def parse_select(content: dict[str, Any], max_choices: int) -> SelectText | SelectChat:
    """Validates a request body. Raises ApiError."""
    if "messages" in content and "prompt" in content:
        raise wrong("prompt", "give either 'prompt' or 'messages', not both")
    if content.get("stream"):
        raise wrong("stream", "a selection cannot be streamed", "unsupported_parameter")
    choices = content.get("choices")
    if isinstance(choices, list) and len(choices) > max_choices:
        raise wrong("choices", f"at most {max_choices} can be compared at once")
    return parse(SelectChat, content) if "messages" in content else parse(SelectText, content)


MOST_RUN_CHOICES, MOST_RUN_TOKENS = 128, 8192
"""Choices of one request to the dispatcher, and their tokens: its sequences begin without a pause."""


class SelectEndpoint:
    """Tokenizes and plans selections. The returned response runs them: each choice is a sequence that is only scored,
    and the text before the choices is their common prompt."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def serve(self, http: Request) -> Response:
        """Raises ApiError for every mistake in the request; nothing has been submitted by then."""
        service, content = await self._models.read(http)
        names = service.names(http)
        request = parse_select(content, service.settings.max_sequences)
        fields = request.planned
        limits = check_request(service, names, fields)
        planning = _plan(service, names, request, fields, limits)
        plan, groups = await while_connected(http, service.settings.request_timeout_s, planning)
        head = service.answer_head(f"select-{names.unique}", "select", request.model)
        answer = SelectAnswer(head, request.normalization, groups[0], groups[1] if len(groups) > 1 else None)
        return GenerationResponse(service, plan, answer)


async def _plan(
    service: ApiService,
    names: RequestNames,
    request: SelectText | SelectChat,
    fields: GenerationFields,
    limits: ModelLimits,
) -> tuple[Plan, list[ScoredGroup]]:
    if isinstance(request, SelectChat):
        texts = [await _behind_messages(service, request, limits)]
    else:
        special = request.add_special_tokens
        texts = [await _behind_text(service, request.prompt, "prompt", request.choices, limits, special)]
    if request.normalization == "unconditional":
        prompt = request.unconditional_prompt
        texts.append(await _behind_text(service, prompt, "unconditional_prompt", request.choices, limits, True))
    sampling = make_sampling(
        fields,
        service.text.sampling_defaults,
        limits,
        num_prompt_tokens=0,
        max_tokens=0,
        logprobs=None,
        prompt_logprobs=0,
    )
    parts = [_parts(text, sampling) for text in texts]
    prompts = [text.common for text, own in zip(texts, parts, strict=True) for _ in own]
    generates = iter(make_requests(names, service.settings, fields, prompts, [sampling] * len(prompts)))
    groups: list[ScoredGroup] = []
    index = 0
    for text, own in zip(texts, parts, strict=True):
        runs: list[PromptRun] = []
        for endings in own:
            runs.append(_run(service, fields, next(generates), endings, index))
            index += len(endings)
        groups.append(ScoredGroup(runs, index - len(text.endings), len(text.endings), text.first))
    all_runs = [run for group in groups for run in group.runs]
    service.aliases.remember(names, [run.request for run in all_runs])
    shape = AnswerShape(
        prompt_tokens=[text.num_tokens for text in texts], max_tokens=[0] * len(texts), num_sequences=1, num_returned=1
    )
    return Plan(all_runs, shape), groups


def _parts(text: TokenizedChoices, sampling: Sampling) -> list[list[Ending]]:
    """The endings of each run. The first choice also scores what all have in common, the others what only they have."""
    first = other = msgspec.structs.replace(sampling, logprob_start_len=text.first)
    if len(text.endings) > 1:
        first, other = scored_once([first, other], len(text.common))
    parts: list[list[Ending]] = []
    num_tokens = MOST_RUN_TOKENS
    for token_ids in text.endings:
        if not parts or len(parts[-1]) == MOST_RUN_CHOICES or num_tokens + len(token_ids) > MOST_RUN_TOKENS:
            parts.append([])
            num_tokens = 0
        parts[-1].append(Ending(token_ids, other if parts[0] else first))
        num_tokens += len(token_ids)
    return parts


def _run(
    service: ApiService, fields: GenerationFields, generate: GenerateRequest, endings: list[Ending], first_index: int
) -> PromptRun:
    stop = stop_rules(fields)
    # No sequence has a token, so one object is enough.
    detokenizer = service.text.detokenizer([], skip_special_tokens=True)
    choices = [Choice(first_index + at, detokenizer, stop, keeps_token_ids=False) for at in range(len(endings))]
    return PromptRun(msgspec.structs.replace(generate, endings=endings, num_sequences=len(endings)), choices)


async def _behind_text(
    service: ApiService,
    prompt: str,
    param: str,
    choices: Sequence[str],
    limits: ModelLimits,
    add_special_tokens: bool,
) -> TokenizedChoices:
    text = service.text
    _check_size(service, len(prompt), choices)

    async def encode(choice: str) -> list[int]:
        return await text.encode(
            prompt + choice, add_special_tokens=add_special_tokens, max_tokens=limits.max_model_len
        )

    try:
        tokenized = await tokenize_choices(encode, choices, param)
    except TextTooLong as error:
        raise context_length_exceeded(str(error), param) from None
    _check_tokens(service, tokenized, limits, param)
    return tokenized


async def _behind_messages(service: ApiService, request: SelectChat, limits: ModelLimits) -> TokenizedChoices:
    options = request.options
    num_before = count_chars([*request.messages, *options.tools], service.settings.max_body_bytes)
    _check_size(service, num_before, request.choices)
    continuing = ChatOptions(
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=options.add_special_tokens,
        template_kwargs=options.template_kwargs,
        tools=options.tools,
    )

    async def encode(choice: str) -> list[int]:
        messages = request.messages
        if choice:
            messages = _with_choice(messages, choice, is_begun=options.continue_final_message)
        return await service.encode_chat(messages, continuing if choice else options, limits.max_model_len)

    tokenized = await tokenize_choices(encode, request.choices, "messages")
    _check_tokens(service, tokenized, limits, "messages")
    return tokenized


def _with_choice(messages: list[Message], choice: str, *, is_begun: bool) -> list[Message]:
    """The choice ends the final message if that is continued, and else is the next one."""
    if not is_begun:
        return [*messages, {"role": "assistant", "content": choice}]
    final = messages[-1]
    content = final["content"]
    if not isinstance(content, str):
        *parts, last = content
        return [*messages[:-1], {**final, "content": [*parts, {**last, "text": last["text"] + choice}]}]
    return [*messages[:-1], {**final, "content": content + choice}]


def _check_size(service: ApiService, num_before: int, choices: Sequence[str]) -> None:
    """Raises 400 for choices that, each with the text before it, have more characters than a body may have bytes: a
    tokenizer may have to encode all of them whole."""
    total = num_before * len(choices) + sum(map(len, choices))
    if total > service.settings.max_body_bytes:
        raise wrong(
            "choices",
            f"{len(choices)} choices behind a text of {num_before} characters have {total} together, and at most "
            f"{service.settings.max_body_bytes} are allowed; compare fewer at once",
        )


def _check_tokens(service: ApiService, text: TokenizedChoices, limits: ModelLimits, param: str) -> None:
    allowed_output(text.longest, RequestedOutput(asked=0, default=None), limits, param)
    size = service.text.tokenizer.vocab_size
    check_tokenized(text.common, size, limits, param)
    for ending in text.endings:
        check_tokenized(ending, size, limits, "choices")
