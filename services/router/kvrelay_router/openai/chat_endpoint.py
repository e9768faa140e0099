"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.dispatch.interface import ModelLimits
from kvrelay_router.http.body import read_json_object
from kvrelay_router.openai.answers.chat_format import ChatFormat
from kvrelay_router.openai.answers.choice import Choice, StopRules
from kvrelay_router.openai.answers.prompt_scores import extended
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
    check_tokenized,
    check_vocabulary,
    known_limits,
    make_requests,
    make_sampling,
    make_seed,
)
from kvrelay_router.openai.schema.chat_request import ChatRequest, parse_chat


class ChatEndpoint:
    """Serves chat completions."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def serve(self, http: Request) -> Response:
        """Validates everything, then hands over to the response."""
        service = self._service
        request = parse_chat(await read_json_object(http, service.settings.max_body_bytes))
        check_model(service.settings, request.model)
        options = request.options
        service.rate_limiter.check_priority(service.names(http).key, request.priority)
        limits = known_limits(service.dispatcher)
        check_vocabulary(request, limits)
        prompt_ids = await service.encode_chat(request.messages, options)
        check_tokenized(prompt_ids, service.text.tokenizer.vocab_size, limits, "messages")
        room = limits.max_model_len - (1 if request.wanted_tokens is None else request.wanted_tokens)
        run = self._plan(http, request, request.truncated(prompt_ids, room), limits)
        answer = ChatFormat(service, f"chatcmpl-{service.names(http).unique}", request)
        return GenerationResponse(
            service,
            [run],
            extended(answer, request, service.text.tokenizer, [run]),
            stream=request.stream,
            include_usage=request.include_usage,
        )

    def _plan(self, http: Request, request: ChatRequest, prompt_ids: list[int], limits: ModelLimits) -> PromptRun:
        service = self._service
        param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        output = RequestedOutput(asked=request.wanted_tokens, default=None, param=param)
        max_tokens = allowed_output(len(prompt_ids), output, limits, "messages")
        check_beams(request, len(prompt_ids), max_tokens, limits)
        check_samples(request, len(prompt_ids), max_tokens, limits)
        if request.prompt_logprobs is not None:
            check_scores(len(prompt_ids), request.prompt_logprobs)
        sampling = make_sampling(
            request,
            service.text.sampling_defaults,
            max_tokens=max_tokens,
            logprobs=request.top_logprobs if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            seed=make_seed(request.seed),
        )
        (generate,) = make_requests(service.names(http), service.settings, request, [prompt_ids], [sampling])
        service.aliases.remember(service.names(http), [generate])
        stop = StopRules(
            request.stop, frozenset(request.stop_token_ids), request.min_tokens, request.include_stop_str_in_output
        )
        choices = [
            Choice(
                index,
                service.text.detokenizer(prompt_ids, skip_special_tokens=request.skip_special_tokens),
                stop,
            )
            for index in range(request.n)
        ]
        return PromptRun(generate, choices)
