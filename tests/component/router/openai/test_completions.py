"""Text completions, as the stock client sees them."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError

from kvrelay.protocol.sampling import FinishReason
from tests.component.router.rig import MODEL, Router
from tests.fakes.scripted_dispatcher import Script

SEAMS = "Grüße 東京 🦦🎉 and e\u0301 END of it"


async def streamed_text(router: Router, **options: Any) -> str:
    stream = await router.openai.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=200, **options)
    return "".join([choice.text async for chunk in stream for choice in chunk.choices])


async def test_a_plain_answer(router: Router) -> None:
    answer = await router.openai.completions.create(model=MODEL, prompt="The otter", max_tokens=50)
    assert answer.object == "text_completion" and answer.model == MODEL
    assert answer.choices[0].text == "An otter is a mammal."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    (request,) = router.dispatcher.requests
    assert request.prompt_ids == router.tokens("The otter")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_ids)
    assert answer.usage.completion_tokens == len(router.tokens("An otter is a mammal.")) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_the_default_length_is_sixteen_tokens_or_what_is_left(router: Router) -> None:
    await router.openai.completions.create(model=MODEL, prompt="The otter")
    await router.openai.completions.create(model=MODEL, prompt=[5] * 500)
    assert [request.sampling.max_tokens for request in router.dispatcher.requests] == [16, 12]


@pytest.mark.parametrize("per_delta", [1, 2, 3, 100])
@pytest.mark.parametrize("stop", [None, "END", ["京 🦦", "END"], ["never", "it"]])
async def test_streams_and_plain_answers_have_the_same_text(
    router: Router, per_delta: int, stop: str | list[str] | None
) -> None:
    router.answers(SEAMS, per_delta=per_delta)
    plain = await router.openai.completions.create(model=MODEL, prompt="x", max_tokens=200, stop=stop)
    assert await streamed_text(router, stop=stop) == plain.choices[0].text
    cuts = [SEAMS.find(each) for each in ([stop] if isinstance(stop, str) else stop or []) if each in SEAMS]
    assert plain.choices[0].text == (SEAMS[: min(cuts)] if cuts else SEAMS)


async def test_a_stop_string_ends_the_sequence_at_the_worker(router: Router) -> None:
    router.answers(SEAMS)
    answer = await router.openai.completions.create(model=MODEL, prompt="x", max_tokens=200, stop="東京")
    assert answer.choices[0].text == "Grüße "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_dump()["stop_reason"] == "東京"
    assert router.dispatcher.handles[0].stopped == [0]


async def test_a_stop_string_can_be_shown(router: Router) -> None:
    router.answers(SEAMS)
    extra = {"include_stop_str_in_output": True}
    answer = await router.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=200, stop="東京", extra_body=extra
    )
    assert answer.choices[0].text == "Grüße 東京"


async def test_stop_strings_do_not_count_before_min_tokens(router: Router) -> None:
    letters = [token for letter in "ENDENDEND" for token in router.tokens(letter)]
    router.dispatcher.script = lambda request, sequence: Script(letters)
    answer = await router.post("/v1/completions", prompt="x", stop="END", min_tokens=4)
    assert answer.json()["choices"][0]["text"] == "END"
    assert answer.json()["usage"]["completion_tokens"] == 6


async def test_a_stop_token_is_named_and_not_shown(router: Router) -> None:
    (token,) = router.tokens("!")[:1]
    router.dispatcher.script = lambda request, sequence: Script([*router.tokens("otter"), token])
    answer = await router.post("/v1/completions", prompt="x", stop_token_ids=[token])
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("otter", "stop", token)


async def test_the_end_of_sequence_is_neither_named_nor_shown(router: Router) -> None:
    answer = await router.post("/v1/completions", prompt="x", skip_special_tokens=False)
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("An otter is a mammal.", None)


async def test_an_answer_that_is_cut_ends_with_its_length(router: Router) -> None:
    answer = await router.openai.completions.create(model=MODEL, prompt="x", max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 2


async def test_a_character_that_is_cut_ends_as_a_replacement(router: Router) -> None:
    otter = router.tokens("🦦")
    assert len(otter) > 1
    router.dispatcher.script = lambda request, sequence: Script(otter[:1], FinishReason.LENGTH)
    plain = await router.openai.completions.create(model=MODEL, prompt="x")
    assert plain.choices[0].text == "\ufffd" == await streamed_text(router)


@pytest.mark.parametrize("form", ["text", "texts", "tokens", "lists"])
async def test_prompts_come_in_four_forms(router: Router, form: str) -> None:
    one, two = router.tokens("The otter"), router.tokens("a fish")
    prompt: Any = {"text": "The otter", "texts": ["The otter", "a fish"], "tokens": one, "lists": [one, two]}[form]
    answer = await router.openai.completions.create(model=MODEL, prompt=prompt)
    expected = [one] if form in ("text", "tokens") else [one, two]
    assert [request.prompt_ids for request in router.dispatcher.requests] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert len({request.request_id for request in router.dispatcher.requests}) == len(expected)


async def test_several_prompts_and_choices_stream_side_by_side(router: Router) -> None:
    texts = [["one", "two"], ["three", "four"]]
    prompts = [router.tokens("The otter"), router.tokens("a fish")]
    router.dispatcher.script = lambda request, sequence: Script(
        [*router.tokens(texts[prompts.index(request.prompt_ids)][sequence]), 2], pause_s=0.001
    )
    stream = await router.openai.completions.create(model=MODEL, prompt=prompts, n=2, stream=True)
    seen = ["", "", "", ""]
    finished: list[int] = []
    async for chunk in stream:
        for choice in chunk.choices:
            seen[choice.index] += choice.text
            finished += [choice.index] if choice.finish_reason else []
    assert seen == ["one", "two", "three", "four"]
    assert sorted(finished) == [0, 1, 2, 3]


async def test_echo_puts_the_prompt_first(router: Router) -> None:
    answer = await router.openai.completions.create(model=MODEL, prompt="Grüße, ", echo=True, max_tokens=50)
    assert answer.choices[0].text == "Grüße, An otter is a mammal."
    of_tokens = await router.openai.completions.create(model=MODEL, prompt=router.tokens("é"), echo=True, max_tokens=50)
    assert of_tokens.choices[0].text == "éAn otter is a mammal."
    stream = await router.openai.completions.create(
        model=MODEL, prompt="Grüße, ", echo=True, max_tokens=50, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Grüße, An otter is a mammal."


async def test_logprobs_in_the_legacy_form(router: Router) -> None:
    answer = await router.openai.completions.create(model=MODEL, prompt="The otter", max_tokens=50, logprobs=2)
    scored = answer.choices[0].logprobs
    assert scored is not None and scored.tokens is not None and scored.text_offset is not None
    assert "".join(scored.tokens[:-1]) == "An otter is a mammal." and scored.tokens[-1] == "<|im_end|>"
    assert scored.text_offset == [len("".join(scored.tokens[:i])) for i in range(len(scored.tokens))]
    assert scored.token_logprobs == [-0.5] * len(scored.tokens)
    assert scored.top_logprobs is not None and scored.top_logprobs[0][scored.tokens[0]] == -0.5
    assert {len(top) for top in scored.top_logprobs} == {2}
    assert router.dispatcher.requests[0].sampling.logprobs == 2
    assert router.dispatcher.requests[0].sampling.prompt_logprobs is None


async def test_logprobs_zero_still_names_the_token_itself(router: Router) -> None:
    answer = await router.openai.completions.create(model=MODEL, prompt="The otter", logprobs=0)
    scored = answer.choices[0].logprobs
    assert scored is not None and scored.top_logprobs is not None and scored.tokens is not None
    assert [list(top) for top in scored.top_logprobs] == [[token] for token in scored.tokens]


async def test_tokens_of_half_a_character_are_written_as_bytes(router: Router) -> None:
    router.answers("🦦")
    answer = await router.openai.completions.create(model=MODEL, prompt="x", logprobs=0)
    scored = answer.choices[0].logprobs
    assert scored is not None and scored.tokens is not None and scored.text_offset is not None
    assert scored.tokens[0].startswith("bytes:\\xf0")
    assert scored.text_offset[:2] == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_with_echo_and_no_output(router: Router, stream: bool) -> None:
    prompt = router.tokens("The otter eats")
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    router.dispatcher.script = lambda request, sequence: Script([], FinishReason.LENGTH)
    if stream:
        chunks = await router.openai.completions.create(model=MODEL, extra_body=body, prompt=prompt, stream=True)
        (choice,) = [choice async for chunk in chunks for choice in chunk.choices]
    else:
        choice = (await router.openai.completions.create(model=MODEL, extra_body=body, prompt=prompt)).choices[0]
    assert (choice.text, choice.finish_reason) == ("The otter eats", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, *[-1.0] * (len(prompt) - 1)]
    assert choice.logprobs.text_offset is not None and choice.logprobs.text_offset[:2] == [0, 3]
    sampling = router.dispatcher.requests[0].sampling
    assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (0, 1, 1)


async def test_a_prompt_is_scored_from_a_position_on(router: Router) -> None:
    prompt = router.tokens("The otter eats")
    router.dispatcher.script = lambda request, sequence: Script([], FinishReason.LENGTH)
    body = {"max_tokens": 0, "prompt_logprobs": 0, "logprob_start_len": len(prompt) - 1}
    await router.openai.completions.create(model=MODEL, prompt=prompt, extra_body=body)
    assert router.dispatcher.requests[0].sampling.logprob_start_len == len(prompt) - 1


@pytest.mark.parametrize(
    ("prompts", "start", "sent"),
    [
        ([[5, 6, 7, 8], [5, 6, 7, 9, 4], [5, 6, 7, 9]], 2, [(2, 2), (3, 2), (3, 2)]),
        ([[5, 6, 7, 8], [5, 6, 7, 9, 4]], 3, [(3, 2), (3, 2)]),
        ([[5, 6, 7, 8, 9], [5, 4, 7, 8, 9]], 3, [(3, 1), (3, 1)]),
        ([[5, 6, 7], [5, 6, 7, 9]], 1, [(1, 1), (2, 1)]),  # one is the other's beginning
        ([[5, 6, 7], [5, 6, 7]], 1, [(1, 1), (2, 1)]),
        ([[4, 6, 7], [5, 6, 7]], 1, [(1, 0), (1, 0)]),
        ([[5, 6, 7]], 1, [(1, 0)]),
    ],
)
async def test_what_prompts_have_in_common_is_scored_once(
    router: Router, prompts: list[list[int]], start: int, sent: list[tuple[int, int]]
) -> None:
    router.dispatcher.script = lambda request, sequence: Script([], FinishReason.LENGTH)
    answer = await router.post(
        "/v1/completions", prompt=prompts, max_tokens=0, prompt_logprobs=0, logprob_start_len=start
    )
    samplings = [request.sampling for request in router.dispatcher.requests]
    assert [(sampling.logprob_start_len, sampling.num_shared) for sampling in samplings] == sent
    for prompt, choice in zip(prompts, answer.json()["choices"], strict=True):
        named = [None if entry is None else list(entry) for entry in choice["prompt_logprobs"]]
        assert named == [None] * start + [[str(token_id)] for token_id in prompt[start:]]


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"n": 2}, {"echo": True}])
async def test_prompts_that_are_not_only_scored_each_score_all_their_tokens(
    router: Router, fields: dict[str, Any]
) -> None:
    router.dispatcher.script = lambda request, sequence: Script([7] * request.sampling.max_tokens, FinishReason.LENGTH)
    body = {"max_tokens": 0, "prompt_logprobs": 0, "logprob_start_len": 1, "temperature": 1} | fields
    await router.post("/v1/completions", prompt=[[5, 6, 7, 8], [5, 6, 7, 9]], **body)
    samplings = [request.sampling for request in router.dispatcher.requests]
    assert [(sampling.logprob_start_len, sampling.num_shared) for sampling in samplings] == [(1, 0)] * 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logprob_start_len": 1}, "it needs 'prompt_logprobs'"),
        ({"logprob_start_len": 0, "prompt_logprobs": 1, "echo": True, "logprobs": 1}, "from its beginning"),
        ({"logprob_start_len": 3, "prompt_logprobs": 1}, "not a position in a prompt of 3 tokens"),
        ({"logprob_start_len": -1, "prompt_logprobs": 1}, "greater than or equal to 0"),
    ],
)
async def test_a_scored_part_must_be_in_the_prompt(router: Router, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        await router.openai.completions.create(model=MODEL, prompt=[5, 6, 7], extra_body=fields)
    assert refused.value.param == "logprob_start_len" and reason in refused.value.message
    assert not router.dispatcher.requests


async def test_no_output_at_all_is_an_empty_text(router: Router) -> None:
    answer = await router.openai.completions.create(model=MODEL, prompt="x", max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")


async def test_streamed_logprobs_are_those_of_the_plain_answer(router: Router) -> None:
    router.answers(SEAMS, per_delta=2)
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": "The otter",
        "max_tokens": 200,
        "logprobs": 1,
        "echo": True,
        "stop": "END",
    }
    plain = (await router.http.post("/v1/completions", json=options)).json()["choices"][0]["logprobs"]
    stream = await router.openai.completions.create(**options, stream=True)
    chunks = [chunk.choices[0].logprobs async for chunk in stream]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [each for chunk in chunks if chunk for each in getattr(chunk, name)] == plain[name]


async def test_best_of_takes_the_most_likely(router: Router) -> None:
    texts, logprobs = ["bad", "best", "good"], [-3.0, -1.0, -2.0]
    router.dispatcher.script = lambda request, sequence: Script(
        [*router.tokens(texts[sequence]), 2], logprob=logprobs[sequence]
    )
    answer = await router.openai.completions.create(model=MODEL, prompt="x", n=2, best_of=3)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "best"), (1, "good")]
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(router.tokens(text)) + 1 for text in texts)


async def test_usage_ends_a_stream_when_asked_for(router: Router) -> None:
    stream = await router.openai.completions.create(
        model=MODEL, prompt=[5] * 20, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 20
    assert chunks[-1].usage.model_dump()["prompt_tokens_details"]["cached_tokens"] == 16


async def test_every_sampling_parameter_arrives(router: Router) -> None:
    wanted = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": 42,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    other = {"logit_bias": {"7": 5}, "stop_token_ids": [9, 9], "cache_salt": "mine", "priority": 3}
    await router.post("/v1/completions", prompt="x", **wanted, **other)
    (request,) = router.dispatcher.requests
    assert {name: getattr(request.sampling, name) for name in wanted} == wanted
    assert request.sampling.logit_bias == {7: 5.0}
    assert request.sampling.stop_token_ids == (9,)
    assert (request.cache_salt, request.priority) == ("mine", 3)


async def test_a_missing_seed_is_drawn_anew_for_every_prompt(router: Router) -> None:
    await router.openai.completions.create(model=MODEL, prompt=["x", "x"])
    first, second = router.dispatcher.requests
    assert first.sampling.seed != second.sampling.seed


async def test_offsets_count_special_tokens_that_the_prompt_spells_out(router: Router) -> None:
    prompt = "<|im_start|>The otter"
    router.dispatcher.script = lambda request, sequence: Script([], FinishReason.LENGTH)
    answer = await router.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    choice = answer.choices[0]
    assert choice.text == prompt
    assert choice.logprobs is not None and choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[:2] == [0, len("<|im_start|>")]
