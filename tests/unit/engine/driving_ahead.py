"""As `driving`, with two steps in flight wherever the runner takes the second before the first has landed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from kvrelay.engine.model_runner import LaunchedStep, ModelRunner
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import RowsFailed, WorkerBatch, WorkerRow
from tests.unit.engine.driving import Driven


@dataclass
class Flying:
    """A step that was launched."""

    batch: WorkerBatch
    sequences: list[Driven]
    launched: LaunchedStep


class AheadDriver:
    """Steps of random sequences and chunks until all are done. `change` may change a batch before it is launched; with
    `waits` it is launched when the one before has landed."""

    def __init__(
        self,
        runner: ModelRunner,
        sequences: list[Driven],
        seed: int = 0,
        max_chunk: int = 24,
        change: Callable[[WorkerBatch], WorkerBatch] = lambda batch: batch,
        *,
        waits: bool = False,
    ) -> None:
        self._runner = runner
        self._sequences = sequences
        self._rng = np.random.default_rng(seed)
        self._max_chunk = max_chunk
        self._change = change
        self._waits = waits
        self._step = 0
        self.num_launched_ahead = 0
        self.num_failed = 0
        self.failed: set[SequenceKey] = set()

    def run(self) -> AheadDriver:
        flying: Flying | None = None
        while (batch := self._plan(flying)) is not None or flying is not None:
            behind: Flying | None = None
            may = batch is not None and not self._waits and self._runner.can_launch_behind(batch[0])
            if batch is not None and flying is not None and may:
                self.num_launched_ahead += 1
                behind, batch = self._launch(*batch), None
            if flying is not None and not self._land(flying):
                if behind is not None:
                    behind.launched.discard()
                flying = None
                continue
            flying = behind if behind is not None or batch is None else self._launch(*batch)
        return self

    def _plan(self, flying: Flying | None) -> tuple[WorkerBatch, list[Driven]] | None:
        in_flight = {} if flying is None else dict(zip(flying.sequences, flying.batch.rows, strict=True))
        waiting = [each for each in self._sequences if not self._ends(each, in_flight.get(each))]
        chosen = [each for each in waiting if self._rng.random() < 0.8] or waiting
        if not chosen:
            return None
        rows = [self._row(each, in_flight.get(each)) for each in chosen]
        self._step += 1
        return self._change(WorkerBatch(self._step, rows)), chosen

    def _ends(self, sequence: Driven, in_flight: WorkerRow | None) -> bool:
        drawn = in_flight is not None and in_flight.sample
        return sequence.key in self.failed or len(sequence.output) + drawn >= sequence.num_output

    def _row(self, sequence: Driven, in_flight: WorkerRow | None) -> WorkerRow:
        row = sequence.row(int(self._rng.integers(1, self._max_chunk + 1)))
        if in_flight is None:
            return row
        start = in_flight.position + len(in_flight.token_ids)
        if in_flight.sample:
            tokens = np.zeros(1, np.int32)
            return WorkerRow(sequence.key, tokens, start, sequence.blocks, True, False, has_placeholder=True)
        end = min(start + int(self._rng.integers(1, self._max_chunk + 1)), len(sequence.tokens))
        tokens = np.array(sequence.tokens[start:end], np.int32)
        return msgspec.structs.replace(row, token_ids=tokens, position=start, sample=end == len(sequence.tokens))

    def _launch(self, batch: WorkerBatch, sequences: list[Driven]) -> Flying:
        return Flying(batch, sequences, self._runner.launch(batch))

    def _land(self, flying: Flying) -> bool:
        try:
            result = flying.launched.land()
        except RowsFailed as error:
            self.num_failed += 1
            self.failed |= error.keys
            return False
        for sequence, row, row_result in zip(flying.sequences, flying.batch.rows, result.rows, strict=True):
            sequence.take(row, row_result)
        return True
