"""Long lists of token ids are checked before the request model, which would check all in one call."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.openai.schema.completion_request import check_many_prompts, parse_completion
from kvrelay_router.openai.schema.parsing import MANY_INTEGERS, CheckedIntegers

LONG = MANY_INTEGERS // 2 + 1


@pytest.mark.parametrize("first", [[], ["a text"], [[1] * (MANY_INTEGERS + 1)], [[]]])
async def test_lists_that_are_long_together_are_checked_one_by_one(first: list[Any]) -> None:
    prompts = [*first, [7] * LONG, [8] * LONG]
    content: dict[str, Any] = {"model": "m", "prompt": [*prompts]}
    await check_many_prompts(content, 1024)
    assert content["prompt"] == prompts
    assert all(isinstance(item, CheckedIntegers | str) for item in content["prompt"])
    assert parse_completion(content).prompt == prompts


async def test_short_lists_are_left_to_the_request_model() -> None:
    content: dict[str, Any] = {"model": "m", "prompt": [[7], [8, 9]]}
    await check_many_prompts(content, 1024)
    assert [type(item) for item in content["prompt"]] == [list, list]


@pytest.mark.parametrize("item", [1, None, {}, ["x"], [1, "x"], [1, True], [[1]]])
async def test_other_items_among_long_lists_get_400(item: Any) -> None:
    content: dict[str, Any] = {"model": "m", "prompt": [[7] * LONG, [8] * LONG, item]}
    await check_many_prompts(content, 1024)
    with pytest.raises(ApiError) as error:
        parse_completion(content)
    assert error.value.status == 400
    assert error.value.param == "prompt"
