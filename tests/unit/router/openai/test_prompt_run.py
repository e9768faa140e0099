"""What a prompt with several choices says about the cache."""

from __future__ import annotations

from kvrelay.protocol.sampling import Sampling
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.openai.generation import PromptRun


def test_a_choice_that_finds_its_sibling_does_not_make_the_prompt_cached() -> None:
    run = PromptRun(GenerateRequest(request_id="r", prompt_ids=[1] * 20, sampling=Sampling()), [])
    assert run.cached_tokens == 0
    for found in (16, 0, 16):
        run.saw_cached(found)
    assert run.cached_tokens == 0


def test_what_all_choices_found_was_cached() -> None:
    run = PromptRun(GenerateRequest(request_id="r", prompt_ids=[1] * 20, sampling=Sampling()), [])
    run.saw_cached(16)
    run.saw_cached(32)
    assert run.cached_tokens == 16
