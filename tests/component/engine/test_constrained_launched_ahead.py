"""Constrained sequences in steps launched ahead: a step behind one that samples a token of such a sequence is launched
for one token, also if a grammar forces more, or the mask is late."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrelay.engine.load.causal_model import CausalModel
from kvrelay.engine.masks import token_masks
from kvrelay.engine.masks.token_masks import TokenMasks
from kvrelay.engine.run.in_flight import StepInFlight
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.sampling import FinishReason, ReasoningSpan, Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence as Running
from kvrelay.step.batch import WorkerBatch, WorkerRow
from kvrelay.worker.launchers import AheadLauncher
from kvrelay.worker.step_loop import StepCallbacks, StepLoop
from tests.component.engine.conftest import BLOCK_SIZE
from tests.component.engine.test_launched_ahead_disturbed import Course, ExactModel
from tests.fakes.sequences import new_sequence
from tests.fakes.waiting import PATIENCE_S
from tests.unit.engine import driving
from tests.unit.engine.test_token_masks import COMPILER, END, FORCING, GRAMMARS, VOCAB_SIZE

NUM_BLOCKS, MAX_RUNNING, NUM_SEQUENCES = 60, 8, 40
GRAMMARS_OF_ALL = [*FORCING, *(grammar for grammar in GRAMMARS if grammar is not None)]
KINDS: Sequence[dict[str, object]] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "logprobs": 1},
    {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1.0, "bad_words": ((30, 31), (40,))},
)


def random_sampling(rng: random.Random, number: int) -> Sampling:
    grammar = rng.choice(GRAMMARS_OF_ALL) if number % 3 else None
    reasoning = (
        ReasoningSpan(begin_id=5, end_id=6, is_open=True, token_budget=rng.randint(0, 6))
        if rng.random() < 0.2
        else None
    )
    return Sampling(
        max_tokens=rng.randint(1, 60),
        ignore_eos=grammar is None,
        seed=number,
        grammar=grammar,
        reasoning=reasoning,
        **rng.choice(KINDS),  # type: ignore[arg-type]
    )


def runner_over(model: ExactModel, *, ahead: bool) -> TransformersRunner:
    runner = TransformersRunner(cast("CausalModel", model), NUM_BLOCKS, launches_ahead=ahead)
    runner._sampler._masks.__dict__["_compiler"] = COMPILER
    return runner


def drawn_alone(runner: TransformersRunner, sequence: Running) -> list[int]:
    """Its tokens one by one, each under its mask."""
    prompt = sequence.tokens.view(0, sequence.num_prompt).tolist()
    alone = driving.start(runner, [prompt], sequence.sampling, sequence.num_output)
    driving.run(runner, alone)
    runner.drop_sequence(alone[0].key)
    return alone[0].output


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_outputs_are_those_of_one_token_after_the_other(
    model: CausalModel, seed: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runs of forced tokens, late masks, aborts and preemption; `disturbed`: also NaN and failing steps."""
    rng = random.Random(seed)
    late, num_landed = TokenMasks.late, Sampler.num_landed_from
    seen: Counter[str] = Counter()

    def often_late(self: TokenMasks, slots: NDArray[np.int64], num_others: int) -> NDArray[np.bool_]:
        found = late(self, slots, num_others)
        for row, slot in enumerate(slots.tolist()):
            found[row] |= slot in self._states and rng.random() < 0.1
        return found

    def noted(self: Sampler, keys: Sequence[SequenceKey], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        found = num_landed(self, keys, positions)
        follows = self.needs_landed(keys)
        seen.update(forced=int((follows & (found > 0)).sum()), missing=int((follows & (found < 0)).sum()))
        return found

    monkeypatch.setattr(TokenMasks, "late", often_late)
    monkeypatch.setattr(Sampler, "num_landed_from", noted)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    limits = SchedulerLimits(48, MAX_RUNNING, 200, frozenset({END}))
    chosen = SchedulerSettings(jump_forward=True, samples_behind=True)
    scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), chosen)
    exact = ExactModel(model, random.Random(seed) if disturbed else None, VOCAB_SIZE)
    exact.eos_token_ids = (END,)
    runner = runner_over(exact, ahead=True)
    loop = StepLoop(runner, scheduler, make_launcher=AheadLauncher)
    sequences = [
        new_sequence(
            (str(number), 1, 0),
            rng.choices(range(7, 250), k=rng.randint(1, 60)),
            random_sampling(rng, number),
            BLOCK_SIZE,
        )
        for number in range(NUM_SEQUENCES)
    ]
    course = Course(loop, rng, list(sequences))
    finish: dict[SequenceKey, FinishReason] = {}

    def committed(outputs: list[SequenceOutput]) -> None:
        finish.update({output.sequence.key: output.finish for output in outputs if output.finish is not None})
        course.committed(outputs)

    course.go_on()
    callbacks = StepCallbacks(lambda plan: None, committed, course.failed)
    asyncio.run(asyncio.wait_for(loop.run(callbacks), PATIENCE_S))
    assert loop.totals.num_steps_launched_ahead > 0 and loop.totals.grammar_work.num_forced_tokens > 0
    assert seen["forced"] > 0 and seen["missing"] > 0
    assert pool.num_available == NUM_BLOCKS
    assert runner._steps._steps == [] and runner._sampler._sampled._pending == []
    assert not any(sequence.key in runner._sampler for sequence in sequences)
    assert any(sequence.sampling.grammar is not None for sequence in course.finished)
    monkeypatch.setattr(TokenMasks, "late", late)
    exact.rng = None
    apart = runner_over(exact, ahead=False)
    for sequence in course.finished:
        drawn = sequence.tokens.view(sequence.num_prompt, sequence.num_tokens).tolist()
        assert drawn == drawn_alone(apart, sequence)
        is_whole = sequence.num_output == sequence.sampling.max_tokens
        assert finish[sequence.key] is (FinishReason.STOP_TOKEN if drawn[-1] == END else FinishReason.LENGTH)
        assert is_whole or drawn[-1] == END


