"""What the door makes of a request: whole numbers, the model's sampling defaults, and prompts with several choices."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from kvrelay.protocol.sampling import Sampling
from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.completion_request import CompletionRequest, parse_completion
from kvrelay.text.request.validation import (
    SUPPRESSED,
    ModelLimits,
    RequestedOutput,
    allowed_output,
    completion_output,
    make_sampling,
    stop_rules,
)
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
        (
            {"min_new_tokens": 3, "max_new_tokens": 9, "suppress_tokens": [7, 2, 7]},
            SamplingDefaults(min_tokens=3, max_tokens=9, suppressed_ids=(7, 2)),
        ),
        ({"min_new_tokens": -1, "max_new_tokens": 0, "suppress_tokens": ["a"]}, SamplingDefaults()),
        ({"stop_strings": ["a", "bc"]}, SamplingDefaults(stop=("a", "bc"))),
        ({"stop_strings": "a"}, SamplingDefaults(stop=("a",))),
        ({"stop_strings": ["a", ""]}, SamplingDefaults()),
        ({"temperature": None, "top_p": "high", "top_k": True, "min_p": 7}, SamplingDefaults()),
    ],
)
def test_defaults_are_read_and_what_is_not_usable_is_left_out(
    config: dict[str, Any], defaults: SamplingDefaults
) -> None:
    assert sampling_defaults(config) == defaults


def test_what_cannot_be_honoured_is_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    harmless = {"no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1, "begin_suppress_tokens": [], "top_k": 50}
    sampling_defaults(harmless | {"forced_eos_token_id": None, "suppress_tokens": None, "max_length": 20})
    assert not caplog.records
    sampling_defaults({"no_repeat_ngram_size": 3, "begin_suppress_tokens": [2], "forced_eos_token_id": 2})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for name in ("no_repeat_ngram_size", "begin_suppress_tokens", "forced_eos_token_id"):
        assert name in record.getMessage()


def test_defaults_of_transformers_that_older_files_state_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    stated = {"diversity_penalty": 0.0, "length_penalty": 1.0, "num_return_sequences": 1, "token_healing": False}
    sampling_defaults({**GenerationConfig().to_dict(), **stated})
    assert not caplog.records


READ = {"do_sample", "suppress_tokens", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
OF_TRANSFORMERS = re.compile(
    r"_from_model_config|assistant_.+|is_assistant|.*cache.*|.*compile.*|continuous_batching_config|output_.+|return_.+"
    r"|decoder_start_token_id|prefill_chunk_size|remove_invalid_values|renormalize_logits|low_memory"
    r"|.*num_assistant_tokens.*|prompt_lookup_.+|max_matching_.+|target_lookbehind|speculation_type|use_mtp"
    r"|diversity_penalty|early_stopping|length_penalty|num_beam_groups"  # of beams, which `num_beams` names
)
"""Fields about how transformers computes, which change no output here."""


@pytest.mark.parametrize("name", sorted(GenerationConfig().to_dict()))
def test_every_field_that_changes_what_transformers_generates_is_read_or_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    if name not in READ and not OF_TRANSFORMERS.fullmatch(name):
        changed = sampling_defaults({name: 0.5}) != SamplingDefaults()
        assert changed or name in caplog.text


def test_lengths_and_suppressed_tokens_are_those_of_the_model_unless_the_request_says_otherwise() -> None:
    defaults = SamplingDefaults(min_tokens=5, max_tokens=9, suppressed_ids=(3, 4, 99))
    limits = ModelLimits(max_model_len=64, vocab_size=10)

    def made(**fields: Any) -> Sampling:
        request = CompletionRequest.model_validate({"model": "m", "prompt": "p", **fields})
        max_tokens = allowed_output(1, completion_output(request, defaults), limits, "prompt")
        sampling = make_sampling(
            request, defaults, limits, num_prompt_tokens=1, max_tokens=max_tokens, logprobs=None, prompt_logprobs=None
        )
        assert stop_rules(request, defaults).min_tokens >= sampling.min_tokens
        return sampling

    own = made()
    assert (own.min_tokens, own.max_tokens) == (5, 9)
    assert own.logit_bias == {3: SUPPRESSED, 4: SUPPRESSED}
    assert (made(min_tokens=None).min_tokens, made(min_tokens=0).min_tokens, made(min_tokens=7).min_tokens) == (5, 0, 7)
    assert (made(max_tokens=2).min_tokens, made(max_tokens=2).max_tokens) == (2, 2)
    assert made(logit_bias={"4": 1}).logit_bias == {3: SUPPRESSED, 4: 1.0}


@pytest.mark.parametrize(
    ("fields", "strings"),
    [({}, ["a", "bc"]), ({"stop": None}, ["a", "bc"]), ({"stop": "d"}, ["d"]), ({"use_beam_search": True}, [])],
)
def test_stop_strings_of_the_model_are_those_of_requests_without_any(
    fields: dict[str, Any], strings: list[str]
) -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "p", **fields})
    assert stop_rules(request, SamplingDefaults(stop=("a", "bc"))).strings == strings


def test_the_length_of_the_model_is_cut_to_what_fits() -> None:
    limits = ModelLimits(max_model_len=64, vocab_size=10)
    output = RequestedOutput(asked=None, default=None, model_default=1000)
    assert allowed_output(60, output, limits, "prompt") == 4
    assert output.prompt_room(limits) == 63


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
