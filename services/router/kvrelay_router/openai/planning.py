"""Plans what a validated request runs: one `PromptRun` a prompt, with its sampling parameters and its choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from kvrelay.protocol.grammar import Grammar
from kvrelay.protocol.sampling import ReasoningChannels, ReasoningSpan, Sampling
from kvrelay.text.choice import Choice
from kvrelay.text.grammar_check import GrammarCheck
from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.grammar_fields import GenerationFields
from kvrelay.text.request.validation import (
    ModelLimits,
    RequestedOutput,
    allowed_output,
    check_bad_words,
    check_vocabulary,
    make_sampling,
    stop_rules,
)
from kvrelay.text.service import DecodedPrompt
from kvrelay_router.access.identity import RequestNames, check_session
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.openai.answer_size import AnswerShape, check_answer
from kvrelay_router.openai.api_service import ApiService, check_model, known_limits
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.settings import ApiSettings
from kvrelay_router.openai.shared_scores import share_scores


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt as tokens. `echo` is its text if the answer begins with it. `begins_inside`: it has opened the
    reasoning. `reasoning`: of the output, before what is constrained."""

    token_ids: list[int]
    echo: DecodedPrompt | None = None
    begins_inside: bool = False
    reasoning: ReasoningSpan | ReasoningChannels | None = None


class Plan(msgspec.Struct, frozen=True):
    """The runs of a request, in the order of its prompts, and what their answer may hold."""

    runs: list[PromptRun]
    shape: AnswerShape


class EndpointFields(msgspec.Struct, frozen=True, kw_only=True):
    """The values that chat and text completions take from different fields of their requests."""

    prompt_param: str  # the field with the prompt, for error messages
    output: RequestedOutput
    logprobs: int | None
    prompt_logprobs: int | None
    echo_logprobs: int | None = None  # alternatives of the echoed tokens in the answer
    has_echo: bool = False
    scores_in_choices: bool = False  # each choice has the log-probabilities of its prompt
    grammar: Grammar | None = None  # replaces the request's own
    is_parsed: bool = False  # reasoning or tool calls are looked for in the output


def check_request(service: ApiService, names: RequestNames, request: GenerationFields) -> ModelLimits:
    """Checks everything that needs no prompt tokens. Returns the model's limits; raises ApiError."""
    check_model(service.settings, request.model)
    service.rate_limiter.check_priority(names.key, request.priority)
    limits = known_limits(service.dispatcher)
    check_vocabulary(request, limits)
    return limits


async def plan_generation(
    service: ApiService,
    names: RequestNames,
    request: GenerationFields,
    fields: EndpointFields,
    prompts: Sequence[TokenizedPrompt],
    limits: ModelLimits,
) -> Plan:
    """Raises ApiError if the model cannot run one of the prompts, or if the answer may become too large."""
    share = LoopShare()
    shape = _shape(service, request, fields, prompts, limits)
    samplings: list[Sampling] = []
    bad_words = await service.text.encode_bad_words(request.bad_words)
    check_bad_words(request, bad_words, limits)
    for prompt, max_tokens in zip(prompts, shape.max_tokens, strict=True):
        sampling = make_sampling(
            request,
            service.text.sampling_defaults,
            limits,
            num_prompt_tokens=len(prompt.token_ids),
            max_tokens=max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            bad_words=bad_words,
            grammar=fields.grammar,
            reasoning=prompt.reasoning,
        )
        samplings.append(sampling)
        await share.pause()
    token_ids = [prompt.token_ids for prompt in prompts]
    if fields.scores_in_choices and _only_scores(request, fields, shape.max_tokens):
        samplings = share_scores(token_ids, samplings)
    generates = make_requests(names, service.settings, request, token_ids, samplings)
    generates = with_openings(generates, limits, service.text.grammars)
    service.aliases.remember(names, generates)
    runs = [
        PromptRun(generate, _choices(service, request, fields, prompt, number * request.num_sequences))
        for number, (generate, prompt) in enumerate(zip(generates, prompts, strict=True))
    ]
    return Plan(runs, shape)


def _only_scores(request: GenerationFields, fields: EndpointFields, max_tokens: Sequence[int]) -> bool:
    """Returns whether the answer is nothing but the log-probabilities of the prompts, in one choice each."""
    is_scored = request.prompt_logprobs is not None and not fields.has_echo
    return is_scored and request.num_sequences == 1 and not any(max_tokens)


