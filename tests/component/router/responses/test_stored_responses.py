"""Responses that are kept: GET, DELETE and `previous_response_id`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.shared_responses import SharedResponses, StoreBounds
from kvrelay.text.service import TextService
from kvrelay_router.asgi.app import create_app
from kvrelay_router.http.http_server import bind, serve
from kvrelay_router.openai.api_service import ApiSettings
from kvrelay_router.responses.response_store import OwnResponses
from tests.component.router.rig import MODEL, Router, running_router
from tests.fakes.scripted_dispatcher import Script, ScriptedDispatcher
from tests.fakes.waiting import PATIENCE_S

QUESTION = "What is an otter?"
FIRST = "<|im_start|>user\nWhat is an otter?<|im_end|>\n<|im_start|>assistant\n"
SECOND = FIRST + "An otter is a mammal.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"


async def answered(router: Router, *, stream: bool = False, **body: Any) -> Any:
    """The response object at the end."""
    values: dict[str, Any] = {"model": MODEL, "input": QUESTION} | body
    if not stream:
        return await router.openai.responses.create(**values)
    *_, last = [event async for event in await router.openai.responses.create(**values, stream=True)]
    return last.response


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued(router: Router, stream: bool) -> None:
    first = await answered(router, stream=stream, instructions="Be brief.")
    second = await answered(router, stream=stream, input="Where?", previous_response_id=first.id)
    third = await answered(router, stream=stream, input=[], previous_response_id=second.id)
    prompts = [request.prompt_ids for request in router.dispatcher.requests]
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert prompts[:2] == [router.tokens(system + FIRST), router.tokens(SECOND)]  # instructions are not inherited
    answer = "An otter is a mammal.<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[2] == router.tokens(SECOND + answer)
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)


async def test_the_tokens_of_an_input_are_counted(router: Router) -> None:
    first = await answered(router, instructions="Be brief.")
    count = router.openai.responses.input_tokens.count
    alone = await count(model=MODEL, input=QUESTION, instructions="Be brief.")
    continued = await count(model=MODEL, input="Where?", previous_response_id=first.id)
    assert (alone.object, alone.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    assert continued.input_tokens == len(router.tokens(SECOND))
    assert len(router.dispatcher.requests) == 1


@pytest.mark.parametrize("reference", [{"type": "item_reference"}, {}], ids=["typed", "by id alone"])
async def test_an_item_of_an_earlier_output_is_referred_to(router: Router, reference: dict[str, str]) -> None:
    first = await answered(router)
    (item,) = first.output
    conversation = [{"role": "user", "content": QUESTION}, {**reference, "id": item.id}]
    second = await answered(router, input=[*conversation, {"role": "user", "content": "Where?"}])
    assert router.dispatcher.requests[1].prompt_ids == router.tokens(SECOND)
    again = await answered(
        router, input=[*conversation, {"role": "user", "content": "Where?"}, {"id": second.output[0].id}]
    )
    # What a response was given by reference is kept as it was.
    await router.openai.responses.delete(first.id)
    await answered(router, input=[], previous_response_id=again.id)
    assert router.dispatcher.requests[3].prompt_ids[: len(router.tokens(SECOND))] == router.tokens(SECOND)


@pytest.mark.parametrize("item_id", ["msg_x", "", "resp", "msg_", "_", "x" * 10_000])
async def test_a_reference_to_nothing_is_refused(router: Router, item_id: str) -> None:
    created = await answered(router)
    with pytest.raises(openai.NotFoundError, match=r"Item with id .* not found") as refused:
        await answered(router, input=[{"type": "item_reference", "id": item_id}])
    assert refused.value.param == "input[0].id" and len(str(refused.value)) < 1000
    with pytest.raises(openai.BadRequestError, match="it must be a string"):
        await answered(router, input=[{"type": "item_reference"}])
    with pytest.raises(openai.NotFoundError):
        await answered(router, input=[{"type": "item_reference", "id": created.output[0].id + "_7"}])


async def test_a_response_can_be_read_and_deleted(router: Router) -> None:
    responses = router.openai.responses
    created = await answered(router, metadata={"a": "b"})
    assert created.model_extra is not None and created.model_dump()["store"] is True
    assert (await responses.retrieve(created.id)).model_dump() == created.model_dump()
    await responses.delete(created.id)
    for call in (responses.retrieve(created.id), responses.delete(created.id)):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.BadRequestError, match="Previous response"):
        await answered(router, previous_response_id=created.id)


async def test_a_response_is_not_kept_if_the_client_says_so(router: Router) -> None:
    created = await answered(router, store=False)
    assert created.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await router.openai.responses.retrieve(created.id)


async def test_the_oldest_make_room(make_router: Any) -> None:
    async with make_router(responses=OwnResponses(StoreBounds(max_bytes=4096))) as router:
        kept = [await answered(router) for _ in range(12)]
        await router.openai.responses.retrieve(kept[-1].id)
        with pytest.raises(openai.NotFoundError):
            await router.openai.responses.retrieve(kept[0].id)
    async with make_router(responses=OwnResponses(StoreBounds(max_bytes=100))) as router:
        for stream in (False, True):  # one is too large
            assert (await answered(router, stream=stream)).model_dump()["store"] is False


async def test_nothing_is_kept_without_a_store(text: TextService) -> None:
    app = create_app(ApiSettings(model_names=(MODEL,)), ScriptedDispatcher(lambda *_: Script([])), text)
    server = await serve(app, bind("127.0.0.1", 0), graceful_timeout_s=2.0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as client:
        created = await client.post("/v1/responses", json={"model": MODEL, "input": QUESTION})
        assert created.json()["store"] is False
        path = f"/v1/responses/{created.json()['id']}"
        assert [(await client.request(method, path)).status_code for method in ("GET", "DELETE")] == [404, 404]
    await server.stop()


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@asynccontextmanager
async def routers_with(redis: EmbeddedRedis, text: TextService, **settings: Any) -> AsyncIterator[list[Router]]:
    """Two routers with stores in one Redis."""
    async with AsyncExitStack() as stack:
        routers = []
        for _ in range(2):
            shared = SharedResponses(redis.url, "kvrelay", StoreBounds())
            stack.push_async_callback(shared.close)
            running = running_router(text, responses=shared, **settings)
            routers.append(await stack.enter_async_context(running))
        yield routers


@pytest.mark.parametrize("stream", [False, True])
async def test_one_router_continues_what_another_answered(
    redis: EmbeddedRedis, text: TextService, stream: bool
) -> None:
    async with routers_with(redis, text) as (one, other):
        first = await answered(one, stream=stream)
        assert first.model_dump()["store"] is True
        assert (await other.openai.responses.retrieve(first.id)).model_dump() == first.model_dump()
        await answered(other, input="Where?", previous_response_id=first.id, stream=stream)
        assert other.dispatcher.requests[0].prompt_ids == other.tokens(SECOND)
        reference: Any = [{"role": "user", "content": QUESTION}, {"id": first.output[0].id}]
        await answered(other, input=[*reference, {"role": "user", "content": "Where?"}])
        assert other.dispatcher.requests[1].prompt_ids == other.tokens(SECOND)
        await other.openai.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await one.openai.responses.retrieve(first.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_redis_responses_are_served_and_say_that_they_are_not_stored(
    redis: EmbeddedRedis, text: TextService, stream: bool
) -> None:
    async with routers_with(redis, text) as (router, _):
        before = await answered(router)
        redis.close()
        answer = await answered(router, stream=stream)
        assert answer.status == "completed" and answer.model_dump()["store"] is False
        kept_out = {"store": False, "input": [{"role": "user", "content": QUESTION}]}
        assert (await answered(router, stream=stream, **kept_out)).status == "completed"
        for call in (
            router.openai.responses.retrieve(before.id),
            router.openai.responses.delete(before.id),
            answered(router, previous_response_id=before.id),
            answered(router, input=[{"id": before.output[0].id}]),
        ):
            with pytest.raises(openai.InternalServerError) as refused:
                await call
            assert refused.value.status_code == 503 and refused.value.code == "response_store_unavailable"
            assert refused.value.response.headers["retry-after"] == "1"
        assert len(router.dispatcher.requests) == 3, "nothing was submitted that lacks its conversation"


async def test_each_key_has_its_own(make_router: Any) -> None:
    async with make_router(api_keys=("one", "two")) as router:
        mine, other = router.openai.with_options(api_key="one"), router.openai.with_options(api_key="two")
        created = await mine.responses.create(model=MODEL, input=QUESTION)
        assert (await mine.responses.retrieve(created.id)).id == created.id
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(created.id)
        with pytest.raises(openai.BadRequestError):
            await other.responses.create(model=MODEL, input="Where?", previous_response_id=created.id)
        reference: Any = [{"type": "item_reference", "id": created.output[0].id}]
        await mine.responses.create(model=MODEL, input=reference)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model=MODEL, input=reference)
