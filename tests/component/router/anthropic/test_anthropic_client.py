"""Anthropic's own client against the router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay_router.dispatch.interface import RequestFailed
from tests.component.router.rig import MODEL, Router
from tests.fakes.waiting import PATIENCE_S

anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")

BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is an otter?"}],
}


@pytest.fixture
async def client(router: Router) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(
        base_url=router.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as opened:
        yield opened


async def test_the_client_collects_the_message_of_a_stream(router: Router, client: Any) -> None:
    router.answers("An otter 🦦 is a mammal.")
    plain = await client.messages.create(**BODY)
    assert [block.text for block in plain.content] == ["An otter 🦦 is a mammal."]
    assert plain._request_id
    async with client.messages.stream(**BODY) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        whole = await stream.get_final_message()
    assert text == plain.content[0].text
    ignored = {"id"}
    assert whole.model_dump(exclude=ignored, exclude_unset=True)["content"][0]["text"] == text
    assert (whole.stop_reason, whole.usage.output_tokens) == (plain.stop_reason, plain.usage.output_tokens)
    assert whole.usage.cache_read_input_tokens == plain.usage.cache_read_input_tokens == 16
    counted = await client.messages.count_tokens(model=MODEL, messages=BODY["messages"])
    assert counted.input_tokens == plain.usage.input_tokens + 16


async def test_the_client_raises_its_own_errors(router: Router, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**BODY, "model": "other"})
    image = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        await client.messages.create(**{**BODY, "messages": [{"role": "user", "content": [image]}]})
    router.answers("An otter", fail_after=2, failure=RequestFailed("the worker was lost", FailureKind.WORKER_LOST))
    with pytest.raises(anthropic.APIError, match="the worker was lost"):
        async with client.messages.stream(**BODY) as stream:
            await stream.get_final_message()
