"""What an answer may hold is bounded before anything is queued."""

from __future__ import annotations

import pytest

from kvrelay.text.request.api_error import ApiError
from kvrelay_router.openai.planning import AnswerShape, check_answer

LIMIT = 64 << 20


def scored(num_prompts: int, **fields: object) -> AnswerShape:
    shape: dict[str, object] = {
        "prompt_tokens": [2000] * num_prompts,
        "max_tokens": [1] * num_prompts,
        "num_sequences": 1,
        "num_returned": 1,
        "has_echo": True,
        "logprobs": 20,
        "echo_logprobs": 20,
        "prompt_logprobs": 20,
    }
    return AnswerShape(**(shape | fields))  # type: ignore[arg-type]


def test_an_answer_of_hundreds_of_megabytes_is_refused_with_the_numbers() -> None:
    with pytest.raises(ApiError) as refused:
        check_answer(scored(200), LIMIT)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "answer_too_large", "logprobs")
    for number in ("200 prompts", "400000 tokens", f"{400_000 * 42 + 200 * 21} log-probabilities", str(LIMIT)):
        assert number in refused.value.message


def test_choices_count_as_often_as_the_answer_repeats_their_prompt() -> None:
    check_answer(scored(4), LIMIT)
    with pytest.raises(ApiError):
        check_answer(scored(4, num_sequences=8, num_returned=8, num_prompt_scores=8), LIMIT)


def test_prompt_tokens_before_the_scored_part_take_little() -> None:
    fields: dict[str, object] = {"has_echo": False, "logprobs": None, "echo_logprobs": None, "max_tokens": [0] * 200}
    shape = scored(200, **fields, logprob_start_len=1990)
    check_answer(shape, LIMIT)
    assert shape.num_scores == 200 * 11 * 21 and shape.total_bytes > 200 * 1989 * len("null,")
    with pytest.raises(ApiError):
        check_answer(scored(200, **fields), LIMIT)


def test_text_alone_may_be_long() -> None:
    plain = scored(
        1, prompt_tokens=[8000], max_tokens=[120_000], logprobs=None, echo_logprobs=None, prompt_logprobs=None
    )
    check_answer(plain, LIMIT)
    with pytest.raises(ApiError) as refused:
        check_answer(scored(1, max_tokens=[131_072], num_sequences=1024, logprobs=None), LIMIT)
    assert refused.value.param == "n"


def test_the_output_that_fits_is_the_longest_that_is_allowed() -> None:
    shape = scored(1, prompt_tokens=[10], max_tokens=[131_072], num_sequences=2)
    fitting = shape.tokens_that_fit(LIMIT)
    assert 0 < fitting < 131_072
    check_answer(scored(1, prompt_tokens=[10], max_tokens=[fitting], num_sequences=2), LIMIT)
    with pytest.raises(ApiError):
        check_answer(scored(1, prompt_tokens=[10], max_tokens=[fitting + 1], num_sequences=2), LIMIT)
