"""The engine inside a program: the tokens of transformers, whatever else it runs; nothing is left behind."""

from __future__ import annotations

import gc
import json
import random
import shutil
import string
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kvrelay import LLM, Engine, SamplingParams
from kvrelay.config.worker import WorkerConfig
from kvrelay.text.request.completion_request import CompletionRequest
from kvrelay.text.tokenizer_files import sampling_defaults
from kvrelay.worker.worker_main import load_runner
from kvrelay_embedded import StepOutput
from kvrelay_embedded import engine as engine_module
from tests.e2e import reference
from tests.fakes.waiting import wait_until
from tests.thoroughness import examples
from tests.tiny_models import VOCAB_SIZE, build_model

pytestmark = pytest.mark.component
SMALL: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_blocks": 24, "token_budget": 32, "max_running": 8}
"""A pool of 384 tokens, so that requests wait and are preempted."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine(str(model), **SMALL, max_model_len=256)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SMALL, max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference_model(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def prompt_of(rng: random.Random, longest: int = 100) -> list[int]:
    """Some begin alike. Without token 0, which is padding to the reference."""
    start = list(range(1, 41)) if rng.random() < 0.5 else []
    return start + [rng.randrange(1, VOCAB_SIZE - 5) for _ in range(rng.randint(1, longest))]


def check_empty(engine: Engine) -> None:
    assert not engine.has_work and not engine.request_ids
    pool = engine._scheduler.blocks.pool
    pool.check_integrity()
    assert pool.num_available == pool.num_blocks


def test_greedy_output_is_that_of_transformers(model: Path, llm: LLM) -> None:
    rng = random.Random(1)
    prompts = [prompt_of(rng) for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for _ in range(2):  # the second time from the cache
        answers = llm.generate(prompts, params, progress=False)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.outputs[0].token_ids == reference.greedy(model, prompt, 24)
            assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == 24
    assert any(answer.usage.cached_tokens for answer in answers)
    check_empty(llm.engine)


def generation_fields(rng: random.Random) -> dict[str, Any]:
    """Fields of a `generation_config.json` that are honoured, and some that are warned of, with harmless values."""
    fields: dict[str, Any] = {"do_sample": False, "max_new_tokens": rng.randint(1, 20)}
    # With transformers a stop string counts before `min_new_tokens`, and in the names of special tokens.
    least = {"min_new_tokens": rng.randint(0, fields["max_new_tokens"])}
    fields |= rng.choice([{}, least, {"stop_strings": rng.sample(string.ascii_uppercase, rng.randint(1, 9))}])
    fields |= rng.choice([{}, {"suppress_tokens": rng.sample(range(256), rng.randint(1, 200))}])
    fields |= rng.choice([{}, {"repetition_penalty": rng.choice([1.0, 1.3, 0.8])}])
    return fields | rng.choice([{}, {"no_repeat_ngram_size": 0, "num_beams": 1, "begin_suppress_tokens": None}])


def check_as_generated(
    llm: LLM, reference_model: Any, prompt: list[int], config: GenerationConfig, params: SamplingParams
) -> None:
    """The output is that of transformers, but for its end tokens and what a stop string cuts off."""
    tokenizer = AutoTokenizer.from_pretrained(llm.engine.spec.name)
    generated = reference_model.generate(torch.tensor([prompt]), generation_config=config, tokenizer=tokenizer)
    expected = generated[0, len(prompt) :].tolist()
    (output,) = llm.generate([prompt], params, progress=False)[0].outputs
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    kept = expected[:-1] if expected[-1] in ends else expected
    text = str(tokenizer.decode(kept, skip_special_tokens=True))
    found = [place for each in config.stop_strings or () if (place := text.find(each)) >= 0]
    assert output.text == text[: min(found, default=len(text))]
    if not found:
        assert [each for each in output.token_ids if each not in ends] == kept
    assert output.finish_reason == ("stop" if found or kept != expected else "length")


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_defaults_of_the_generation_config_give_what_transformers_generates(
    model: Path, llm: LLM, reference_model: Any, seed: int
) -> None:
    rng = random.Random(seed)
    fields, prompt = generation_fields(rng), prompt_of(rng)
    # So that some outputs end early. The two are not added in transformers' order.
    bias = 0.0 if "repetition_penalty" in fields else rng.uniform(-3, 3)
    config = GenerationConfig(**fields, eos_token_id=256, pad_token_id=0, sequence_bias=[[[256], bias]])
    service = llm.engine._text.service
    before, service.sampling_defaults = service.sampling_defaults, sampling_defaults(fields)
    try:
        check_as_generated(llm, reference_model, prompt, config, SamplingParams(logit_bias={256: bias}))
    finally:
        service.sampling_defaults = before


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_a_directory_gives_what_transformers_generates_with_its_files(
    model: Path, reference_model: Any, tmp_path: Path, seed: int
) -> None:
    """Outputs also end where the tokenizer alone says so."""
    rng = random.Random(seed)
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    copy = shutil.copytree(model, tmp_path / "copy")
    ids = [None, 256, 70, [71, 72, 256], []]
    config, stated = (json.loads((copy / f"{name}config.json").read_text()) for name in ("", "tokenizer_"))
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": rng.choice(ids)}))
    fields = generation_fields(rng) | rng.choice([{}, {"eos_token_id": rng.choice(ids)}])
    (copy / "generation_config.json").write_text(json.dumps(fields))
    token = rng.choice([None, "<|end|>", "<|user|>", "G"])
    described = {"__type": "AddedToken", "content": token, "special": True}
    stated["eos_token"] = described if token and rng.random() < 0.5 else token
    if rng.random() < 0.3:
        stated |= {"tokenizer_class": "GPT2Tokenizer"}  # whose own end token is beyond the vocabulary
        del stated["eos_token"]
        token = None
    (copy / "tokenizer_config.json").write_text(json.dumps(stated))
    own = GenerationConfig.from_pretrained(copy)
    ends = {*listed(own.eos_token_id), *listed(AutoConfig.from_pretrained(copy).eos_token_id)}
    ends |= set() if token is None else {AutoTokenizer.from_pretrained(copy).eos_token_id}
    own.update(eos_token_id=sorted(ends) or None, pad_token_id=0)
    with LLM(str(copy), **SMALL, max_model_len=256) as llm:
        for _ in range(4):
            check_as_generated(llm, reference_model, prompt_of(rng), own, SamplingParams())


def listed(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def test_an_end_that_only_the_tokenizer_names_ends_constrained_output(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "generation_config.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with LLM(str(copy), **SMALL, max_model_len=256) as llm:
        params = SamplingParams(structured_outputs={"regex": "[a-f]{3,9}"}, max_tokens=20)
        (output,) = llm.generate([[1, 2, 3]], params, progress=False)[0].outputs
    assert output.finish_reason == "stop" and 3 <= len(output.text) <= 9


def params_of(rng: random.Random) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": rng.randint(1, 30), "seed": rng.randrange(2**40)}
    given |= rng.choice([{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}])
    given |= rng.choice([{}, {"n": 3}, {"stop": ["a", "xy"]}, {"logprobs": 2}, {"presence_penalty": 1.0}])
    given |= rng.choice([{}, {"ignore_eos": True}, {"min_tokens": 1}, {"structured_outputs": {"regex": "[a-f]{3,9}"}}])
    if rng.random() < 0.1:
        return SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6)
    return SamplingParams(**given)


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 2**32))
def test_a_request_gives_the_same_alone_and_among_others(engine: Engine, llm: LLM, seed: int) -> None:
    rng = random.Random(seed)
    waiting = [(f"{number}", prompt_of(rng), params_of(rng)) for number in range(8)]
    requests = {name: (prompt, params) for name, prompt, params in waiting}
    texts: dict[tuple[str, int], list[StepOutput]] = {}
    aborted: set[str] = set()
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            engine.add_request(*waiting.pop())
        if engine.request_ids and rng.random() < 0.02:
            aborted.add(name := rng.choice(list(engine.request_ids)))
            assert engine.abort(name) and not engine.abort(name)
        for told in engine.step():
            assert told.request_id not in aborted
            texts.setdefault((told.request_id, told.index), []).append(told)
    check_empty(engine)
    for name, (prompt, params) in requests.items():
        if name in aborted:
            continue
        for one in llm.generate([prompt], params)[0].outputs:
            parts = texts[name, one.index]
            assert "".join(each.text for each in parts) == one.text
            assert [token_id for each in parts for token_id in each.token_ids] == one.token_ids
            assert [each.finish_reason for each in parts[:-1]] == [None] * (len(parts) - 1)
            assert (parts[-1].finish_reason, parts[-1].stop_reason) == (one.finish_reason, one.stop_reason)


def test_a_constrained_text_follows_its_grammar(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"choice": ["otter", "river"]}, max_tokens=20, n=4, temperature=1)
    (answer,) = llm.generate("An animal", params)
    assert {one.text for one in answer.outputs} <= {"otter", "river"}
    assert {one.finish_reason for one in answer.outputs} == {"stop"}


def test_prompts_are_scored_as_by_transformers(model: Path, llm: LLM) -> None:
    prompt = prompt_of(random.Random(3), 60)
    (answer,) = llm.generate([prompt], SamplingParams(prompt_logprobs=0, logprobs=0, max_tokens=5, temperature=0))
    expected = reference.logprobs(model, prompt + answer.outputs[0].token_ids, 1)
    entries = answer.prompt_logprobs + answer.outputs[0].logprobs
    assert len(entries) == len(expected)
    for row, entry in zip(expected, entries, strict=True):
        assert abs(float(row[entry.token_id]) - entry.logprob) < 1e-4


def test_chats_go_through_the_template(llm: LLM) -> None:
    one = [{"role": "user", "content": "abc"}]
    params = SamplingParams(temperature=0, max_tokens=4)
    (answer,) = llm.chat(one, params)
    assert answer.prompt_token_ids == llm.engine.chat_prompt(one)
    assert [each.outputs[0].text for each in llm.chat([one, one], params, progress=False)] == [
        answer.outputs[0].text
    ] * 2


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "must not be empty"),
        ([VOCAB_SIZE], {}, f"{VOCAB_SIZE} is out of range"),
        ([-1], {}, "-1 is out of range"),
        ([1] * 300, {}, "300 tokens"),
        ([1] * 200, {"max_tokens": 100}, "300 tokens were asked for"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "out of range"),
        ([1], {"n": 9}, "up to 8 sequences"),
        ([1], {"structured_outputs": {"regex": "(["}}, "cannot be constrained"),
    ],
)
def test_what_cannot_run_is_refused_and_queues_nothing(
    llm: LLM, prompt: Any, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        llm.generate([[1, 2], prompt], SamplingParams(**params))
    check_empty(llm.engine)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True, "temperature": 1}, "temperature"),
    ],
)
def test_a_wrong_parameter_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"'{message}'"):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"threds": 1}, "did you mean threads"), ({"redis_url": "none"}, "redis_url"), ({"block_size": 9}, "block_size")],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**given)


def test_parameters_are_fields_of_the_http_api() -> None:
    assert SamplingParams.model_fields.keys() <= CompletionRequest.model_fields.keys()
    with pytest.raises(TypeError, match="'temprature'"):
        SamplingParams(temprature=1)


def test_a_copy_of_parameters_is_checked_when_it_is_used(engine: Engine) -> None:
    params = SamplingParams(n=2, stop=["x"], logit_bias={7: 1.5}, max_tokens=3)
    copied = params.model_copy(update={"n": 3})
    assert (copied.request.n, copied.request.stop, copied.request.logit_bias) == (3, ["x"], {7: 1.5})
    with pytest.raises(ValueError, match="'n'"):
        engine.add_request("one", [1, 2, 3], params.model_copy(update={"n": 0}))
    check_empty(engine)


def test_an_id_that_is_in_use_is_refused(engine: Engine) -> None:
    engine.add_request("one", [1, 2, 3])
    with pytest.raises(ValueError, match="'one' has not ended"):
        engine.add_request("one", [1, 2, 3])
    assert engine.abort("one")
    check_empty(engine)


def test_an_interrupted_call_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.engine.step, iter(range(3))

    def interrupted() -> list[StepOutput]:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=30, ignore_eos=True), progress=False)
    check_empty(llm.engine)


@pytest.mark.parametrize("place", ["_begin_sampling", "_find_candidates"])
def test_an_interrupted_forward_leaves_nothing(
    model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Before and after its tokens are launched."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [list(range(1, 60)), [4, 5]]
    work, calls = getattr(llm.engine._runner, place), iter(range(3))

    def interrupted(*given: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return work(*given)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._runner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params, progress=False)
    check_empty(llm.engine)
    for prompt, answer in zip(prompts, llm.generate(prompts, params, progress=False), strict=True):
        assert answer.outputs[0].token_ids == reference.greedy(model, prompt, 12)


def test_what_has_a_wrong_type_queues_nothing(llm: LLM) -> None:
    wrong: Any = None
    with pytest.raises(TypeError):
        llm.generate([[1, 2], wrong], progress=False)
    wrong = {"n": 1}
    with pytest.raises(AttributeError):
        llm.generate([[1, 2], [3]], [SamplingParams(), wrong], progress=False)
    check_empty(llm.engine)


def test_numpy_arrays_and_numbers_are_taken(llm: LLM) -> None:
    tokens = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    plain = SamplingParams(max_tokens=4, temperature=0.5, seed=3, logit_bias={7: 1.5}, stop_token_ids=[9])
    params = SamplingParams(
        max_tokens=np.int64(4),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
        logit_bias={np.int64(7): np.float64(1.5)},  # type: ignore[dict-item]
        stop_token_ids=np.array([9]),  # type: ignore[arg-type]
    )
    expected = [each.outputs[0].token_ids for each in llm.generate(tokens.tolist(), plain, progress=False)]
    for prompts in (tokens, [*tokens], [list(row) for row in tokens]):
        answers = llm.generate(prompts, params, progress=False)
        assert [each.outputs[0].token_ids for each in answers] == expected
    (alone,) = llm.generate(tokens[0], params)
    assert alone.outputs[0].token_ids == expected[0] and alone.prompt_token_ids == [1, 2, 3]
    with pytest.raises(TypeError):
        llm.generate(np.array([1.5, 2.0]), params)
    check_empty(llm.engine)


def test_drafts_come_from_earlier_outputs(model: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(str(model), **SMALL, max_model_len=256) as llm:
        (expected,) = llm.generate([1, 2, 3], params)
        drafted = params.model_copy(update={"speculation": "suffix"})
        salted = drafted.model_copy(update={"cache_salt": "other"})
        for each in (drafted, drafted, salted):
            (answer,) = llm.generate([1, 2, 3], each)
            assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        earlier = llm.engine._scheduler.lifecycle.speculator.earlier
        assert earlier.num_tokens > 40
        check_empty(llm.engine)


def test_an_engine_that_does_not_start_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runners: list[weakref.ref[Any]] = []

    def keep(config: WorkerConfig, **options: Any) -> Any:
        runner = load_runner(config, **options)
        runners.append(weakref.ref(runner))
        return runner

    monkeypatch.setattr(engine_module, "load_runner", keep)
    monkeypatch.setattr(engine_module, "_limits", Mock(side_effect=RuntimeError("no such luck")))
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no such luck"):
        Engine(str(model), **SMALL)
    gc.collect()
    assert [runner() for runner in runners] == [None]

    def new_threads() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before if thread.name != "tqdm_monitor"]

    wait_until(lambda: not new_threads())


def test_a_failed_step_ends_its_requests_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("no such luck")

    engine.add_request("fails", [1, 2, 3], SamplingParams(n=2))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "execute", fail)
        told = [each for _ in range(2) for each in engine.step()]
    assert {each.finish_reason for each in told} <= {"error"} and "no such luck" in told[0].error
    check_empty(engine)
    assert engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2
