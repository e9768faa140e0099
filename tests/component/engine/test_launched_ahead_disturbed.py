"""The engine's steps launched ahead, on their two threads, while all goes wrong that may: what is left is right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch

from kvrelay.backends.backend import PackedRows
from kvrelay.engine.load.causal_model import CausalModel
from kvrelay.engine.parallel.model_part import WHOLE
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.engine.sample import random_sampling, sampler
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence as Running
from kvrelay.worker.launchers import AheadLauncher
from kvrelay.worker.step_loop import StepCallbacks, StepLoop
from tests.component.engine.conftest import BLOCK_SIZE
from tests.fakes.sequences import new_sequence
from tests.fakes.waiting import PATIENCE_S
from tests.unit.engine import driving

NUM_BLOCKS, MAX_RUNNING, NUM_SEQUENCES = 30, 8, 30
SAMPLINGS: Sequence[dict[str, object]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95, "logprobs": 2},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    {"temperature": 0.7, "min_tokens": 8, "logit_bias": {7: 2.0, 9: -3.0}},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(50)), "bad_words": ((7,),), "min_tokens": 4},
    {"temperature": 1.0, "allowed_token_ids": (4, 5, 6), "bad_words": ((4, 5), (6, 6), (4, 4, 4))},
)
WEIGHTS = (10, 10, 10, 1, 10, 10, 1)
"""Those with penalties or bad words of several tokens are drawn when the step before has landed."""


class ExactModel:
    """In the place of a `CausalModel`, without rounding: logits are those of a table, by a number that is made of all
    tokens so far. These lie in the pool, where a model's keys do, and are read through the rows' blocks.

    With `rng`, a step gives NaN for one of its rows now and then, or ends in the middle.
    """

    def __init__(self, model: CausalModel, rng: random.Random | None = None, vocab_size: int = 0) -> None:
        self.layout, self.source, self.eos_token_ids = model.layout, model.source, model.eos_token_ids
        self.vocab_size = vocab_size or model.vocab_size
        self.backend = self
        self.part, self.gathered_mlps, self.numerics = WHOLE, None, ""
        self.whole_layout, self.is_divided, self.follows = model.layout, False, False
        self.rng = rng
        self.num_nan = 0
        self.num_raised = 0
        self._table = 3 * torch.randn(1021, self.vocab_size, generator=torch.Generator().manual_seed(0))

    def plan(self, pool: torch.Tensor, rows: PackedRows) -> tuple[torch.Tensor, PackedRows]:
        return pool[:, 0, 0, 0, :, 0], rows

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: tuple[torch.Tensor, PackedRows]
    ) -> torch.Tensor:
        pool, rows = step
        pool[rows.token_blocks(BLOCK_SIZE), rows.token_positions % BLOCK_SIZE] = token_ids.float()
        hidden = torch.empty(len(token_ids), 1)
        for index, (row, position) in enumerate(zip(rows.token_rows, rows.token_positions, strict=True)):
            seen = pool[rows.block_tables[row]].flatten()[: position + 1].long()
            hidden[index] = (seen * torch.arange(1, position + 2)).sum() % len(self._table)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._table[hidden[:, 0].long()]
        if self.rng is not None and self.rng.random() < 0.02:
            self.num_nan += 1
            logits[self.rng.randrange(len(logits))] = torch.nan
        if self.rng is not None and self.rng.random() < 0.01:
            self.num_raised += 1
            raise RuntimeError("in the middle of a step")
        return logits


@dataclass
class Course:
    """Sequences that arrive a few at a time, some of which are aborted."""

    loop: StepLoop
    rng: random.Random
    waiting: list[Running]
    open: dict[SequenceKey, Running] = field(default_factory=dict)
    finished: list[Running] = field(default_factory=list)

    def go_on(self) -> None:
        for _ in range(min(2, len(self.waiting))):
            sequence = self.waiting.pop()
            self.loop.add(sequence)
            self.open[sequence.key] = sequence
        if self.open and self.rng.random() < 0.03:
            key = self.rng.choice(list(self.open))
            del self.open[key]
            self.loop.abort(key)
        if not self.open and not self.waiting and not self.loop.scheduler.has_work:
            self.loop.stop()

    def committed(self, outputs: list[SequenceOutput]) -> None:
        self.loop.scheduler.blocks.pool.check_integrity()
        for output in outputs:
            if output.finish is not None and self.open.pop(output.sequence.key, None) is not None:
                self.finished.append(output.sequence)
        self.go_on()

    def failed(self, failed: list[Running], kind: FailureKind, cause: str) -> None:
        assert "not finite" in cause or "in the middle of a step" in cause
        for sequence in failed:
            self.open.pop(sequence.key, None)
        self.go_on()


def drawn_alone(runner: TransformersRunner, sequence: Running) -> list[int]:
    prompt, sampling = sequence.tokens.view(0, sequence.num_prompt).tolist(), sequence.sampling
    alone = driving.start(runner, [prompt], sampling, sampling.max_tokens)
    driving.run(runner, alone)
    runner.drop_sequence(alone[0].key)
    return alone[0].output


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_whoever_finishes_has_its_tokens_and_nothing_is_left(
    model: CausalModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws that look at too few tokens, aborts, preemption, NaN and steps that end in the middle, all at once."""
    monkeypatch.setattr(random_sampling, "_BEST", (24, 1000))
    monkeypatch.setattr(sampler, "_WORTH_IT", 1.0)
    rng = random.Random(seed)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    limits = SchedulerLimits(48, MAX_RUNNING, 200, frozenset())
    scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), SchedulerSettings())
    exact = ExactModel(model, random.Random(seed))
    runner = TransformersRunner(cast("CausalModel", exact), NUM_BLOCKS, launches_ahead=True)
    loop = StepLoop(runner, scheduler, make_launcher=AheadLauncher)
    shared = rng.choices(range(4, 250), k=40)
    sequences = [
        new_sequence(
            (str(number), 1, 0),
            shared[: rng.randint(0, 40)] + rng.choices(range(4, 250), k=rng.randint(1, 40)),
            Sampling(max_tokens=rng.randint(1, 40), ignore_eos=True, seed=number, **rng.choices(SAMPLINGS, WEIGHTS)[0]),  # type: ignore[arg-type]
            BLOCK_SIZE,
        )
        for number in range(NUM_SEQUENCES)
    ]
    course = Course(loop, rng, sequences)
    course.go_on()
    callbacks = StepCallbacks(lambda plan: None, course.committed, course.failed)
    asyncio.run(asyncio.wait_for(loop.run(callbacks), PATIENCE_S))
    assert loop.totals.num_steps_launched_ahead > 0 and exact.num_nan + exact.num_raised > 0
    assert pool.num_available == NUM_BLOCKS
    assert runner._steps._steps == [] and runner._sampler._sampled._pending == []
    assert not any(sequence_key in runner._sampler for sequence_key in [(str(n), 1, 0) for n in range(NUM_SEQUENCES)])
    assert course.finished
    apart = TransformersRunner(cast("CausalModel", ExactModel(model)), NUM_BLOCKS, launches_ahead=False)
    for sequence in course.finished:
        drawn = sequence.tokens.view(sequence.num_prompt, sequence.num_tokens).tolist()
        assert drawn == drawn_alone(apart, sequence)
