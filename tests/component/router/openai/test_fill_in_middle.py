"""`suffix` of text completions, for a model whose tokenizer has tokens for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import tokenizers

from kvrelay.protocol.sampling import FinishReason
from kvrelay.text.service import TextService
from tests.component.router.rig import Router, running_router
from tests.fakes.scripted_dispatcher import Script
from tests.fakes.text_model import write_text_model

MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def coder_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextService]:
    folder = write_text_model(tmp_path_factory.mktemp("coder-model"))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(str(folder / "tokenizer.json"))
    service = TextService.load(str(folder))
    yield service
    service.close()


@pytest.fixture
async def router(coder_text: TextService) -> AsyncIterator[Router]:
    async with running_router(coder_text) as running:
        yield running


async def test_the_middle_comes_between_prefix_and_suffix(router: Router) -> None:
    answer = await router.post(PATH, prompt="def f(", suffix="\n    return 東")
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "An otter is a mammal."
    (request,) = router.dispatcher.requests
    text = "<|fim_prefix|>def f(<|fim_suffix|>\n    return 東<|fim_middle|>"
    assert request.prompt_ids == router.tokens(text)
    assert answer.json()["usage"]["prompt_tokens"] == len(request.prompt_ids)


async def test_several_prompts_have_the_same_suffix(router: Router) -> None:
    answer = await router.post(PATH, prompt=["a", ""], suffix="z", n=2)
    assert len(answer.json()["choices"]) == 4
    prompts = [router.tokens(f"<|fim_prefix|>{prefix}<|fim_suffix|>z<|fim_middle|>") for prefix in ("a", "")]
    assert [request.prompt_ids for request in router.dispatcher.requests] == prompts


async def test_a_marker_ends_the_middle(router: Router) -> None:
    middle, (end,) = router.tokens("otter"), router.tokens("<|file_sep|>")
    script = Script([*middle, end], finish=FinishReason.STOP_TOKEN)
    router.dispatcher.script = lambda request, sequence: script
    answer = await router.post(PATH, prompt="a", suffix="z", stop_token_ids=[7])
    assert answer.json()["choices"][0]["text"] == "otter"
    stops = router.dispatcher.requests[0].sampling.stop_token_ids
    assert set(stops) == {7, *(router.tokens(marker)[0] for marker in MARKERS)}


async def test_without_a_suffix_a_prompt_is_a_prompt(router: Router) -> None:
    for suffix in ("", None):
        await router.post(PATH, prompt="a", suffix=suffix)
    assert [request.prompt_ids for request in router.dispatcher.requests] == [router.tokens("a")] * 2
    assert router.dispatcher.requests[0].sampling.stop_token_ids == ()


async def test_prefix_and_suffix_together_must_fit(router: Router) -> None:
    for body in ({"prompt": "é" * 9000, "suffix": "z"}, {"prompt": "a", "suffix": "é" * 90_000}):
        answer = await router.post(PATH, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not router.dispatcher.requests


async def test_a_model_without_such_tokens_refuses_it(text: TextService) -> None:
    async with running_router(text) as router:
        answer = await router.post(PATH, prompt="a", suffix="z")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "suffix", "unsupported_parameter")
        assert "filling in the middle" in error["message"]
