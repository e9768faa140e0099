"""Every bad input gets its error in OpenAI's shape, and nothing of it reaches dispatch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvrelay.text.request.validation import ModelLimits
from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router, running_router

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hi"}]

COMMON: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": None}, "model", "invalid_type"),
    ({"model": 7}, "model", "invalid_type"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": 1.5}, "min_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": "2"}, "n", "invalid_type"),
    ({"n": True}, "n", "invalid_type"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": "16"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 513}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 10**30}, "max_tokens", "invalid_type"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": 0.5}, "seed", "invalid_type"),
    ({"seed": 2**64}, "seed", "invalid_type"),
    ({"seed": -(2**63) - 1}, "seed", "invalid_type"),
    ({"seed": "7"}, "seed", "invalid_type"),
    ({"n": 129.0}, "n", "invalid_value"),
    ({"n": 1e300}, "n", "invalid_type"),
    ({"stop_token_ids": [5.0]}, "stop_token_ids[0]", "invalid_type"),
    ({"stop": 7}, "stop", "invalid_type"),
    ({"stop": ["a", 7]}, "stop", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": "a" * 1025}, "stop", "invalid_value"),
    ({"stop_token_ids": [400]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"stop_token_ids": [5] * 1025}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": 7}, "stop_token_ids", "invalid_type"),
    ({"logit_bias": {"400": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"otter": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"otter": 1, "7": 1, "x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"7": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"7": "1"}}, "logit_bias", "invalid_type"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": 7}, "stream_options", "invalid_type"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"response_format": 7}, "response_format", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "otter"}}}},
        "response_format",
        None,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        "response_format.json_schema.name",
        "invalid_value",
    ),
    ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern", None),
    ({"guided_json": {}, "whitespace_pattern": "("}, "whitespace_pattern", None),
    ({"guided_json": {"type": "otter"}, "guided_whitespace_pattern": " ?"}, "guided_json", None),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": "("}},
        "structured_outputs.whitespace_pattern",
        None,
    ),
    ({"guided_regex": "("}, "guided_regex", None),
    ({"guided_regex": 7}, "guided_regex", "invalid_value"),
    ({"guided_regex": "a" * (129 * 1024)}, "guided_regex", "invalid_value"),
    ({"guided_regex": "((a{99}){99}){99}"}, "guided_regex", None),
    ({"guided_choice": ["a", ""]}, "guided_choice", "invalid_value"),
    ({"guided_choice": "a"}, "guided_choice", "invalid_value"),
    ({"guided_json": "{"}, "guided_json", "invalid_value"),
    ({"guided_json": "[]"}, "guided_json", "invalid_value"),
    ({"guided_grammar": "start: other"}, "guided_grammar", None),
    ({"guided_json_object": 1}, "guided_json_object", "invalid_value"),
    ({"guided_json": {}, "guided_whitespace_pattern": 7}, "guided_whitespace_pattern", "invalid_value"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"whitespace_pattern": ""}}, "structured_outputs", "invalid_value"),
    ({"response_format": {"type": "json_object", "value": 7}}, "response_format.value", "invalid_value"),
    ({"response_format": {"type": "json"}}, "response_format.json_schema", "invalid_value"),
    (
        {"guided_json": {}, "structured_outputs": {"disable_any_whitespace": 1}},
        "structured_outputs.disable_any_whitespace",
        "invalid_value",
    ),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex", "invalid_value"),
    ({"structural_tag": {"triggers": []}}, "structural_tag", "invalid_value"),
    ({"structural_tag": {"format": {"type": "otter"}}}, "structural_tag", None),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
    (
        {"structured_outputs": {"json": '{"items":' * 900 + "{}" + "}" * 900, "disable_additional_properties": True}},
        "structured_outputs.json",
        "invalid_value",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": 1}},
        "structured_outputs.disable_any_whitespace",
        "invalid_value",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}}},
        "response_format.json_schema.strict",
        "invalid_value",
    ),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "invalid_type"),
    ({"allowed_token_ids": [5, "6"]}, "allowed_token_ids[1]", "invalid_type"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "invalid_value"),
    ({"allowed_token_ids": [400]}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [5] * 16_385}, "allowed_token_ids", "invalid_value"),
    ({"bad_words": "otter"}, "bad_words", "invalid_type"),
    ({"bad_words": ["otter", 5]}, "bad_words", "invalid_type"),
    ({"bad_words": ["otter", ""]}, "bad_words", "invalid_value"),
    ({"bad_words": ["\n "]}, "bad_words", "invalid_value"),
    ({"bad_words": ["x" * 257]}, "bad_words", "invalid_value"),
    ({"bad_words": ["x"] * 1025}, "bad_words", "invalid_value"),
    ({"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids", "invalid_value"),
    ({"use_beam_search": True, "bad_words": ["otter"]}, "bad_words", "invalid_value"),
    ({"guided_regex": "a", "use_beam_search": True}, "use_beam_search", "invalid_value"),
    ({"use_beam_search": 1}, "use_beam_search", "invalid_type"),
    ({"length_penalty": 0.5}, "length_penalty", "invalid_value"),
    ({"length_penalty": 0}, "length_penalty", "invalid_value"),
    ({"early_stopping": True}, "early_stopping", "invalid_value"),
    ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping", "invalid_type"),
    ({"use_beam_search": True, "early_stopping": 1}, "early_stopping", "invalid_type"),
    ({"use_beam_search": True, "length_penalty": 5.5}, "length_penalty", "invalid_value"),
    ({"use_beam_search": True, "length_penalty": "1"}, "length_penalty", "invalid_type"),
    ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of", "invalid_value"),
    ({"use_beam_search": True, "best_of": 129}, "best_of", "invalid_value"),
    ({"use_beam_search": True, "temperature": 0.7}, "temperature", "invalid_value"),
    ({"use_beam_search": True, "top_p": 0.9}, "top_p", "invalid_value"),
    ({"use_beam_search": True, "top_k": 5}, "top_k", "invalid_value"),
    ({"use_beam_search": True, "min_p": 0.1}, "min_p", "invalid_value"),
    ({"use_beam_search": True, "stop": "x"}, "stop", "invalid_value"),
    ({"use_beam_search": True, "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"use_beam_search": True, "n": 65, "max_tokens": 4}, "n", "invalid_value"),
    ({"use_beam_search": True, "best_of": 65, "max_tokens": 4}, "best_of", "invalid_value"),
    ({"use_beam_search": True, "best_of": 60, "max_tokens": 200}, "best_of", "context_length_exceeded"),
    ({"logits_processors": ["x"]}, "logits_processors", "unsupported_parameter"),
    ({"cache_salt": 7}, "cache_salt", "invalid_type"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "invalid_type"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 0, "use_beam_search": True, "n": 2}, "prompt_logprobs", "invalid_value"),
]

COMPLETION: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ["otter", ""]}, "prompt", "invalid_value"),
    ({"prompt": [[5], []]}, "prompt", "invalid_value"),
    ({"prompt": 7}, "prompt", "invalid_type"),
    ({"prompt": ["a", 7]}, "prompt", "invalid_type"),
    ({"prompt": [5, True]}, "prompt", "invalid_type"),
    ({"prompt": [5, 1.5]}, "prompt", "invalid_type"),
    ({"prompt": [400]}, "prompt", "invalid_value"),
    ({"prompt": [[5], [-1]]}, "prompt", "invalid_value"),
    ({"prompt": [5] * 513}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * 512}, "prompt", "context_length_exceeded"),
    ({"prompt": "otter " * 600}, "prompt", "context_length_exceeded"),
    ({"prompt": "otter " * 50_000}, "prompt", "context_length_exceeded"),
    ({"prompt": ["hi", "0" * 50_000]}, "prompt", "context_length_exceeded"),
    ({"prompt": "otter " * 50_000, "truncate_prompt_tokens": 600}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * 500, "max_tokens": 13}, "max_tokens", "context_length_exceeded"),
    ({"prompt": ["a"] * 1025}, "prompt", None),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"best_of": 0}, "best_of", "invalid_value"),
    ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
    ({"use_beam_search": True, "logprobs": 0}, "logprobs", "invalid_value"),
    ({"use_beam_search": True, "n": 60, "max_tokens": 1, "prompt": ["a"] * 20}, "prompt", None),
    ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
    ({"echo": "yes"}, "echo", "invalid_type"),
    ({"suffix": "the end"}, "suffix", "unsupported_parameter"),
    ({"suffix": 5}, "suffix", "invalid_type"),
    ({"suffix": "a", "prompt": [5]}, "suffix", "invalid_value"),
    ({"suffix": "a", "echo": True}, "echo", "invalid_value"),
    ({"suffix": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "invalid_value"),
]

CHAT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages", "invalid_type"),
    ({"messages": [{"content": "hi"}]}, "messages", "invalid_value"),
    ({"messages": [{"role": "otter", "content": "hi"}]}, "messages", "invalid_value"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages", "invalid_type"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "invalid_type"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages", "invalid_type"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "invalid_value",
    ),
    ({"messages": [{"role": "user", "content": "hi", "name": 7}]}, "messages", "invalid_type"),
    ({"messages": [*HELLO, {"role": "tool", "content": "42"}]}, "messages", "invalid_value"),
    ({"messages": [{"role": "user", "content": "otter " * 600}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "otter " * 50_000}]}, "messages", "context_length_exceeded"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": 512}, "max_completion_tokens", "context_length_exceeded"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"use_beam_search": True, "logprobs": True}, "logprobs", "invalid_value"),
    ({"use_beam_search": True, "max_completion_tokens": 0}, "max_tokens", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "invalid_type"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": 7}, "chat_template_kwargs", "invalid_type"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", None),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(text: TextService) -> AsyncIterator[Router]:
    """One for all tests of this file: none of them may leave anything in it."""
    async with running_router(text) as running:
        yield running


def check_error(answer: httpx.Response, status: int, kind: str, param: str | None, code: str | None) -> None:
    """The whole error object, and a message for people."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, code)