def _shape(
    service: ApiService,
    request: GenerationFields,
    fields: EndpointFields,
    prompts: Sequence[TokenizedPrompt],
    limits: ModelLimits,
) -> AnswerShape:
    """Raises 400 if the answer may become too large. An output without a length of its own gets the one that fits."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    max_tokens = [allowed_output(length, fields.output, limits, fields.prompt_param) for length in lengths]
    shape = AnswerShape(
        prompt_tokens=lengths,
        max_tokens=max_tokens,
        num_sequences=request.num_sequences,
        num_returned=request.n,
        is_beam_search=request.use_beam_search,
        has_echo=fields.has_echo,
        has_ids=request.return_token_ids,
        logprobs=fields.logprobs,
        echo_logprobs=fields.echo_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        logprob_start_len=max(request.logprob_start_len or 0, 1),
        num_prompt_scores=request.n if fields.scores_in_choices else 1,
        is_stream=request.stream,
    )
    limit_bytes = service.settings.max_answer_bytes
    if fields.output.asked is None and fields.output.default is None and shape.total_bytes > limit_bytes:
        fitting = max(1, shape.tokens_that_fit(limit_bytes))
        shape = msgspec.structs.replace(shape, max_tokens=[min(each, fitting) for each in max_tokens])
    check_answer(shape, limit_bytes)
    return shape


def _choices(
    service: ApiService, request: GenerationFields, fields: EndpointFields, prompt: TokenizedPrompt, first_index: int
) -> list[Choice]:
    text = service.text
    stop = stop_rules(request)
    return [
        Choice(
            first_index + sequence,
            text.detokenizer(
                prompt.token_ids,
                skip_special_tokens=request.skip_special_tokens,
                shows_markers=fields.is_parsed,
            ),
            stop,
            text_offset=0 if prompt.echo is None else len(prompt.echo.text),
            keeps_token_ids=request.return_token_ids or request.running_usage,
        )
        for sequence in range(request.num_sequences)
    ]


def with_openings(
    requests: list[GenerateRequest], limits: ModelLimits, grammars: GrammarCheck
) -> list[GenerateRequest]:
    """The requests, whose grammars were checked, with their openings. All of them have the same grammar, if any."""
    if not limits.jump_forward:
        return requests
    grammar = next((each.sampling.grammar for each in requests if _may_be_forced(each.sampling)), None)
    if grammar is None or not (forced := grammars.opening(grammar)):
        return requests
    return [msgspec.structs.replace(each, opening=opening_of(each.sampling, forced)) for each in requests]


def opening_of(sampling: Sampling, forced: Sequence[int]) -> tuple[int, ...]:
    """The tokens that join an output at its beginning, of those that its grammar forces there. A worker samples at
    least one token behind them, and finds out what a stop token among them means."""
    if not _may_be_forced(sampling):
        return ()
    most = max(0, sampling.max_tokens - 1)
    return tuple(takewhile(lambda token_id: token_id not in sampling.stop_token_ids, forced[:most]))


def _may_be_forced(sampling: Sampling) -> bool:
    """As on workers, no token is forced that has a log-probability, or that limits of tokens may forbid, and the
    grammar has to begin with the output."""
    if sampling.grammar is None:
        return False
    has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    begins_later = sampling.reasoning is not None or sampling.channels is not None
    return not (has_logprobs or begins_later or sampling.limits_tokens or sampling.beams is not None)


def make_requests(
    names: RequestNames,
    settings: ApiSettings,
    fields: GenerationFields,
    prompts: list[list[int]],
    samplings: list[Sampling],
) -> list[GenerateRequest]:
    """Returns one request for each prompt; several are numbered. Raises 400 for an invalid `x-request-timeout`
    or `x-kvrelay-session`."""
    many = len(prompts) > 1
    timeout_s = check_timeout(names.timeout, settings.request_timeout_s)
    session = check_session(names.session)
    tenant = settings.tenants.of(names.key, fields.user)
    return [
        GenerateRequest(
            request_id=f"{names.unique}-{index}" if many else names.unique,
            prompt_ids=prompt_ids,
            sampling=sampling,
            num_sequences=1 if fields.use_beam_search else fields.num_sequences,
            cache_salt=f"{tenant.cache_salt}{fields.salt}",
            session=session or fields.user,
            priority=fields.priority,
            timeout_s=timeout_s,
            trace=names.trace,
            owner=tenant.owner,
            tenant=tenant.tenant,
            weight=tenant.weight,
            text_owner=tenant.text_owner,
        )
        for index, (prompt_ids, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]


def check_timeout(value: str, longest_s: float) -> float:
    """Returns the seconds of the header `x-request-timeout`, at most `longest_s`. Raises 400."""
    if not value:
        return longest_s
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise wrong("x-request-timeout", f"the header is {value[:32]!r} (allowed: seconds, more than 0)")
    return min(timeout_s, longest_s)
