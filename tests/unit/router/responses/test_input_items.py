"""Input items of the Responses API become messages of a chat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.fleet.shared_responses import StoreBounds
from kvrelay.text.request.api_error import ApiError
from kvrelay_router.responses.response_store import OwnResponses
from kvrelay_router.responses.responses_request import as_items, input_messages
from tests.fakes.response_oracle import CALLS, Key, ResponseOracle

CALL = {"type": "function_call", "call_id": "call_1", "name": "define", "arguments": '{"word": "otter"}'}
CHAT_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "define", "arguments": {"word": "otter"}},
}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
        (
            [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}],
            [{"role": "developer", "content": "Be brief."}],
        ),
        (
            [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            ],
            [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c"},
            ],
        ),
        (
            [
                {"role": "user", "content": "hi"},
                {
                    "type": "reasoning",
                    "id": "rs",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {"role": "assistant", "content": "One moment."},
                CALL,
                {"type": "function_call_output", "call_id": "call_1", "output": "a mammal"},
            ],
            [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": "One moment.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [CHAT_CALL],
                },
                {"role": "tool", "tool_call_id": "call_1", "name": "define", "content": "a mammal"},
            ],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}],
            [{"role": "assistant", "content": "", "reasoning_content": "Hm."}],
        ),
    ],
)
def test_items_become_messages(items: Any, messages: list[dict[str, Any]]) -> None:
    assert input_messages(as_items(items), []) == messages


def test_an_output_may_belong_to_an_earlier_call() -> None:
    output = {"type": "function_call_output", "call_id": "call_1", "output": "a mammal"}
    call, result = input_messages([output], [CALL])
    assert call["tool_calls"] == [CHAT_CALL] and result["name"] == "define"


def test_an_id_may_come_again_in_a_later_turn() -> None:
    output = {"type": "function_call_output", "call_id": CALL["call_id"], "output": "x"}
    for between in (output, {"role": "user", "content": "go on"}):
        assert len(input_messages([CALL, between, CALL, output], [])) == 4


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (7, "input"),
        ([7], "input[0]"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"type": "computer_call", "id": "x"}], "input[0].type"),
        ([{"type": "function_call_output", "call_id": "call_1", "output": "x"}], "input[0].call_id"),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
        ([CALL, CALL], "input[1].call_id"),
        ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}], "input[0].arguments"),
        (
            [{"type": "function_call", "call_id": "c", "name": "f", "arguments": " " * (1 << 20) + "{}"}],
            "input[0].arguments",
        ),
    ],
)
def test_errors_name_the_item(items: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        input_messages(as_items(items), [])
    assert (caught.value.status, caught.value.param) == (400, param)


def test_too_many_parts_are_refused() -> None:
    parts = [{"type": "input_text", "text": ""}] * 20_000
    with pytest.raises(ApiError, match=r"input\[0\]\.content.*20000 content parts"):
        input_messages([{"role": "user", "content": parts}], [])


# -- the bounded store of responses in memory ------------------------------------------------------------------------


def response_of(size: int) -> bytes:
    return b"x" * size


@given(calls=CALLS, max_responses=st.integers(1, 6))
def test_the_owner_with_the_most_bytes_drops_what_it_did_not_use(
    calls: list[tuple[str, Key, int]], max_responses: int
) -> None:
    async def run() -> None:
        store, oracle = OwnResponses(StoreBounds(30, max_responses)), ResponseOracle(30, max_responses)
        kept: dict[Key, bytes] = {}
        for call, key, size in calls:
            if call == "put":
                kept[key] = response_of(size)
                assert await store.put(*key, kept[key]) == oracle.put(key, size)
            elif call == "get":
                assert await store.get(*key) is (kept[key] if oracle.get(key) else None)
            else:
                assert await store.delete(*key) == oracle.delete(key)
            assert store.num_bytes == sum(oracle.sizes.values())

    asyncio.run(run())


async def test_what_is_too_large_alone_is_not_kept() -> None:
    store = OwnResponses(StoreBounds(20))
    assert await store.put("a", "1", response_of(20))
    assert not await store.put("a", "2", response_of(21))
    assert await store.get("a", "1") is not None and await store.get("a", "2") is None


async def test_a_response_expires_some_time_after_its_last_use() -> None:
    now = 0.0
    store = OwnResponses(StoreBounds(kept_s=10.0), clock=lambda: now)
    for name in "123":
        await store.put("a", name, response_of(4))
    now = 9.0
    assert await store.get("a", "1") is not None
    now = 10.0
    assert await store.get("a", "2") is None and not await store.delete("a", "3")
    assert await store.get("a", "1") is not None and store.num_bytes == 4
    now = 20.0
    assert await store.get("a", "1") is None and store.num_bytes == 0