@pytest.mark.parametrize(("bad", "param", "code"), [*COMMON, *COMPLETION], ids=lambda value: str(value)[:60])
async def test_completions(router: Router, bad: dict[str, Any], param: str, code: str | None) -> None:
    answer = await router.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **bad})
    check_error(answer, 400, "invalid_request_error", param, code)
    assert router.dispatcher.requests == []


@pytest.mark.parametrize(("bad", "param", "code"), [*COMMON, *CHAT], ids=lambda value: str(value)[:60])
async def test_chat(router: Router, bad: dict[str, Any], param: str, code: str | None) -> None:
    answer = await router.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, **bad})
    check_error(answer, 400, "invalid_request_error", param, code)
    assert router.dispatcher.requests == []


@pytest.mark.parametrize("missing", ["model", "prompt"])
async def test_missing_parameters_are_named(router: Router, missing: str) -> None:
    body = {"model": MODEL, "prompt": "hi"}
    del body[missing]
    answer = await router.http.post("/v1/completions", json=body)
    check_error(answer, 400, "invalid_request_error", missing, "missing_required_parameter")


async def test_the_context_error_names_both_numbers(router: Router) -> None:
    answer = await router.post("/v1/completions", prompt=[5] * 600)
    message = answer.json()["error"]["message"]
    assert "512" in message and "600" in message
    answer = await router.post("/v1/completions", prompt=[5] * 500, max_tokens=100)
    message = answer.json()["error"]["message"]
    assert "512" in message and "600" in message


