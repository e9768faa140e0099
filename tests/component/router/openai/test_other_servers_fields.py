"""Fields that clients of vLLM, SGLang and llama.cpp send: they do what they do there, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.component.router.rig import MODEL, Router

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
PATHS = ["/v1/completions", "/v1/chat/completions"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("per_delta", [1, 3])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_usage_in_every_event_of_a_stream(router: Router, path: str, per_delta: int, logprobs: bool) -> None:
    text = 'a,"usage":null}\n\nb'  # the end of an event, as far as a text can have it
    router.answers(text, per_delta=per_delta)
    options = {"include_usage": True, "continuous_usage_stats": True}
    scored = {"logprobs": 1 if "chat" not in path else True} if logprobs else {}
    *pieces, last = await router.events(
        path, prompt="x", messages=HELLO, n=2, max_tokens=50, stream_options=options, **scored
    )
    plain = await router.events(
        path, prompt="x", messages=HELLO, n=2, max_tokens=50, stream_options={"include_usage": True}, **scored
    )
    assert all(piece["usage"] is None for piece in plain[:-1])
    assert [piece["choices"] for piece in pieces] == [piece["choices"] for piece in plain[:-1]]
    assert (last["choices"], last["usage"]) == (plain[-1]["choices"], plain[-1]["usage"])
    num_tokens = len(router.tokens(text)) + 1
    for index in range(2):
        own = [piece["usage"] for piece in pieces if piece["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in own]
        if "chat" in path:  # an event with the role alone
            assert counts.pop(0) == 0
        assert counts == sorted(set(counts)) and 0 < counts[0] <= per_delta and counts[-1] == num_tokens
        for usage in own:
            assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert last["usage"]["completion_tokens"] == 2 * num_tokens


@pytest.mark.parametrize("path", PATHS)
async def test_usage_in_every_event_only_with_usage_at_all(router: Router, path: str) -> None:
    for options in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}, {}):
        assert all(
            "usage" not in event
            for event in await router.events(path, prompt="x", messages=HELLO, stream_options=options)
        )


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": None}, range(100)),
        ({"truncate_prompt_tokens": 1}, range(99, 100)),
        ({"truncate_prompt_tokens": 30}, range(70, 100)),
        ({"truncate_prompt_tokens": 30, "truncation_side": "left"}, range(70, 100)),
        ({"truncate_prompt_tokens": 30, "truncation_side": "right"}, range(30)),
        ({"truncate_prompt_tokens": 100}, range(100)),
        ({"truncate_prompt_tokens": 10**9}, range(100)),
        ({"truncate_prompt_tokens": -1}, range(100)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 450}, range(38, 100)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 450, "truncation_side": "right"}, range(62)),
        ({"truncation_side": "right"}, range(100)),
    ],
)
async def test_truncated_prompts(router: Router, fields: dict[str, Any], kept: range) -> None:
    answer = await router.post("/v1/completions", prompt=[list(range(100)), [7]], return_token_ids=True, **fields)
    first, second = answer.json()["choices"]
    assert first["prompt_token_ids"] == list(kept) == router.dispatcher.requests[0].prompt_ids
    assert second["prompt_token_ids"] == [7]
    assert answer.json()["usage"]["prompt_tokens"] == len(kept) + 1


async def test_a_conversation_beyond_the_context_is_cut_to_what_fits(router: Router) -> None:
    long: list[Any] = [{"role": "user", "content": "otter " * 600}]
    assert (await router.post("/v1/chat/completions", messages=long)).status_code == 400
    for length in ({}, {"max_tokens": 40}, {"max_completion_tokens": 40}):
        answer = await router.post("/v1/chat/completions", messages=long, truncate_prompt_tokens=-1, **length)
        assert answer.json()["usage"]["prompt_tokens"] == 512 - (40 if length else 1)


async def test_what_is_echoed_is_the_truncated_prompt(router: Router) -> None:
    prompt = "The otter swims"
    ids = router.tokens(prompt)
    for text in (prompt, ids):
        answer = await router.post(
            "/v1/completions", prompt=text, truncate_prompt_tokens=4, echo=True, logprobs=0, max_tokens=4
        )
        choice = answer.json()["choices"][0]
        kept = router.text.tokenizer.decode(ids[-4:], skip_special_tokens=True)
        assert choice["text"].startswith(kept) and prompt.endswith(kept)
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert "".join(choice["logprobs"]["tokens"][:4]) == kept


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("grammar", 'root ::= "a"', ""),
        ("stop_regex", "a+", None),
        ("typical_p", 0.9, 1.0),
        ("mirostat", 2, 0),
        ("dry_multiplier", 0.8, 0.0),
        ("xtc_probability", 0.5, 0),
        ("dynatemp_range", 0.5, 0.0),
        ("repeat_penalty", 1.1, 1.0),
        ("no_repeat_ngram_size", 3, 0),
        ("n_predict", 10, -1),
        ("lora_path", "x", None),
        ("return_hidden_states", True, False),
        ("top_n_sigma", 1.0, -1),
        ("top_a", 0.1, 0),
        ("tfs", 0.9, 1),
        ("tfs_z", 0.9, 1.0),
        ("epsilon_cutoff", 3, 0),
        ("eta_cutoff", 3, 0),
        ("smoothing_factor", 0.2, 0),
        ("dynamic_temperature", True, False),
        ("mirostat_mode", 2, 0),
        ("encoder_repetition_penalty", 1.1, 1),
        ("penalty_alpha", 0.6, 0),
        ("guidance_scale", 1.5, 1),
        ("negative_prompt", "x", ""),
        ("ban_eos_token", True, False),
        ("custom_token_bans", "5,6", ""),
        ("banned_strings", ["x"], []),
        ("grammar_string", 'root ::= "a"', ""),
        ("input_ids", [5], None),
        ("input_embeds", [[0.5]], None),
        ("session_params", {"id": "x"}, {}),
        ("packed_top_logprobs", True, False),
        ("repetition_detection", {"max_pattern_size": 3}, None),
        ("return_routed_experts", True, False),
        ("watermarking", True, False),
    ],
)
async def test_what_would_change_the_answer_and_is_not_supported(
    router: Router, path: str, field: str, value: Any, harmless: Any
) -> None:
    answer = await router.post(path, prompt="x", messages=HELLO, **{field: value})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (field, "unsupported_parameter")
    assert (await router.post(path, prompt="x", messages=HELLO, **{field: harmless})).status_code == 200
    for other in ("/v1/responses", "/v1/messages"):
        body: dict[str, Any] = {"messages": HELLO, "input": "x", "max_tokens": 3}
        assert (await router.post(other, **body, **{field: value})).status_code == 400
        assert (await router.post(other, **body, **{field: harmless})).status_code == 200


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses", "/v1/messages"])
async def test_an_empty_salt_is_a_mistake(router: Router, path: str) -> None:
    """A gateway that sends one meant to separate its users."""
    body: dict[str, Any] = {"messages": HELLO, "input": "x", "max_tokens": 3}
    if path == "/v1/completions":
        body["prompt"] = "x"
    refused = await router.post(path, **body, cache_salt="")
    assert refused.status_code == 400 and "cache_salt" in refused.json()["error"]["message"]
    assert (await router.post(path, **body, cache_salt=None)).status_code == 200
    assert (await router.post(path, **body, cache_salt="a")).status_code == 200
    assert [request.cache_salt for request in router.dispatcher.requests] == ["", "a"]


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses", "/v1/messages"])
async def test_extra_keys_separate_caches(router: Router, path: str) -> None:
    body: dict[str, Any] = {"messages": HELLO, "input": "x", "max_tokens": 3}
    if path == "/v1/completions":
        body["prompt"] = "x"
    salts = [{}, {"extra_key": "b"}, {"cache_salt": "b"}, {"cache_salt": "a", "extra_key": "b"}]
    salts += [{"cache_salt": "ab"}, {"extra_key": "ab"}, {"cache_salt": "ab", "extra_key": "c"}]
    for salt in salts:
        assert (await router.post(path, **body, **salt)).status_code == 200
    assert len({request.cache_salt for request in router.dispatcher.requests}) == len(salts)
    assert (await router.post(path, **body, extra_key=["a"])).status_code == 400


@pytest.mark.parametrize("path", PATHS)
async def test_no_stop_trim_keeps_the_stop_string(router: Router, path: str) -> None:
    for fields, ends in (
        ({}, "An otter"),
        ({"no_stop_trim": True}, "An otter is"),
        ({"no_stop_trim": None}, "An otter"),
    ):
        answer = await router.post(path, prompt="x", messages=HELLO, stop=" is", **fields)
        (choice,) = answer.json()["choices"]
        assert (choice["message"]["content"] if "chat" in path else choice["text"]) == ends
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("num_top", [0, 1, 3])
@pytest.mark.parametrize("echo", [{}, {"echo": True, "logprobs": 2}])
async def test_scores_of_prompts(router: Router, num_top: int, echo: dict[str, Any]) -> None:
    prompts = ["The otter", "o"]
    answer = await router.post("/v1/completions", prompt=prompts, n=2, prompt_logprobs=num_top, **echo)
    choices = answer.json()["choices"]
    assert len(choices) == 4
    for number, choice in enumerate(choices):
        ids = router.tokens(prompts[number // 2])
        first, *others = choice["prompt_logprobs"]
        assert first is None and len(others) == len(ids) - 1
        for token_id, scores in zip(ids[1:], others, strict=True):
            own = scores[str(token_id)]
            assert own["logprob"] == -1.0
            assert own["decoded_token"] == router.text.tokenizer.decode([token_id], skip_special_tokens=False)
            assert sorted(each["rank"] for each in scores.values() if each["rank"]) == list(range(1, num_top + 1))
            assert (own["rank"] is None) is (len(scores) > num_top)
    plain = await router.post("/v1/completions", prompt=prompts, n=2, **echo)
    assert [each["logprobs"] for each in choices] == [each["logprobs"] for each in plain.json()["choices"]]
    assert all(each["prompt_logprobs"] is None for each in plain.json()["choices"])


async def test_scores_of_a_conversation(router: Router) -> None:
    answer = (await router.post("/v1/chat/completions", messages=HELLO, n=2, prompt_logprobs=1)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None and all(answer["prompt_logprobs"][1:])
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_name_tokens_by_their_ids_if_asked_for(router: Router, stream: bool) -> None:
    router.answers("é 🦦")
    names = [f"token_id:{token_id}" for token_id in [*router.tokens("é 🦦"), *router.tokens("<|im_end|>")]]
    wanted: dict[str, Any] = {"return_tokens_as_token_ids": True}
    completed = router.openai.completions.create
    chatted = router.openai.chat.completions.create
    text: Any = {"model": MODEL, "prompt": "x", "logprobs": 1, "extra_body": wanted}
    chat: Any = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 1, "extra_body": wanted}
    if stream:
        texts: list[Any] = [chunk async for chunk in await completed(**text, stream=True)]
        chats: list[Any] = [chunk async for chunk in await chatted(**chat, stream=True)]
    else:
        texts, chats = [await completed(**text)], [await chatted(**chat)]
    of_texts = [each.choices[0].logprobs for each in texts if each.choices[0].logprobs]
    assert [name for each in of_texts for name in each.tokens] == names
    assert {name for each in of_texts for top in each.top_logprobs for name in top} == set(names)
    of_chats = [entry for each in chats if each.choices[0].logprobs for entry in each.choices[0].logprobs.content]
    assert [entry.token for entry in of_chats] == names
    assert [bytes(entry.bytes).decode() for entry in of_chats] == names
    assert [entry.top_logprobs[0].token for entry in of_chats] == names
