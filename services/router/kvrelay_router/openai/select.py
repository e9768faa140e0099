"""POST /v1/select: which of several choices is the likeliest behind a text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field, SkipValidation, WithJsonSchema, WrapValidator

from kvrelay.protocol.packed_logprobs import own_logprobs
from kvrelay.protocol.sampling import Sampling
from kvrelay.text.chat_template import Message
from kvrelay.text.choice import Choice, StopRules
from kvrelay.text.request.api_error import context_length_exceeded, wrong
from kvrelay.text.request.generation_fields import GenerationFields
from kvrelay.text.request.parsing import FlagOn, OrDefault, RequestModel, invalid, parse, wrong_type
from kvrelay.text.request.sampling_fields import CacheSalt
from kvrelay.text.request.validation import (
    ModelLimits,
    RequestedOutput,
    allowed_output,
    check_tokenized,
    make_sampling,
)
from kvrelay.text.service import TextTooLong, count_chars
from kvrelay_router.access.identity import RequestNames
from kvrelay_router.dispatch.interface import Ending, GenerateRequest
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.answer_format import LOWEST, AnswerFormat
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.chat_request import ChatFields
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.planning import (
    PROMPT_TOKEN_BYTES,
    Plan,
    check_request,
    make_requests,
    num_common,
    num_equal,
    scored_once,
)

Normalization = Literal["tokens", "none", "unconditional"]
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


_CHOICES: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}


class SelectFields(RequestModel):
    """The fields beside the text before the choices."""

    model: str
    choices: Annotated[SkipValidation[list[str]], BeforeValidator(_choices), WithJsonSchema(_CHOICES)]
    normalization: Annotated[Normalization, WrapValidator(_normalization)] = "tokens"
    unconditional_prompt: Annotated[str, OrDefault("Answer:")] = "Answer:"
    cache_salt: CacheSalt = ""
    extra_key: Annotated[str, Field(max_length=1024), OrDefault("")] = ""
    user: Annotated[str, Field(max_length=1024), OrDefault("")] = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), OrDefault(0)] = 0

    @property
    def planned(self) -> GenerationFields:
        """The fields of a request that scores these prompts and generates nothing."""
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


async def plan_select(
    service: ApiService, names: RequestNames, request: SelectText | SelectChat
) -> tuple[Plan, list[ScoredGroup]]:
    """The plan, and its runs by the text behind which they score the choices: the request's own, and for unconditional
    scores another. Raises ApiError for every mistake in the request."""
    fields = request.planned
    limits = await check_request(service, names, fields)
    if isinstance(request, SelectChat):
        param, encode = "messages", _chat_encoder(service, request, limits)
        num_before = count_chars([*request.messages, *request.options.tools], service.settings.max_body_bytes)
    else:
        param, special, num_before = "prompt", request.add_special_tokens, len(request.prompt)
        encode = _text_encoder(service, request.prompt, param, limits, add_special_tokens=special)
    texts = [await _tokenize(service, encode, num_before, request.choices, limits, param)]
    if request.normalization == "unconditional":
        param, prompt = "unconditional_prompt", request.unconditional_prompt
        encode = _text_encoder(service, prompt, param, limits)
        texts.append(await _tokenize(service, encode, len(prompt), request.choices, limits, param))
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
    caller = names.caller.share_of(fields.user)
    generates = iter(make_requests(names, caller, service.settings, fields, prompts, [sampling] * len(prompts)))
    groups: list[ScoredGroup] = []
    index = 0
    for text, own in zip(texts, parts, strict=True):
        runs: list[PromptRun] = []
        for endings in own:
            runs.append(_run(service, next(generates), endings, index))
            index += len(endings)
        groups.append(ScoredGroup(runs, index - len(text.endings), len(text.endings), text.first))
    all_runs = [run for group in groups for run in group.runs]
    service.aliases.remember(names, [run.request for run in all_runs])
    memory_bytes = sum(text.num_tokens for text in texts) * PROMPT_TOKEN_BYTES
    return Plan(all_runs, caller, memory_bytes), groups


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


def _run(service: ApiService, generate: GenerateRequest, endings: list[Ending], first_index: int) -> PromptRun:
    # No sequence generates tokens, so nothing stops, and the choices can share one detokenizer.
    detokenizer, stop = service.text.detokenizer([], skip_special_tokens=True), StopRules([], frozenset(), 0, False)
    choices = [Choice(first_index + at, detokenizer, stop, keeps_token_ids=False) for at in range(len(endings))]
    return PromptRun(msgspec.structs.replace(generate, endings=endings, num_sequences=len(endings)), choices)


class TokenizedChoices(msgspec.Struct, frozen=True):
    """`common` are the tokens with which a text begins behind which any of the choices stands, and `endings` what
    follows them, at least one token each. The score of every choice begins at position `first`, which is 1 or more."""

    common: list[int]
    endings: list[list[int]]
    first: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the common part, and of all endings."""
        return len(self.common) + sum(map(len, self.endings))


Encode = Callable[[str], Awaitable[list[int]]]
"""Returns the tokens of a text with a choice behind it, or with none."""


def _text_encoder(
    service: ApiService, prompt: str, param: str, limits: ModelLimits, *, add_special_tokens: bool = True
) -> Encode:
    async def encode(choice: str) -> list[int]:
        text, longest = prompt + choice, limits.max_model_len
        try:
            return await service.text.encode(text, add_special_tokens=add_special_tokens, max_tokens=longest)
        except TextTooLong as error:
            raise context_length_exceeded(str(error), param) from None

    return encode


