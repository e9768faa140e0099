"""Greedy output and scores of the demo model are those of transformers, through the full handoff."""

from __future__ import annotations

import pytest

from tests.e2e import reference
from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.prompts import prompt_of
from tests.fakes.stack import Stack

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_the_demo_model_up_to_its_full_context(demo_stack: Stack) -> None:
    for length, max_tokens in ((1, 30), (512, 30), (513, 30), (1500, 20), (8192 - 4, 4)):
        prompt = prompt_of(length)
        choice = demo_stack.complete(prompt, max_tokens, ignore_eos=True, logprobs=5)
        assert choice["token_ids"] == reference.greedy(DEMO_MODEL, prompt, max_tokens), f"{length} tokens"
        reference.check_logprobs(DEMO_MODEL, prompt, choice)
    demo_stack.wait_until_clean()


def test_prompt_scores_agree_with_transformers(demo_stack: Stack) -> None:
    prompt = prompt_of(700)
    for _ in range(2):  # the second time, the cache holds the prompt
        choice = demo_stack.complete(prompt, 0, echo=True, logprobs=3)
        expected = reference.logprobs(DEMO_MODEL, prompt, 1)
        given = choice["logprobs"]["token_logprobs"]
        assert given[0] is None
        assert len(given) == len(prompt)
        for row, (token_id, logprob) in enumerate(zip(prompt[1:], given[1:], strict=True)):
            assert abs(logprob - float(expected[row, token_id])) < 1e-4
