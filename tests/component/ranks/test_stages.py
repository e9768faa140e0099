"""A model divided into stages, inside a program: the tokens of transformers, and clear errors."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay import LLM, Engine, SamplingParams
from kvrelay.ranks.ranked_runner import RankedRunner
from kvrelay.step.batch import DeviceLost
from tests.component.ranks.test_divided_engine import (
    GREEDY,
    SMALL,
    nothing_left,
    prompts_of,
    ranks_of_this_process,
    step_on,
)
from tests.e2e import reference
from tests.fakes.waiting import wait_until
from tests.tiny_models import build_model

pytestmark = pytest.mark.component
__all__ = ["nothing_left"]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SMALL, max_model_len=256, pipeline_parallel_size=2) as llm:
        yield llm


def check_greedy(model: Path, llm: LLM) -> None:
    prompts = prompts_of(1, 8)
    for _ in range(2):  # the second time from the cache
        answers = llm.generate(prompts, GREEDY, progress=False)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.outputs[0].token_ids == reference.greedy(model, prompt, 24)
    assert any(answer.usage.cached_tokens for answer in answers)
    assert llm.engine._scheduler.num_preemptions > 0, "the pool was too large to test preemption"
    assert llm.engine._scheduler.blocks.pool.num_available == 24, "free or only cached"


def test_greedy_output_is_that_of_transformers(model: Path, llm: LLM) -> None:
    check_greedy(model, llm)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "size"), [("llama", 2), ("qwen3", 3), ("tied-llama", 2), ("gemma3", 3)])
def test_other_models_and_sizes(architecture: str, size: int, tmp_path: Path) -> None:
    model = build_model(architecture, tmp_path / architecture)
    with LLM(str(model), **SMALL, max_model_len=256, pipeline_parallel_size=size) as llm:
        check_greedy(model, llm)


def test_samples_and_log_probabilities_are_those_of_one_process(model: Path, llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, temperature=0.8, max_tokens=10, logprobs=2, prompt_logprobs=1)
    prompts = prompts_of(2, 4)
    with LLM(str(model), **SMALL, max_model_len=256) as whole:
        expected = whole.generate(prompts, params, progress=False)
    for answer, other in zip(llm.generate(prompts, params, progress=False), expected, strict=True):
        for ours, theirs in zip(answer.outputs, other.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
        assert answer.prompt_logprobs is not None and other.prompt_logprobs is not None
        for mine, its in zip(answer.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine is not None and its is not None
            assert math.isclose(mine.logprob, its.logprob, abs_tol=1e-4)


def test_beam_search_is_that_of_one_process(model: Path, llm: LLM) -> None:
    params = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8)
    prompts = prompts_of(3, 2)
    with LLM(str(model), **SMALL, max_model_len=256) as whole:
        expected = whole.generate(prompts, params, progress=False)
    for answer, other in zip(llm.generate(prompts, params, progress=False), expected, strict=True):
        assert [each.token_ids for each in answer.outputs] == [each.token_ids for each in other.outputs]


@pytest.mark.parametrize(("size", "victim"), [(2, 1), pytest.param(3, 1, marks=SLOW), pytest.param(3, 2, marks=SLOW)])
def test_a_killed_stage_is_a_lost_device(size: int, victim: int, model: Path) -> None:
    engine = Engine(str(model), **SMALL, pipeline_parallel_size=size)
    runner = engine._runner
    assert isinstance(runner, RankedRunner)
    processes = list(runner.group._local.processes.values())
    pids = [each.pid for each in processes]
    for number, prompt in enumerate(prompts_of(4, 6)):
        engine.add_request(f"{number}", prompt, GREEDY)
    engine.step()
    os.kill(pids[victim - 1], signal.SIGKILL)
    with pytest.raises(DeviceLost, match=f"rank {victim} was killed by SIGKILL"):
        step_on(engine)
    engine.close()
    wait_until(lambda: not {each.pid for each in ranks_of_this_process()} & set(pids))


@pytest.mark.usefixtures("nothing_left")
def test_more_stages_than_layers(model: Path) -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size = 4: it has 3 layers"):
        Engine(str(model), **SMALL, pipeline_parallel_size=4)


def test_aborts_and_failed_steps_while_others_are_in_flight(
    model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is behind a failed step is discarded, on all stages, and computed again."""
    engine, runner = llm.engine, llm.engine._runner
    assert isinstance(runner, RankedRunner)
    own: Any = runner._runner
    prompts, outputs, errors = prompts_of(5, 6), dict[str, list[int]](), set[str]()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{number}", prompt, GREEDY)
    logits, num_steps, most_in_flight = own._model.logits, 0, 0
    while engine.has_work:
        with monkeypatch.context() as patch:
            if num_steps == 14:
                patch.setattr(own._model, "logits", lambda hidden: logits(hidden) * math.nan)
            for told in engine.step():
                outputs.setdefault(told.request_id, []).extend(told.token_ids)
                if told.finish_reason == "error":
                    errors.add(told.request_id)
        most_in_flight = max(most_in_flight, len(engine._steps._in_flight))
        num_steps += 1
        if num_steps == 10:
            assert engine.abort("0")
    assert most_in_flight >= 1, "one step landed, and others were behind it"
    assert errors, "a step failed"
    for number, prompt in enumerate(prompts):
        if number and f"{number}" not in errors:
            assert outputs[f"{number}"] == reference.greedy(model, prompt, 24)
    assert len(errors) < 5, "no other went on"
    assert engine._scheduler.blocks.pool.num_available == 24
