"""Answers that wait for a worker: streams show life, and nothing of the text is missing or twice."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvrelay_router.openai import delivery
from tests.component.router.rig import MODEL, Router
from tests.fakes.waiting import until

TEXT = "An otter is a mammal."


@pytest.mark.parametrize("hang_after", [0, 2])
async def test_a_stream_that_waits_for_a_worker_shows_life_and_goes_on(
    router: Router, hang_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first token and in the middle. The client's library skips the comments."""
    monkeypatch.setattr(delivery, "LIFE_SIGN_INTERVAL_S", 0.02)
    resume = asyncio.Event()
    router.answers(TEXT, per_delta=1, hang_after=hang_after, resume=resume, awaits_worker=True)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "stream": True}
    signs, events = 0, []
    async with router.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith(":"):
                signs += 1
                if signs == 3:
                    resume.set()
            elif line:
                events.append(line)
    assert signs >= 3 and events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    router.answers(TEXT, per_delta=1, hang_after=hang_after, resume=(later := asyncio.Event()), awaits_worker=True)
    asyncio.get_running_loop().call_later(0.2, later.set)
    stream = await router.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "?"}], stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT


async def test_an_answer_in_one_piece_that_waits_for_a_worker_is_whole(router: Router) -> None:
    resume = asyncio.Event()
    router.answers(TEXT, hang_after=0, resume=resume, awaits_worker=True)
    answer = asyncio.create_task(router.post("/v1/chat/completions", messages=[{"role": "user", "content": "?"}]))
    await until(lambda: router.dispatcher.handles and router.dispatcher.handles[0].awaits_worker)
    resume.set()
    assert (await answer).json()["choices"][0]["message"]["content"] == TEXT
