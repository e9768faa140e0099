"""JSON knows no difference between 5 and 5.0, and some clients write the latter for integers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.completion_request import parse_completion
from kvrelay_router.openai.chat_request import parse_chat

pytestmark = pytest.mark.unit
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
FIELDS = ["n", "max_tokens", "min_tokens", "top_k", "seed", "priority", "prompt_logprobs", "truncate_prompt_tokens"]
NUMBERS = st.one_of(st.integers(-3, 200), st.integers(-(2**53), 2**53), st.integers(0, 62).map(lambda bits: 1 << bits))


def outcome(parse: Any, fields: dict[str, Any]) -> tuple[Any, ...]:
    try:
        request = parse({**BODY, **fields})
    except ApiError as error:
        return str(error), error.param, error.code
    values = [getattr(request, name) for name in fields]
    assert set(map(type, values)) <= {int}
    return tuple(values)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@given(fields=st.dictionaries(st.sampled_from(FIELDS), NUMBERS))
def test_whole_numbers_are_integers_however_they_are_written(parse: Any, fields: dict[str, int]) -> None:
    written = {name: float(number) for name, number in fields.items()}
    assert outcome(parse, written) == outcome(parse, {name: int(number) for name, number in written.items()})


@pytest.mark.parametrize("number", [2.0**63, -(2.0**64), 1e300])
def test_those_beyond_64_bits_are_refused_as_such(number: float) -> None:
    with pytest.raises(ApiError, match="'seed': Input should be an integer of 64 bits"):
        parse_chat({**BODY, "seed": number})
