"""Drives a runner without a scheduler: random chunks, mixed steps, blocks scattered over the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.run import in_flight
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import RowResult, WorkerBatch, WorkerRow


@dataclass(eq=False)
class Driven:
    """One sequence on its way: its tokens, how many are computed, and what came back."""

    key: SequenceKey
    prompt: list[int]
    sampling: Sampling
    num_output: int
    blocks: np.ndarray
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return len(self.output) >= self.num_output

    def row(self, chunk: int) -> WorkerRow:
        end = min(self.computed + chunk, len(self.tokens))
        return WorkerRow(
            key=self.key,
            token_ids=np.array(self.tokens[self.computed : end], np.int32),
            position=self.computed,
            block_ids=self.blocks,
            sample=end == len(self.tokens),
            is_prefill=self.computed < len(self.prompt),
        )

    def take(self, row: WorkerRow, result: RowResult) -> None:
        self.computed += len(row.token_ids)
        self.prompt_logprobs += result.prompt_logprobs
        if row.sample:
            (token_id,) = result.token_ids
            self.tokens.append(token_id)
            self.logprobs.append(result.logprobs[0] if result.logprobs else None)


def scatter_blocks(runner: ModelRunner, lengths: list[int], seed: int) -> list[np.ndarray]:
    """Block tables for sequences of these lengths, drawn from the whole pool."""
    order = np.random.default_rng(seed).permutation(runner.spec.num_blocks).astype(np.int32)
    counts = [-(-length // runner.spec.block_size) for length in lengths]
    assert sum(counts) <= len(order)
    return np.split(order, np.cumsum(counts))[:-1]


def start(
    runner: ModelRunner, prompts: list[list[int]], sampling: Sampling, num_output: int, seed: int = 0
) -> list[Driven]:
    """Sequences for these prompts, known to the runner."""
    return _start(runner, prompts, [sampling] * len(prompts), num_output, seed)


def start_each(runner: ModelRunner, samplings: Sequence[Sampling], num_output: int, seed: int = 0) -> list[Driven]:
    """A sequence for each of these, with a prompt of its own, known to the runner."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 300, rng.integers(1, 40)).tolist() for _ in samplings]
    return _start(runner, prompts, samplings, num_output, seed)


def _start(
    runner: ModelRunner, prompts: list[list[int]], samplings: Sequence[Sampling], num_output: int, seed: int
) -> list[Driven]:
    tables = scatter_blocks(runner, [len(prompt) + num_output for prompt in prompts], seed)
    sequences = [
        Driven((f"request-{seed}", 0, index), prompt, sampling, num_output, blocks)
        for index, (prompt, sampling, blocks) in enumerate(zip(prompts, samplings, tables, strict=True))
    ]
    for sequence in sequences:
        runner.add_sequence(sequence.key, sequence.sampling, sequence.prompt, len(sequence.prompt))
    return sequences


@contextmanager
def failing_logits(runner: TransformersRunner, message: str, *, settles: bool) -> Iterator[list[str]]:
    """The model fails where logits are asked of it, and then the device ends what it was asked for, or never does.

    What is given lists the two as they come: "failed", "waited".
    """
    order: list[str] = []

    def fail(_: torch.Tensor) -> torch.Tensor:
        order.append("failed")
        raise RuntimeError(message)

    def settle(_: torch.device) -> bool:
        order.append("waited")
        return settles

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._model, "logits", fail)
        patch.setattr(in_flight, "is_settled", settle)
        yield order


def run(runner: ModelRunner, sequences: list[Driven], seed: int = 0, max_chunk: int = 24) -> int:
    """Steps until all are done; returns how many. Each takes some of the sequences, those in prefill by a chunk."""
    rng = np.random.default_rng(seed)
    step = 0
    while waiting := [sequence for sequence in sequences if not sequence.done]:
        chosen = [sequence for sequence in waiting if rng.random() < 0.8] or waiting
        rows = [sequence.row(int(rng.integers(1, max_chunk + 1))) for sequence in chosen]
        result = runner.execute(WorkerBatch(step, rows))
        assert result.step == step
        for sequence, row, row_result in zip(chosen, rows, result.rows, strict=True):
            sequence.take(row, row_result)
        step += 1
    return step
