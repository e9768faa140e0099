"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvrelay_router.api.admission import (
    OutputLimits,
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
from kvrelay_router.api.answer import Collected, beam_scores
from kvrelay_router.api.body import read_json_object
from kvrelay_router.api.choice import Choice, Piece, StopRules
from kvrelay_router.api.delivery import GenerationResponse
from kvrelay_router.api.generation import PromptRun, Step
from kvrelay_router.api.logprobs import chat_logprobs
from kvrelay_router.api.prompt_scores import extended
from kvrelay_router.api.schema.chat import ChatRequest, parse_chat
from kvrelay_router.api.service import ApiService
from kvrelay_router.dispatch.interface import ModelLimits

NOTHING_ELSE = b',"logprobs":null,"finish_reason":null'


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
        service.door.check_priority(service.names(http).key, request.priority)
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
        output = OutputLimits(asked=request.wanted_tokens, default=None, param=param)
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


class ChatFormat:
    """Writes chat completions."""

    def __init__(self, service: ApiService, answer_id: str, request: ChatRequest) -> None:
        self._tokenizer = service.text.tokenizer
        self._request = request
        self._head = service.answer_head(answer_id, "chat.completion")
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._prefix = b"data: " + orjson.dumps(self._chunk_head)[:-1] + b',"choices":[{"index":'
        self._suffix = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"
        self._is_plain = not request.logprobs and not request.return_token_ids

    def chunk(self, step: Step) -> bytes:
        """The role at first; then an event a piece, none while everything is withheld."""
        piece, choice = step.piece, step.choice
        opening = b""
        if not choice.started:
            choice.started = True
            opening = self._opening(step)
        if not piece.text and piece.finish_reason is None:
            return opening
        around = self.around_text(choice.index) if piece.finish_reason is None else None
        if around is not None:
            return opening + around[0] + orjson.dumps(piece.text) + around[1]
        delta = b'{"content":' + orjson.dumps(piece.text) + b"}" if piece.text else b"{}"
        rest: dict[str, Any] = {
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        rest |= beam_scores(piece)
        if self._request.return_token_ids:
            rest["token_ids"] = piece.token_ids
        return opening + self._event(choice.index, delta, b"," + orjson.dumps(rest)[1:-1])

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """See `AnswerFormat`."""
        if not self._is_plain:
            return None
        return b'%b%d,"delta":{"content":' % (self._prefix, index), b"}%b%b" % (NOTHING_ELSE, self._suffix)

    def _opening(self, step: Step) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        event = self._event(step.choice.index, delta, NOTHING_ELSE)
        if not self._request.return_token_ids:
            return event
        prompt = b',"prompt_token_ids":' + orjson.dumps(step.run.request.prompt_ids) + b"}\n\n"
        return event[: -len(b"}\n\n")] + prompt

    def _event(self, index: int, delta: bytes, rest: bytes) -> bytes:
        return b'%b%d,"delta":%b%b%b' % (self._prefix, index, delta, rest, self._suffix)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last event: no choice, but the usage."""
        return b"data: " + orjson.dumps({**self._chunk_head, "choices": [], "usage": usage}) + b"\n\n"

    def whole(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain answer."""
        answer: dict[str, Any] = {
            **self._head,
            "choices": [self._choice(each.choice.index, each.whole()) for each in choices],
            "usage": usage,
        }
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = choices[0].run.request.prompt_ids
        return answer

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        content: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **beam_scores(piece),
        }
        if self._request.return_token_ids:
            content["token_ids"] = piece.token_ids
        return content

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._tokenizer, piece.logprobs, self._request.top_logprobs)
