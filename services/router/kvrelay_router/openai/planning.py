"""Plans what a validated request runs: one `PromptRun` a prompt, with its sampling parameters and its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.protocol.sampling import Sampling
from kvrelay_router.access.request_names import RequestNames
from kvrelay_router.dispatch.interface import ModelLimits
from kvrelay_router.openai.answers.choice import Choice, StopRules
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.request_validation import (
    RequestedOutput,
    allowed_output,
    check_beams,
    check_model,
    check_samples,
    check_scores,
    check_vocabulary,
    known_limits,
    make_requests,
    make_sampling,
    make_seed,
)
from kvrelay_router.openai.schema.beam_fields import BeamFields
from kvrelay_router.text.service import DecodedPrompt


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as tokens. `echo` is its text if the answer begins with it."""

    token_ids: list[int]
    echo: DecodedPrompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFields:
    """The values that chat and text completions take from different fields of their requests."""

    prompt_param: str  # the field with the prompt, for error messages
    output: RequestedOutput
    logprobs: int | None
    prompt_logprobs: int | None


def check_request(service: ApiService, names: RequestNames, request: BeamFields) -> ModelLimits:
    """Checks everything that needs no prompt tokens. Returns the model's limits; raises ApiError."""
    check_model(service.settings, request.model)
    service.rate_limiter.check_priority(names.key, request.priority)
    limits = known_limits(service.dispatcher)
    check_vocabulary(request, limits)
    return limits


def plan_generation(
    service: ApiService,
    names: RequestNames,
    request: BeamFields,
    fields: EndpointFields,
    prompts: Sequence[TokenizedPrompt],
    limits: ModelLimits,
) -> list[PromptRun]:
    """The runs of a request, in the order of its prompts. Raises ApiError if the model cannot run one of them."""
    samplings = [_sampling(service, request, fields, len(prompt.token_ids), limits) for prompt in prompts]
    token_ids = [prompt.token_ids for prompt in prompts]
    generates = make_requests(names, service.settings, request, token_ids, samplings)
    service.aliases.remember(names, generates)
    return [
        PromptRun(generate, _choices(service, request, prompt, number * request.num_sequences))
        for number, (generate, prompt) in enumerate(zip(generates, prompts, strict=True))
    ]


def _sampling(
    service: ApiService, request: BeamFields, fields: EndpointFields, num_prompt_tokens: int, limits: ModelLimits
) -> Sampling:
    max_tokens = allowed_output(num_prompt_tokens, fields.output, limits, fields.prompt_param)
    check_beams(request, num_prompt_tokens, max_tokens, limits)
    check_samples(request, num_prompt_tokens, max_tokens, limits)
    if fields.prompt_logprobs is not None:
        check_scores(num_prompt_tokens, fields.prompt_logprobs)
    return make_sampling(
        request,
        service.text.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        seed=make_seed(request.seed),
    )


def _choices(service: ApiService, request: BeamFields, prompt: TokenizedPrompt, first_index: int) -> list[Choice]:
    stop = StopRules(
        request.stop, frozenset(request.stop_token_ids), request.min_tokens, request.include_stop_str_in_output
    )
    return [
        Choice(
            first_index + sequence,
            service.text.detokenizer(prompt.token_ids, skip_special_tokens=request.skip_special_tokens),
            stop,
            text_offset=0 if prompt.echo is None else len(prompt.echo.text),
            keeps_token_ids=request.return_token_ids or request.running_usage,
        )
        for sequence in range(request.num_sequences)
    ]
