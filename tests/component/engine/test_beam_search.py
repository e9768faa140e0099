"""Beam search is that of transformers: sequences and scores, whatever the batching, the cache and the pressure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.run.graphs import GraphSettings
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.ablations import NullCache
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.sampling import BeamSpec, EarlyStopping, Sampling, ScoredText
from kvrelay.scheduling.plan import worker_batch
from kvrelay.scheduling.policies import BUILT_IN
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from tests.component.engine.beam_reference import reference_beams
from tests.component.engine.conftest import BLOCK_SIZE
from tests.fakes.fake_cuda_graphs import CapturableTorchBackend, FakeRecorder
from tests.fakes.sequences import new_sequence

ENDS = [3, 17, 44, 60, 101]  # several, so that random weights end some texts


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


class Engine:
    """A scheduler and a runner over a small pool; `preempt_at_random` takes blocks away now and then."""

    def __init__(
        self,
        model: CausalModel,
        *,
        num_blocks: int = 64,
        token_budget: int = 48,
        max_running: int = 16,
        with_cache: bool = True,
        name: str = "sarathi",
        seed: int | None = None,
        settings: SchedulerSettings | None = None,
        recorder: FakeRecorder | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        cache = PrefixCache(self.pool) if with_cache else NullCache(self.pool)
        limits = SchedulerLimits(token_budget, max_running, 400, frozenset())
        scheduler = make_scheduler(name, limits, self.pool, cache, settings or SchedulerSettings())
        self.scheduler = scheduler
        self.runner = TransformersRunner(model, num_blocks, with_scratch=recorder is not None)
        if recorder is not None:
            self.runner.try_graphs(GraphSettings((1, 2, 4, 7), lambda _: recorder))
        self.num_copies = 0
        self._random = random.Random(seed) if seed is not None else None
        self._sequences: list[Sequence] = []

    def add(self, prompt: list[int], sampling: Sampling) -> Sequence:
        sequence = new_sequence((str(len(self._sequences)), 1, 0), prompt, sampling, BLOCK_SIZE)
        self._sequences.append(sequence)
        self.runner.add_sequence(sequence.key, sampling, prompt, len(prompt))
        self.scheduler.add(sequence)
        return sequence

    def run(self) -> dict[Sequence, list[ScoredText]]:
        results: dict[Sequence, list[ScoredText]] = {}
        while self.scheduler.has_work:
            self._preempt_somebody()
            plan = self.scheduler.schedule()
            assert plan.rows or plan.preempted, plan.held_back
            self.num_copies += len(plan.copies)
            if plan.rows:
                for output in self.scheduler.commit(plan, self.runner.execute(worker_batch(plan))):
                    if output.texts:
                        results[output.sequence] = list(output.texts)
            self.pool.check_integrity()
        assert self.pool.num_available == self.pool.num_blocks
        assert not len(self.scheduler.blocks.copies)
        return results

    def _preempt_somebody(self) -> None:
        """As if somebody older had taken the blocks."""
        rng = self._random
        if rng is None or not self.scheduler.running or rng.random() > 0.4:
            return
        from kvrelay.scheduling.plan import PlanBuilder

        self.scheduler.lifecycle.preempt(rng.choice(list(self.scheduler.running.values())), PlanBuilder(1))


def beams(
    width: int,
    returned: int | None = None,
    *,
    penalty: float = 1.0,
    early: EarlyStopping = False,
    max_tokens: int = 12,
    ends: list[int] = ENDS,
    **rest: Any,
) -> Sampling:
    spec = BeamSpec(width=width, num_returned=returned or width, length_penalty=penalty, early_stopping=early)
    return Sampling(max_tokens=max_tokens, beams=spec, stop_token_ids=tuple(ends), ignore_eos=True, **rest)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(4, 250), k=length)


def check(results: list[ScoredText], model: Any, prompt: list[int], sampling: Sampling) -> None:
    expected = reference_beams(model, prompt, sampling, list(sampling.stop_token_ids) or None)
    assert [each.token_ids for each in results] == [each.token_ids for each in expected]
    for got, wanted in zip(results, expected, strict=True):
        assert math.isnan(wanted.score) or math.isclose(got.score, wanted.score, rel_tol=1e-6, abs_tol=1e-4)


@pytest.mark.everyday(20)
@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_equal_to_transformers(
    model: CausalModel, reference: Any, width: int, penalty: float, early: EarlyStopping
) -> None:
    for seed, ends in enumerate([ENDS, ENDS[:1], []]):
        engine = Engine(model)
        prompt = prompt_of(11 + 9 * seed, seed)
        sampling = beams(width, max(1, width - seed), penalty=penalty, early=early, ends=ends)
        sequence = engine.add(prompt, sampling)
        check(engine.run()[sequence], reference, prompt, sampling)
        assert width == 1 or engine.num_copies > 0


@pytest.mark.parametrize("width", [3, 5, 8])
def test_captured_steps(model_dir: Path, reference: Any, width: int) -> None:
    """Beams decode in captured steps as far as they fit; blocks are copied before a step, captured or not."""
    torch.set_num_threads(1)
    source = open_source(str(model_dir), "float32", max_model_len=200)
    recorder = FakeRecorder()
    engine = Engine(load_model(source, BLOCK_SIZE, CapturableTorchBackend()), recorder=recorder)
    num_checks = recorder.num_replayed  # at the start, each captured step is tried once
    prompt, sampling = prompt_of(20), beams(width)
    sequence = engine.add(prompt, sampling)
    check(engine.run()[sequence], reference, prompt, sampling)
    assert (recorder.num_replayed > num_checks) is (width < 8)


@pytest.mark.parametrize("rest", [{"repetition_penalty": 1.7}, {"min_tokens": 6}, {"logit_bias": {9: 3.0}}])
def test_penalties_apply_to_log_probabilities(model: CausalModel, reference: Any, rest: dict[str, Any]) -> None:
    engine = Engine(model)
    prompt, sampling = prompt_of(20), beams(4, **rest)
    sequence = engine.add(prompt, sampling)
    results = engine.run()[sequence]
    if "logit_bias" in rest:
        assert any(9 in each.token_ids for each in results)
    else:
        check(results, reference, prompt, sampling)


@pytest.mark.everyday(10)
@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("seed", range(3))
def test_under_pressure(
    model: CausalModel, reference: Any, name: str, with_cache: bool, seed: int, expected: Callable[..., list[int]]
) -> None:
    """Several searches and greedy sequences that share prompts, preempted at random: all give what they give alone."""
    rng = random.Random(seed)
    engine = Engine(
        model, num_blocks=34, token_budget=20 + 8 * seed, max_running=9, with_cache=with_cache, name=name, seed=seed
    )
    wanted = []
    for number in range(4):
        prompt = prompt_of(rng.randint(1, 40), seed) + prompt_of(rng.randint(1, 20), number)
        sampling = beams(
            rng.randint(2, 5),
            penalty=rng.choice([0.0, 1.0]),
            early=rng.choice([True, False, "never"]),
            max_tokens=rng.randint(1, 14),
            ends=rng.choice([ENDS, []]),
        )
        wanted.append((engine.add(prompt, sampling), prompt, sampling))
    greedy = prompt_of(30, seed)
    alone = engine.add(greedy, Sampling(temperature=0.0, max_tokens=20, ignore_eos=True))
    results = engine.run()
    for sequence, prompt, sampling in wanted:
        check(results[sequence], reference, prompt, sampling)
    assert alone.tokens.view(30, 50).tolist() == expected(greedy, 20)
    assert engine.scheduler.num_preemptions > 0


@pytest.fixture(scope="module")
def expected(reference: Any) -> Callable[..., list[int]]:
    def greedy(prompt: list[int], max_tokens: int) -> list[int]:
        with torch.inference_mode():
            output = reference.generate(
                torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return greedy
