"""A real HTTP server over a scripted dispatcher, with clients for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai

from kvrelay.fleet.key_limits import SharedLimits
from kvrelay.fleet.shared_responses import StoreBounds
from kvrelay.protocol.sampling import FinishReason
from kvrelay.text.service import TextService
from kvrelay_router.access.key_ring import AcceptedKeys, KeyRing
from kvrelay_router.asgi.app import create_app
from kvrelay_router.http.body import PendingMemory
from kvrelay_router.http.http_server import DEFAULT_LIMITS, ConnectionLimits, HttpServer, bind, serve
from kvrelay_router.openai.api_service import ApiSettings, FurtherModel
from kvrelay_router.openai.request_metrics import RequestMetrics
from kvrelay_router.responses.response_store import OwnResponses, ResponseStore
from tests.fakes.scripted_dispatcher import Script, ScriptedDispatcher
from tests.fakes.waiting import PATIENCE_S

MODEL = "test-model"


class Router:
    """A real HTTP server over a scripted dispatcher, with clients for it."""

    def __init__(
        self, server: HttpServer, dispatcher: ScriptedDispatcher, text: TextService, memory: PendingMemory
    ) -> None:
        self.server = server
        self.memory = memory
        self.dispatcher = dispatcher
        self.text = text
        self.url = f"http://127.0.0.1:{server.port}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S)
        self.openai = openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def tokens(self, text: str) -> list[int]:
        """Plain tokens of a text."""
        return self.text.tokenizer.encode(text, add_special_tokens=False)

    def answers(self, text: str, **script: Any) -> None:
        """From now on every sequence gets this text and the end-of-sequence token."""
        end = self.tokens("<|im_end|>") if script.get("finish") in (None, FinishReason.STOP_TOKEN) else []
        reply = Script(self.tokens(text) + end, **script)
        self.dispatcher.script = lambda request, sequence: reply

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """A request to the served model."""
        return await self.http.post(path, json={"model": MODEL, **body})

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The data of a stream's events before [DONE]."""
        answer = await self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def typed_events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The data of all events of a stream. Their names are the types of the data."""
        events = []
        answer = await self.post(path, stream=True, **body)
        assert answer.status_code == 200
        lines = [line for line in answer.content.decode().split("\n") if line]
        for name, data in zip(lines[::2], lines[1::2], strict=True):
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
        return events

    async def close(self) -> None:
        """Clients first, so that the server has no connection to wait for."""
        await self.http.aclose()
        await self.openai.close()
        await self.server.stop()


@asynccontextmanager
async def running_router(
    text: TextService,
    *,
    limits: SharedLimits | None = None,
    connections: ConnectionLimits = DEFAULT_LIMITS,
    metrics: RequestMetrics | None = None,
    graceful_timeout_s: float = 2.0,
    memory: PendingMemory | None = None,
    further: Sequence[FurtherModel] = (),
    responses: ResponseStore | None = None,
    api_keys: tuple[str, ...] = (),
    **settings: Any,
) -> AsyncIterator[Router]:
    """A router with these settings. `responses`: by default a store in memory."""
    responses = OwnResponses(StoreBounds()) if responses is None else responses
    dispatcher = ScriptedDispatcher(lambda request, sequence: Script([]))
    memory = memory or PendingMemory()
    api = ApiSettings(model_names=(MODEL, "alias"), **{"keys": KeyRing(AcceptedKeys(api_keys))} | settings)
    app = create_app(api, dispatcher, text, limits, metrics, memory, further=further, responses=responses)
    server = await serve(app, bind("127.0.0.1", 0), graceful_timeout_s=graceful_timeout_s, limits=connections)
    router = Router(server, dispatcher, text, memory)
    router.answers("An otter is a mammal.")
    try:
        yield router
    finally:
        await router.close()