async def test_one_bad_prompt_of_many_keeps_all_from_being_submitted(router: Router) -> None:
    answer = await router.post("/v1/completions", prompt=["good", "otter " * 600])
    check_error(answer, 400, "invalid_request_error", "prompt", "context_length_exceeded")
    assert router.dispatcher.requests == []


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/completions/"])
async def test_unknown_routes(router: Router, path: str) -> None:
    check_error(await router.http.post(path, json={}), 404, "invalid_request_error", None, "unknown_url")


@pytest.mark.parametrize(
    ("path", "bad", "param"),
    [
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
async def test_tokenizing(router: Router, path: str, bad: dict[str, Any], param: str) -> None:
    answer = await router.http.post(path, json=bad)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
async def test_texts_with_tokens_that_only_the_tokenizer_has(text: TextService, stream: bool) -> None:
    async with running_router(text) as small:
        vocab_size = text.tokenizer.encode("o", add_special_tokens=False)[0]
        small.dispatcher.model_limits = ModelLimits(512, vocab_size, 64, 200, 16)
        answer = await small.post("/v1/completions", prompt=["!", "otter"], stream=stream)
        check_error(answer, 400, "invalid_request_error", "prompt", "invalid_value")
        answer = await small.post("/v1/chat/completions", messages=HELLO, stream=stream)
        check_error(answer, 400, "invalid_request_error", "messages", "invalid_value")
        assert small.dispatcher.requests == []


PANICS = "!!\n "
"""Over this text the tokenizers library panics, with the added tokens below."""


def tokenizer_that_panics() -> Tokenizer:
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    odd = [AddedToken("!", rstrip=True, single_word=True, normalized=False)]
    odd.append(AddedToken("\n", lstrip=True, single_word=True, normalized=False))
    tokenizer.add_tokens(odd)
    return tokenizer


@pytest.mark.parametrize("num_times", [1, 3000], ids=["short", "long"])
async def test_a_text_over_which_the_tokenizers_library_panics(tmp_path: Path, num_times: int) -> None:
    """It is not said to be the client's fault, and the next request is served."""
    prompt = "a" * num_times + PANICS
    backend = tokenizer_that_panics()
    with pytest.raises(BaseException, match="bad split"):
        backend.encode(prompt)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    odd = TextService.load(str(tmp_path))
    try:
        async with running_router(odd) as small:
            check_error(await small.post("/v1/completions", prompt=prompt), 500, "server_error", None, "internal_error")
            small.answers("otter")
            assert (await small.post("/v1/completions", prompt="a")).status_code == 200
    finally:
        odd.close()
