"""A model divided into stages, inside a program: the tokens of transformers, and clear errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay import LLM, Engine, SamplingParams
from kvrelay.ranks.ranked_runner import RankedRunner
from tests.component.ranks.test_divided_engine import (
    GREEDY,
    SMALL,
    check_greedy,
    check_samples,
    nothing_left,
    prompts_of,
)
from tests.e2e import reference
from tests.tiny_models import build_model

pytestmark = pytest.mark.component
__all__ = ["nothing_left"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SMALL, max_model_len=256, pipeline_parallel_size=2) as llm:
        yield llm


def test_outputs_are_those_of_transformers_and_of_one_process(model: Path, llm: LLM) -> None:
    check_greedy(model, llm)
    check_samples(model, llm)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "size"), [("llama", 2), ("qwen3", 3), ("tied-llama", 2), ("gemma3", 3)])
def test_other_models_and_sizes(architecture: str, size: int, tmp_path: Path) -> None:
    model = build_model(architecture, tmp_path / architecture)
    with LLM(str(model), **SMALL, max_model_len=256, pipeline_parallel_size=size) as llm:
        check_greedy(model, llm)


def test_beam_search_is_that_of_one_process(model: Path, llm: LLM) -> None:
    params = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8)
    prompts = prompts_of(3, 2)
    with LLM(str(model), **SMALL, max_model_len=256) as whole:
        expected = whole.generate(prompts, params, progress=False)
    for answer, other in zip(llm.generate(prompts, params, progress=False), expected, strict=True):
        assert [each.token_ids for each in answer.outputs] == [each.token_ids for each in other.outputs]


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
