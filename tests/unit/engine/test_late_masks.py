"""A mask that is not ready delays its own row of a step: the demo model, driven step by step."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.engine.make import make_runner
from kvrelay.engine.masks import token_masks
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import RowResult, WorkerBatch, WorkerRow
from tests.unit.engine.test_token_masks import COMPILER, DEMO, GRAMMARS, Hanging

PROMPT = [5, 6, 7, 8, 9]
NUM_TOKENS = 6


class Decoding:
    """Sequences that get a row each in every step."""

    def __init__(self, runner: TransformersRunner, name: str) -> None:
        self.runner = runner
        self.keys: list[SequenceKey] = [(name, 0, index) for index in range(3)]
        self.tokens = [list(PROMPT) for _ in self.keys]
        self.num_computed = [0] * len(self.keys)
        for key, grammar in zip(self.keys, GRAMMARS[:3], strict=True):
            runner.add_sequence(key, Sampling(temperature=1.0, seed=3, grammar=grammar), PROMPT, len(PROMPT))

    @property
    def unfinished(self) -> list[int]:
        return [index for index, tokens in enumerate(self.tokens) if len(tokens) < len(PROMPT) + NUM_TOKENS]

    def step(self) -> dict[int, RowResult]:
        """A step of the unfinished sequences."""
        rows = {index: self._row(index) for index in self.unfinished}
        results = dict(zip(rows, self.runner.execute(WorkerBatch(0, [*rows.values()])).rows, strict=True))
        for index, result in results.items():
            self.num_computed[index] += len(rows[index].token_ids) - result.is_late
            self.tokens[index] += result.token_ids
        return results

    def _row(self, index: int) -> WorkerRow:
        computed = self.num_computed[index]
        return WorkerRow(
            key=self.keys[index],
            token_ids=np.array(self.tokens[index][computed:], np.int32),
            position=computed,
            block_ids=np.array([index], np.int32),
            sample=True,
            is_prefill=computed == 0,
        )


@pytest.fixture(scope="module")
def runner() -> TransformersRunner:
    return make_runner(str(DEMO), dtype="float32", num_threads=1, num_blocks=8)


def test_the_others_get_their_tokens_and_it_gets_the_same_ones_later(
    runner: TransformersRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = runner._sampler._masks
    monkeypatch.setitem(masks.__dict__, "_compiler", COMPILER)
    monkeypatch.setattr(token_masks, "PATIENCE_S", 60.0)
    monkeypatch.setattr(token_masks, "LONGEST_WAIT_S", 600.0)
    undisturbed = Decoding(runner, "undisturbed")
    while undisturbed.unfinished:
        assert not any(result.is_late for result in undisturbed.step().values())
    victim = GRAMMARS[1]
    assert victim is not None
    slow = Hanging(victim)
    monkeypatch.setitem(masks.__dict__, "_compiler", slow)
    decoding = Decoding(runner, "disturbed")
    decoding.step()
    monkeypatch.setattr(token_masks, "PATIENCE_S", 0.001)
    while len(decoding.unfinished) > 1:
        assert decoding.step()[1].is_late
    assert decoding.tokens[1] == undisturbed.tokens[1][: len(PROMPT) + 1]
    slow.go_on.set()
    while decoding.unfinished:
        decoding.step()
    assert decoding.tokens == undisturbed.tokens