def test_a_row_behind_a_step_in_flight_is_sampled_when_that_has_landed(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next launch, or at its own landing."""
    monkeypatch.setattr(token_masks, "PATIENCE_S", PATIENCE_S)  # a busy machine's masks would be late
    exact = ExactModel(model, None, VOCAB_SIZE)
    exact.eos_token_ids = (END,)
    runner = runner_over(exact, ahead=True)
    samplings = [Sampling(temperature=1.0, grammar=GRAMMARS[2]), Sampling(temperature=0.0)]
    one, other = driving.start_each(runner, samplings, 6)
    tokens: list[list[int]] = [[], []]

    def behind(steps: int) -> list[WorkerRow]:
        return [
            WorkerRow(
                each.key,
                np.zeros(1, np.int32),
                len(each.prompt) + steps - 1,
                each.blocks,
                sample=True,
                is_prefill=False,
                has_placeholder=True,
            )
            for each in (one, other)
        ]

    def land(step: StepInFlight) -> None:
        for output, result in zip(tokens, step.land().rows, strict=True):
            output += result.token_ids

    first = runner.launch(WorkerBatch(1, [sequence.row(100) for sequence in (one, other)]))
    second = runner.launch(WorkerBatch(2, behind(1)))
    assert second._asked.sample_later is not None and len(second._asked.sampled) == 1
    land(first)
    third = runner.launch(WorkerBatch(3, behind(2)))
    assert second._asked.sample_later is None and len(second._asked.sampled) == 2
    assert third._asked.sample_later is not None
    land(second)
    land(third)
    apart = runner_over(exact, ahead=False)
    for each, output in zip((one, other), tokens, strict=True):
        alone = driving.start(apart, [each.prompt], each.sampling, 3)
        driving.run(apart, alone)
        apart.drop_sequence(alone[0].key)
        assert output == alone[0].output
