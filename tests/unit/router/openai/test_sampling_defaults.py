"""Where a request says nothing about sampling, the model's own generation_config.json does."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.text.request.completion_request import CompletionRequest
from kvrelay.text.request.validation import ModelLimits, make_sampling
from kvrelay.text.sources import SamplingDefaults, sampling_defaults


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