def _chat_encoder(service: ApiService, request: SelectChat, limits: ModelLimits) -> Encode:
    options = request.options
    continuing = msgspec.structs.replace(options, add_generation_prompt=False, continue_final_message=True)

    async def encode(choice: str) -> list[int]:
        if not choice:
            return await service.encode_chat(request.messages, options, limits.max_model_len)
        messages = _with_choice(request.messages, choice, is_begun=options.continue_final_message)
        return await service.encode_chat(messages, continuing, limits.max_model_len)

    return encode


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


async def _tokenize(
    service: ApiService, encode: Encode, num_before: int, choices: Sequence[str], limits: ModelLimits, param: str
) -> TokenizedChoices:
    """Tokenizes a text of `num_before` characters, which is of the field `param`, with each of the choices.

    A text may have other tokens at its end once a choice follows. The scores of all choices therefore begin at the
    first token by which the text alone differs from that with any of them. Raises ApiError, also for a text without
    tokens and for a choice that adds none.
    """
    total = num_before * len(choices) + sum(map(len, choices))
    if total > service.settings.max_body_bytes:  # a tokenizer may have to encode all of them whole
        raise wrong(
            "choices",
            f"{len(choices)} choices behind a text of {num_before} characters have {total} together, and at most "
            f"{service.settings.max_body_bytes} are allowed; compare fewer at once",
        )
    share = LoopShare()
    alone = await encode("")
    if not alone:
        raise wrong(param, "it has no tokens")
    rows: list[list[int]] = []
    num_alone = len(alone)
    for choice in choices:
        row = await encode(choice)
        num_alone = num_equal(alone, row, num_alone)
        rows.append(row)
        await share.pause()
    first = max(1, num_alone)
    for index, row in enumerate(rows):
        if len(row) <= first:
            raise wrong(f"choices[{index}]", "it adds no token to the text that can be scored")
    allowed_output(max(map(len, rows)), RequestedOutput(asked=0, default=None), limits, param)
    common, size = num_common(rows), service.text.tokenizer.vocab_size
    text = TokenizedChoices(rows[0][:common], [row[common:] for row in rows], first)
    check_tokenized(text.common, size, limits, param)
    for ending in text.endings:
        check_tokenized(ending, size, limits, "choices")
    return text


class ScoredGroup(msgspec.Struct, frozen=True):
    """The runs of all choices behind one text. Their choices are numbered from `first_index` on.

    The scores of all begin at position `first_scored`. The first one has those of the prompt, which are scores of the
    others too.
    """

    runs: Sequence[PromptRun]
    first_index: int
    num_choices: int
    first_scored: int

    @property
    def num_shared_scores(self) -> int:
        """Scored tokens that all choices begin with."""
        return max(0, len(self.runs[0].request.prompt_ids) - self.first_scored)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, which is counted once, and of all endings."""
        num_repeated = (len(self.runs) - 1) * len(self.runs[0].request.prompt_ids)
        return sum(run.request.num_prompt_tokens for run in self.runs) - num_repeated


class SelectFormat(AnswerFormat):
    """One JSON object. With unconditional scores, the second of `groups` has the same choices behind another text."""

    def __init__(self, head: dict[str, Any], normalization: Normalization, groups: Sequence[ScoredGroup]) -> None:
        self._head, self._normalization, self._groups = head, normalization, groups
        self._sums: dict[int, float] = {}
        self._shared: dict[int, float] = {}  # sums of what all choices of a group have in common

    def keep(self, run: PromptRun, choice: Choice) -> bytes:
        """Adds up the log-probabilities that end a sequence."""
        group = self._groups[choice.index >= self._groups[0].num_choices]
        logprobs, run.prompt_logprobs = own_logprobs(run.prompt_logprobs), ()
        logprobs = np.maximum(logprobs, LOWEST)
        num_shared = 0
        if choice.index == group.first_index:
            num_shared = group.num_shared_scores
            self._shared[group.first_index] = float(logprobs[:num_shared].sum())
        self._sums[choice.index] = float(logprobs[num_shared:].sum())
        return b""

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        totals, *unconditional = map(self._totals, self._groups)
        scores: list[dict[str, Any]] = []
        for index, (total, num_tokens) in enumerate(totals):
            score = total / num_tokens if self._normalization == "tokens" else total
            fields: dict[str, Any] = {"index": index, "score": score, "logprob": total, "num_tokens": num_tokens}
            for others in unconditional:
                fields["unconditional_logprob"] = others[index][0]
                fields["score"] = total - others[index][0]
            scores.append(fields)
        best = max(scores, key=lambda each: float(each["score"]))
        return {**self._head, "selected": best["index"], "scores": scores, "usage": usage | self._usage()}

    def _totals(self, group: ScoredGroup) -> list[tuple[float, int]]:
        """Each choice's log-likelihood and number of tokens."""
        shared, index = self._shared[group.first_index], group.first_index
        totals: list[tuple[float, int]] = []
        for run in group.runs:
            num_before = len(run.request.prompt_ids) - group.first_scored
            for ending in run.request.endings:
                totals.append((shared + self._sums[index], num_before + len(ending.token_ids)))
                index += 1
        return totals

    def _usage(self) -> dict[str, Any]:
        """Each text is counted once, and not for each of its choices."""
        prompt_tokens = sum(group.num_prompt_tokens for group in self._groups)
        cached = sum(min(run.cached_tokens for run in group.runs) for group in self._groups)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
