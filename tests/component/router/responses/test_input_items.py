"""The items before a stored response's output, in pages."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router."""
    return tools_text


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
THOUGHT = {"type": "reasoning", "id": "rs_own", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
ITEMS: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
    THOUGHT,
    CALL,
    OUTPUT,
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "Where?"},
]


async def stored(router: Router, **body: Any) -> str:
    answer = await router.post("/v1/responses", **{"input": ITEMS, **body})
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["id"]
    return found


async def page(router: Router, response_id: str, **query: Any) -> dict[str, Any]:
    answer = await router.http.get(f"/v1/responses/{response_id}/input_items", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_items_have_ids_and_openais_form(router: Router) -> None:
    listed = await page(router, await stored(router), order="asc")
    items, adapter = listed["data"], TypeAdapter(ResponseItem)
    assert [each["type"] for each in items] == [each.get("type", "message") for each in ITEMS]
    assert len({each["id"] for each in items}) == len(ITEMS) and items[2]["id"] == "rs_own"
    assert items[0]["content"] == [{"type": "input_text", "text": "Be brief."}]
    assert items[5]["content"] == [{"type": "output_text", "text": "It rains.", "annotations": []}]
    for item in items:
        adapter.validate_python(item)
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == (items[0]["id"], items[-1]["id"])


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 3, 7, 100])
async def test_pages_have_each_item_once(router: Router, order: str, limit: int) -> None:
    response_id = await stored(router)
    whole = (await page(router, response_id, order=order))["data"]
    found: list[Any] = []
    after: dict[str, Any] = {}
    while True:
        part = await page(router, response_id, order=order, limit=limit, **after)
        found += part["data"]
        assert len(part["data"]) <= limit
        if not part["has_more"]:
            break
        after = {"after": part["last_id"]}
    assert found == whole and len(found) == len(ITEMS)


async def test_newest_first_and_twenty_by_default_as_openais_client_expects(router: Router) -> None:
    many = [{"role": "user", "content": str(number)} for number in range(45)]
    response_id = await stored(router, input=many)
    listed = router.openai.responses.input_items.list(response_id)
    texts = [each.model_dump()["content"][0]["text"] async for each in listed]
    assert texts == [str(number) for number in reversed(range(45))]
    assert len((await page(router, response_id))["data"]) == 20


async def test_earlier_responses_are_part_of_the_input(router: Router) -> None:
    first = await stored(router, input="One")
    second = await stored(router, input="Two", previous_response_id=first)
    items = (await page(router, second, order="asc"))["data"]
    assert [(each["role"], each["content"][0]["text"]) for each in items] == [
        ("user", "One"),
        ("assistant", "An otter is a mammal."),
        ("user", "Two"),
    ]
    assert items[0]["id"] == (await page(router, first))["data"][0]["id"]


async def test_equal_ids_end_too(router: Router) -> None:
    twice = {"id": "msg_mine", "role": "user", "content": "Hm"}
    response_id = await stored(router, input=[twice, twice, {"role": "user", "content": "x"}])
    assert not (await page(router, response_id, order="asc", after="msg_mine"))["has_more"]


async def test_an_empty_input_has_no_items(router: Router) -> None:
    listed = await page(router, await stored(router, input=[], instructions="Speak."))
    assert listed == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=-1", "limit=x", "limit=", "order=up"])
async def test_a_wrong_query_is_refused(router: Router, query: str) -> None:
    answer = await router.http.get(f"/v1/responses/{await stored(router)}/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


@pytest.mark.parametrize("after", ["msg_x", ""])
async def test_an_unknown_item_is_not_found(router: Router, after: str) -> None:
    answer = await router.http.get(f"/v1/responses/{await stored(router)}/input_items?after={after}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "item_not_found")


async def test_a_reference_finds_its_response_whatever_the_requests_id(router: Router) -> None:
    for request_id in ("my_own", "a_1", "x"):
        answer = await router.http.post(
            "/v1/responses", json={"model": MODEL, "input": "One"}, headers={"x-request-id": request_id}
        )
        item = {"type": "item_reference", "id": answer.json()["output"][0]["id"]}
        await stored(router, input=[item, {"role": "user", "content": "Two"}])
