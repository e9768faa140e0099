"""The endpoints of the APIs. All generations take one path: read, parse, plan, and answer in the API's form."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.text.request.api_error import ApiError, fields_named
from kvrelay.text.request.completion_request import parse_completion
from kvrelay.text.request.parsing import Flag, FlagOn, NaturalNumbers, RequestModel, parse
from kvrelay.text.request.validation import RequestedOutput, check_token_ids
from kvrelay.text.service import TextTooLong
from kvrelay_router.access.identity import names_of
from kvrelay_router.anthropic import messages_request
from kvrelay_router.anthropic.messages_format import MessageFormat
from kvrelay_router.http.body import while_connected
from kvrelay_router.http.error_response import json_response
from kvrelay_router.openai.api_service import ApiService, ServedModels, check_model, known_limits
from kvrelay_router.openai.chat_format import ChatFormat
from kvrelay_router.openai.chat_planning import plan_chat
from kvrelay_router.openai.chat_request import ChatFields, ChatRequest, parse_batch, parse_chat
from kvrelay_router.openai.completions import CompletionFormat, plan_completion
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.openai.generative_scoring import ScoringFormat, parse_scoring, plan_scoring
from kvrelay_router.openai.request_metrics import OPERATION_BY_PATH, TIMINGS
from kvrelay_router.openai.select import SelectFormat, parse_select, plan_select
from kvrelay_router.responses import responses_request
from kvrelay_router.responses.response_store import StoredConversations
from kvrelay_router.responses.responses_format import ResponseFormat

T = TypeVar("T")


async def _planned(http: Request, service: ApiService, planning: Coroutine[Any, Any, T]) -> T:
    return await while_connected(http, service.settings.request_timeout_s, planning)


class GenerationEndpoints:
    """Each raises ApiError for every mistake in a request, and has submitted nothing by then: the response that it
    returns runs the plan. Messages and responses are converted to chat completions."""

    def __init__(self, models: ServedModels, conversations: StoredConversations) -> None:
        self._models, self._conversations = models, conversations

    async def completion(self, http: Request) -> Response:
        service, content = await self._models.read(http)
        return await self._complete(http, service, content)

    async def chat(self, http: Request) -> Response:
        service, content = await self._models.read(http)
        return await self._chat(http, service, [parse_chat(content)])

    async def batched_chat(self, http: Request) -> Response:
        """As in vLLM: several conversations in one request, each of which is a choice. They share all fields but their
        messages, and their prompts run at the same time."""
        service, content = await self._models.read(http)
        return await self._chat(http, service, parse_batch(content, service.settings.max_sequences))

    async def invocation(self, http: Request) -> Response:
        """The path of hosting platforms such as SageMaker. A body with `messages` is a chat completion, one with
        `prompt` a text completion. Without `model` it is for the router's first one: such a platform has one model
        behind a path."""
        service, content = await self._models.read(http)
        if content.get("model") is None:
            content["model"] = service.settings.model_name
        if "messages" in content:
            return await self._chat(http, service, [parse_chat(content)])
        if "prompt" in content:
            http.scope["state"][TIMINGS].operation = OPERATION_BY_PATH["/v1/completions"]
            return await self._complete(http, service, content)
        raise ApiError("The body must have 'messages' or 'prompt'", param="messages", code="missing_required_parameter")

    async def _complete(self, http: Request, service: ApiService, content: dict[str, Any]) -> Response:
        names, request = names_of(http), parse_completion(content)
        plan, echoed = await _planned(http, service, plan_completion(service, names, request))
        answer = CompletionFormat(service, f"cmpl-{names.unique}", request, plan.runs, echoed)
        return GenerationResponse(service, plan, answer)

    async def _chat(self, http: Request, service: ApiService, requests: list[ChatRequest]) -> Response:
        names = names_of(http)
        plan = await _planned(http, service, plan_chat(service, names, requests))
        return GenerationResponse(service, plan, ChatFormat(service, f"chatcmpl-{names.unique}", requests, plan.runs))

    async def select(self, http: Request) -> Response:
        """Each choice is a sequence that is only scored, and the text before the choices is their common prompt."""
        service, content = await self._models.read(http)
        names, request = names_of(http), parse_select(content, service.settings.max_sequences)
        plan, groups = await _planned(http, service, plan_select(service, names, request))
        head = service.answer_head(f"select-{names.unique}", "select", request.model)
        return GenerationResponse(service, plan, SelectFormat(head, request.normalization, groups))

    async def score(self, http: Request) -> Response:
        """As in vLLM: how likely a token is to follow a query with each item."""
        service, content = await self._models.read(http)
        names, request = names_of(http), parse_scoring(content, service.settings.max_sequences)
        plan = await _planned(http, service, plan_scoring(service, names, request))
        head = service.answer_head(
            f"generative-scoring-{names.unique}", "list", request.model or service.settings.model_name
        )
        return GenerationResponse(service, plan, ScoringFormat(head, request, plan.runs))

    async def message(self, http: Request) -> Response:
        """Anthropic's API. An output that the context has no room for is cut."""
        service, content = await self._models.read(http)
        names, request = names_of(http), parse(messages_request.MessagesRequest, content)
        output = RequestedOutput(asked=None, default=request.max_tokens)
        with fields_named(messages_request.FIELD_NAMES):
            chat_request = parse_chat(messages_request.chat_body(request, content, service.text))
            plan = await _planned(http, service, plan_chat(service, names, [chat_request], output))
        (run,) = plan.runs
        return GenerationResponse(service, plan, MessageFormat(f"msg_{names.unique}", chat_request, run))

    async def response(self, http: Request) -> Response:
        service, content = await self._models.read(http)
        names, request = names_of(http), responses_request.parse_response(content)
        owner = names.caller.owner
        items, earlier = await self._conversations.items(request.input, request.previous_response_id, owner)
        messages = responses_request.input_messages(items, [orjson.loads(item) for item in earlier])
        most = service.text.sampling_defaults.max_tokens
        output = RequestedOutput(
            asked=request.max_output_tokens, default=None, model_default=most, param="max_output_tokens"
        )
        with fields_named(responses_request.FIELD_NAMES):
            chat_request = parse_chat(responses_request.chat_body(request, messages, content))
            planning = plan_chat(service, names, [chat_request], output, prompt_param="input")
            plan = await _planned(http, service, planning)
        keep = self._conversations.keep(names.unique, owner, earlier, items) if request.store else None
        (run,) = plan.runs
        answer = ResponseFormat(names.unique, request, run, service.text.tokenizer, keep)
        return GenerationResponse(service, plan, answer)


