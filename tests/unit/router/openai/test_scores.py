"""A prompt's log-probabilities are bounded by what one message carries."""

from __future__ import annotations

import pytest

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.openai.request_validation import MAX_PROMPT_SCORES, check_scores


def test_more_scores_than_a_message_carries_are_refused_at_the_door() -> None:
    check_scores(MAX_PROMPT_SCORES // 21, 20)
    with pytest.raises(ApiError, match="too much to echo") as refused:
        check_scores(MAX_PROMPT_SCORES // 21 + 1, 20)
    assert (refused.value.status, refused.value.param) == (400, "logprobs")
