"""The other ranks' side of the mirrored sequence state: turns step inputs into batches. Pure."""

from __future__ import annotations

import numpy as np

from kvrelay.engine.batch import BeamRow, BlockCopy, SwapCopies, WorkerBatch, WorkerRow
from kvrelay.ranks.step_input import (
    IS_BEAM,
    IS_PREFILL,
    NUM_COLUMNS,
    SAMPLES,
    Int32Array,
    MirroredSequence,
    OutOfStep,
    StepInput,
)

_NO_HISTORY = np.empty(0, np.int32)
_IS_BEAM_ROW = BeamRow(0, _NO_HISTORY, 0)
"""Ranks compute the logits of a beam's row like any other, and rank 0 alone finds candidates."""


class _Data:
    """Cuts a step's data into pieces. Raises OutOfStep if there is less or more of it."""

    def __init__(self, raw: bytes) -> None:
        self._numbers = np.frombuffer(raw, np.int32)
        self._at = 0

    def take(self, count: int) -> Int32Array:
        self._at += count
        if count < 0 or self._at > len(self._numbers):
            raise OutOfStep(f"a step has {len(self._numbers)} numbers, and needs {self._at}")
        return self._numbers[self._at - count : self._at]

    def end(self) -> None:
        if self._at != len(self._numbers):
            raise OutOfStep(f"a step has {len(self._numbers)} numbers, and needs {self._at}")


class StepDecoder:
    """Keeps tokens and block tables of the sequences."""

    def __init__(self) -> None:
        self._sequences: dict[int, MirroredSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def decode(self, step: StepInput) -> WorkerBatch:
        """Returns the step's batch. Its arrays are views that are valid until the next call; keys have only the number
        of the sequence.

        Raises OutOfStep if the step does not continue the ones before. The decoder cannot be used after that.
        """
        data = _Data(step.data)
        columns = data.take(NUM_COLUMNS * step.num_rows).reshape(NUM_COLUMNS, step.num_rows)
        for number in step.dropped:
            if number not in self._sequences:
                raise OutOfStep(f"sequence {number} ends, and never came")
            del self._sequences[number]
        for number, num_tokens in step.admitted:
            if number in self._sequences:
                raise OutOfStep(f"sequence {number} comes twice")
            self._sequences[number] = MirroredSequence(number, data.take(num_tokens).copy())
        new_tokens = data.take(int(columns[3].sum()))
        new_blocks = data.take(int(columns[5].sum()))
        rows = self._rows(columns, new_tokens, new_blocks)
        sources, targets = data.take(step.num_copies).tolist(), data.take(step.num_copies).tolist()
        out, back = (
            SwapCopies(tuple(data.take(count).tolist()), tuple(data.take(count).tolist()))
            for count in (step.num_out, step.num_back)
        )
        data.end()
        return WorkerBatch(step.step, rows, out, back, list(map(BlockCopy, sources, targets)))

    def _rows(self, columns: Int32Array, new_tokens: Int32Array, new_blocks: Int32Array) -> list[WorkerRow]:
        rows, token_at, block_at = [], 0, 0
        for row in columns.T.tolist():
            number, position, num_tokens, num_new, num_kept, num_blocks, num_drafts, first_scored, num_scored, flags = (
                row
            )
            sequence = self._sequences.get(number)
            if sequence is None:
                raise OutOfStep(f"sequence {number} has a row, and never came")
            end = position + num_tokens
            sequence.reserve(end)
            if num_new:
                sequence.tokens[end - num_new : end] = new_tokens[token_at : token_at + num_new]
                token_at += num_new
            if num_kept > len(sequence.table):
                raise OutOfStep(f"sequence {number} keeps {num_kept} of {len(sequence.table)} blocks")
            if num_blocks or num_kept < len(sequence.table):
                # A new array: earlier batches may still be read.
                sequence.table = np.concatenate(
                    (sequence.table[:num_kept], new_blocks[block_at : block_at + num_blocks])
                )
                block_at += num_blocks
            rows.append(
                WorkerRow(
                    key=("", 0, number),
                    token_ids=sequence.tokens[position:end],
                    position=position,
                    block_ids=sequence.table,
                    sample=bool(flags & SAMPLES),
                    is_prefill=bool(flags & IS_PREFILL),
                    num_drafts=num_drafts,
                    beam=_IS_BEAM_ROW if flags & IS_BEAM else None,
                    first_scored=first_scored,
                    num_scored=num_scored,
                )
            )
        return rows
