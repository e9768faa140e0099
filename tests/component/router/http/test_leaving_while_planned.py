"""Clients that leave, and deadlines that pass, while a long text is tokenized."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvrelay.text import service as text_service
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_router.http.body import PendingMemory
from tests.component.router.http.test_streams_under_load import connect, connections
from tests.component.router.rig import MODEL
from tests.fakes.waiting import PATIENCE_S, until

LONG = "a long text " * 20_000
MESSAGES: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": LONG}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": LONG},
    "/v1/chat/completions": MESSAGES,
    "/v1/chat/completions/batch": {"model": MODEL, "messages": [MESSAGES["messages"]]},
    "/v1/messages": {**MESSAGES, "max_tokens": 4},
    "/v1/responses": {"model": MODEL, "input": LONG},
    "/tokenize": {"model": MODEL, "prompt": LONG},
}


class BlockedTokenizer:
    """In place of `Tokenizer.encode`: an encoding of long texts that ends with the test."""

    def __init__(self) -> None:
        self.num_started = 0
        self.may_end = threading.Event()
        self._encode = Tokenizer.encode

    def encode(self, tokenizer: Tokenizer, text: str, **more: Any) -> list[int]:
        if len(text) >= len(LONG):
            self.num_started += 1
            assert self.may_end.wait(PATIENCE_S)
        return self._encode(tokenizer, text, **more)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockedTokenizer]:
    blocked = BlockedTokenizer()
    monkeypatch.setattr(Tokenizer, "encode", lambda tokenizer, text, **more: blocked.encode(tokenizer, text, **more))
    monkeypatch.setattr(text_service, "MAX_CHARS_PER_TOKEN", len(LONG))
    yield blocked
    blocked.may_end.set()


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_leaves_nothing_behind(
    make_router: Callable[..., Any], blocked: BlockedTokenizer, path: str
) -> None:
    memory = PendingMemory()
    async with make_router(memory=memory) as router:
        _, writer = await connect(router)
        body = json.dumps(BODIES[path]).encode()
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
        await until(lambda: blocked.num_started == 1)
        writer.transport.abort()
        await until(lambda: not connections(router) and not memory.bodies_bytes)
        assert router.dispatcher.requests == []


async def test_the_time_limit_of_a_request_holds_for_its_planning(
    make_router: Callable[..., Any], blocked: BlockedTokenizer
) -> None:
    async with make_router(request_timeout_s=0.05) as router:
        answer = await asyncio.wait_for(router.post("/v1/completions", **BODIES["/v1/completions"]), PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        assert router.dispatcher.requests == []