class TokenizeText(RequestModel):
    prompt: str
    model: str | None = None
    add_special_tokens: FlagOn = True
    return_token_strs: Flag = False


class TokenizeChat(ChatFields):
    model: str | None = None
    return_token_strs: Flag = False


class DetokenizeTokens(RequestModel):
    """Special tokens are part of the text by default."""

    tokens: NaturalNumbers
    model: str | None = None
    skip_special_tokens: Flag = False


class TokenEndpoints:
    """Tokenize prompts or count their tokens, special ones included. Workers give only the model's limits."""

    def __init__(self, models: ServedModels, conversations: StoredConversations) -> None:
        self._models, self._conversations = models, conversations

    async def _read(self, http: Request) -> tuple[ApiService, dict[str, Any]]:
        service, content = await self._models.read(http)
        if isinstance(content.get("model"), str):
            check_model(service.settings, content["model"])
        return service, content

    async def tokenize(self, http: Request) -> Response:
        """Tokenizes a prompt or messages."""
        service, content = await self._read(http)
        if "messages" in content and "prompt" in content:
            raise ApiError("Give either 'prompt' or 'messages', not both", param="prompt")
        request: TokenizeText | TokenizeChat
        if "messages" in content:
            request = parse(TokenizeChat, content)
            encoding = service.encode_chat(request.messages, request.options)
        else:
            request = parse(TokenizeText, content)
            encoding = service.text.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        try:
            token_ids = await _planned(http, service, encoding)
        except TextTooLong as error:
            raise ApiError(str(error), param="prompt") from None
        limits = service.dispatcher.limits()
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": limits.max_model_len if limits else None,
            "tokens": token_ids,
            "token_strs": await service.text.spell(token_ids) if request.return_token_strs else None,
        }
        return json_response(answer)

    async def detokenize(self, http: Request) -> Response:
        service, content = await self._read(http)
        request = parse(DetokenizeTokens, content)
        check_token_ids(request.tokens, await known_limits(service.dispatcher), "tokens")
        text = await service.text.decode(request.tokens, skip_special_tokens=request.skip_special_tokens)
        return json_response({"prompt": text})

    async def count_message(self, http: Request) -> Response:
        """Counts the tokens of a message's prompt."""
        service, content = await self._read(http)
        chat = messages_request.chat_body(parse(messages_request.PromptFields, content), content, service.text)
        return json_response({"input_tokens": await self._count(http, service, chat)})

    async def count_response(self, http: Request) -> Response:
        """Counts the tokens of a response's prompt."""
        service, content = await self._read(http)
        request = responses_request.parse_response(content)
        items, earlier = await self._conversations.items(
            request.input, request.previous_response_id, names_of(http).caller.owner
        )
        messages = responses_request.input_messages(items, [orjson.loads(item) for item in earlier])
        with fields_named(responses_request.FIELD_NAMES):
            chat = responses_request.chat_body(request, messages, content)
            num_tokens = await self._count(http, service, chat)
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def _count(self, http: Request, service: ApiService, chat: dict[str, Any]) -> int:
        request = parse_chat(chat)
        return len(await _planned(http, service, service.encode_chat(request.messages, request.options)))
