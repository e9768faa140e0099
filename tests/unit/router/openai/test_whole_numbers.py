"""What the door makes of a request: whole numbers, the model's sampling defaults, and prompts with several choices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.protocol.sampling import Sampling
from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.completion_request import CompletionRequest, parse_completion
from kvrelay.text.request.validation import ModelLimits, make_sampling
from kvrelay.text.tokenizer_files import SamplingDefaults, sampling_defaults
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.openai.chat_request import parse_chat
from kvrelay_router.openai.generation import PromptRun

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


# -- what a prompt with several choices says about the cache ---------------------------------------------------------


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


# -- where a request says nothing about sampling, the model's own generation_config.json does ------------------------


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({}, SamplingDefaults()),
        ({"do_sample": False}, SamplingDefaults(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults(temperature=0.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05},
            SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05),
        ),
        ({"temperature": None, "top_p": "high", "top_k": True, "min_p": 7}, SamplingDefaults()),
    ],
)
def test_defaults_are_read_and_what_is_not_usable_is_left_out(
    config: dict[str, Any], defaults: SamplingDefaults
) -> None:
    assert sampling_defaults(config) == defaults


def test_a_request_wins_over_the_model_and_null_means_the_default() -> None:
    defaults = SamplingDefaults(temperature=0.0, top_p=0.9, top_k=20)
    fields: dict[str, Any] = {"model": "m", "prompt": "p", "temperature": 0.7, "top_p": None, "top_k": -1}
    request = CompletionRequest.model_validate(fields)
    sampling = make_sampling(
        request,
        defaults,
        ModelLimits(max_model_len=64, vocab_size=10),
        num_prompt_tokens=1,
        max_tokens=1,
        logprobs=None,
        prompt_logprobs=None,
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 0)
