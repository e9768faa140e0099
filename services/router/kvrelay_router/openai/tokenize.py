"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.generation_fields import Flag, FlagOn
from kvrelay.text.request.parsing import NaturalNumbers, RequestModel, parse
from kvrelay.text.request.validation import check_token_ids
from kvrelay.text.service import TextTooLong
from kvrelay_router.http.client_watch import while_connected
from kvrelay_router.http.error_response import json_response
from kvrelay_router.openai.api_service import ApiService, ServedModels, check_model, known_limits
from kvrelay_router.openai.chat_request import ChatFields


class TokenizeText(RequestModel):
    prompt: str
    model: str | None = None
    add_special_tokens: FlagOn = True
    return_token_strs: Flag = False


class TokenizeChat(ChatFields):
    model: str | None = None
    return_token_strs: Flag = False


class DetokenizeTokens(RequestModel):
    """The body of POST /detokenize. Special tokens are part of the text by default."""

    tokens: NaturalNumbers
    model: str | None = None
    skip_special_tokens: Flag = False


class TokenRoutes:
    """The endpoints of the tokenizer. They need workers only for the model's limits."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

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
            token_ids = await while_connected(http, service.settings.request_timeout_s, encoding)
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
        check_token_ids(request.tokens, known_limits(service.dispatcher), "tokens")
        text = await service.text.decode(request.tokens, skip_special_tokens=request.skip_special_tokens)
        return json_response({"prompt": text})
