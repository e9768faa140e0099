"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.dispatch.interface import ModelLimits
from kvrelay_router.http.api_error import ApiError
from kvrelay_router.http.body import read_json_object
from kvrelay_router.openai.answers.choice import Choice, StopRules
from kvrelay_router.openai.answers.completion_format import CompletionFormat
from kvrelay_router.openai.answers.prompt_scores import extended, most
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.request_validation import (
    RequestedOutput,
    allowed_output,
    check_beams,
    check_model,
    check_samples,
    check_scores,
    check_token_ids,
    check_tokenized,
    check_vocabulary,
    known_limits,
    make_requests,
    make_sampling,
    make_seed,
)
from kvrelay_router.openai.schema.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest, parse_completion
from kvrelay_router.text.service import DecodedPrompt, TextService


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a request as tokens; with `echo`, also as the text that answers begin with."""

    token_ids: list[list[int]]
    echoed: list[DecodedPrompt]


class CompletionsEndpoint:
    """Serves text completions."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def serve(self, http: Request) -> Response:
        """Validates everything, then hands over to the response."""
        service = self._service
        request = parse_completion(await read_json_object(http, service.settings.max_body_bytes))
        check_model(service.settings, request.model)
        service.rate_limiter.check_priority(service.names(http).key, request.priority)
        limits = known_limits(service.dispatcher)
        check_vocabulary(request, limits)
        num_prompts = len(request.prompt)
        num_each = max(request.num_sequences, request.best_of or 1)
        if num_prompts * num_each > service.settings.max_sequences:
            raise ApiError(
                f"At most {service.settings.max_sequences} completions can be asked for at once", param="prompt"
            )
        prompts = await self._tokenize(request, limits)
        runs = self._plan(http, request, prompts, limits)
        answer = CompletionFormat(service, f"cmpl-{service.names(http).unique}", request, runs, prompts.echoed)
        return GenerationResponse(
            service,
            runs,
            extended(answer, request, service.text.tokenizer, runs),
            stream=request.stream,
            include_usage=request.include_usage,
        )

    async def _tokenize(self, request: CompletionRequest, limits: ModelLimits) -> Prompts:
        text = self._service.text
        token_ids: list[list[int]] = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                token_ids.append(await text.encode(prompt, add_special_tokens=request.add_special_tokens))
                check_tokenized(token_ids[-1], text.tokenizer.vocab_size, limits, "prompt")
            else:
                check_token_ids(prompt, limits, "prompt")
                token_ids.append(prompt)
            if not token_ids[-1]:
                raise ApiError("Invalid value for 'prompt': it must not be empty", param="prompt")
        whole = token_ids
        room = limits.max_model_len - (DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens)
        token_ids = [request.truncated(ids, room) for ids in whole]
        echoed = []
        if request.echo:
            for prompt, ids, before in zip(request.prompt, token_ids, whole, strict=True):
                if isinstance(prompt, str) and len(ids) == len(before):
                    located = await text.locate_tokens(prompt, add_special_tokens=request.add_special_tokens)
                else:
                    located = await text.decode_prompt(ids, skip_special_tokens=request.skip_special_tokens)
                echoed.append(located)
        return Prompts(token_ids, echoed)

    def _plan(
        self, http: Request, request: CompletionRequest, prompts: Prompts, limits: ModelLimits
    ) -> list[PromptRun]:
        service = self._service
        output = RequestedOutput(asked=request.max_tokens, default=DEFAULT_MAX_TOKENS)
        ranked = request.num_sequences > request.n
        if (num_scores := most(request.prompt_logprobs, request.logprobs if request.echo else None)) is not None:
            for ids in prompts.token_ids:
                check_scores(len(ids), num_scores)
        samplings = []
        for ids in prompts.token_ids:
            max_tokens = allowed_output(len(ids), output, limits, "prompt")
            check_beams(request, len(ids), max_tokens, limits)
            check_samples(request, len(ids), max_tokens, limits)
            samplings.append(
                make_sampling(
                    request,
                    service.text.sampling_defaults,
                    max_tokens=max_tokens,
                    logprobs=0 if ranked and request.logprobs is None else request.logprobs,
                    prompt_logprobs=num_scores,
                    seed=make_seed(request.seed),
                )
            )
        requests = make_requests(service.names(http), service.settings, request, prompts.token_ids, samplings)
        service.aliases.remember(service.names(http), requests)
        stop = StopRules(
            request.stop, frozenset(request.stop_token_ids), request.min_tokens, request.include_stop_str_in_output
        )
        runs = []
        for number, each in enumerate(requests):
            offset = len(prompts.echoed[number].text) if request.echo else 0
            first = number * request.num_sequences
            runs.append(PromptRun(each, _choices(service.text, request, each.prompt_ids, stop, first, offset)))
        return runs


def _choices(
    text: TextService, request: CompletionRequest, prompt_ids: list[int], stop: StopRules, first: int, offset: int
) -> list[Choice]:
    return [
        Choice(
            first + sequence,
            text.detokenizer(prompt_ids, skip_special_tokens=request.skip_special_tokens),
            stop,
            text_offset=offset,
        )
        for sequence in range(request.num_sequences)
    ]
