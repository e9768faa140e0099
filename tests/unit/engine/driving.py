"""Drives a runner without a scheduler: random chunks, mixed steps, blocks scattered over the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvrelay.engine.batch import ModelRunner, RowResult, SequenceKey, WorkerBatch, WorkerRow
from kvrelay.protocol.sampling import Sampling, TokenLogprobs


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
            assert result.token_id is not None
            self.tokens.append(result.token_id)
            self.logprobs.append(result.logprobs)


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
    tables = scatter_blocks(runner, [len(prompt) + num_output for prompt in prompts], seed)
    sequences = [
        Driven((f"request-{seed}", 0, index), prompt, sampling, num_output, blocks)
        for index, (prompt, blocks) in enumerate(zip(prompts, tables, strict=True))
    ]
    for sequence in sequences:
        runner.add_sequence(sequence.key, sampling, sequence.prompt, len(sequence.prompt))
    return sequences


def run(runner: ModelRunner, sequences: list[Driven], seed: int = 0, max_chunk: int = 24) -> None:
    """Steps until all are done. Each step takes some of the sequences, prefilling ones by a random chunk."""
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
