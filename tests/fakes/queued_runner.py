"""The hash model on a device with a queue: a thread that runs what it was asked for, in order, and later.

As on a GPU the host learns nothing before a step lands: tokens that a step behind needs stay on the device until then.
Now and then the device's token is not the true one, as a quick draw's may be that looked at too few tokens: a step that
took such a token is run again when it lands.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue

import msgspec

from kvrelay.engine.model_runner import LaunchedStep
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import DeviceLost, RowResult, RowsFailed, StepResult, WorkerBatch, WorkerRow
from tests.fakes.hash_runner import VOCAB_SIZE, HashRunner
from tests.fakes.waiting import PATIENCE_S


class QueuedRunner(HashRunner):
    """The device runs a step when it is `let_run`, or when it is discarded.

    `fail_at`: whose step fails that computes a position, once; with `blame`, those alone. `fails_at_launch`: then the
    device is never asked. `mistakes`: of how many draws one is not the true one on the device; 0: none.
    """

    launches_ahead = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        num_host_slots: int = 0,
        fail_at: dict[SequenceKey, int] | None = None,
        blame: bool = True,
        fails_at_launch: bool = False,
        mistakes: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, max_model_len, num_host_slots=num_host_slots)
        self.fail_at = {} if fail_at is None else fail_at
        self.blame = blame
        self.fails_at_launch = fails_at_launch
        self.mistakes = mistakes
        self.let_run = threading.Semaphore(0)
        self.launched: list[int] = []  # steps, in order
        self.num_run_again = 0
        self.lost_in: int | None = None  # the step that the device does not survive
        # The host's, from a position on; those on the device are the base class's.
        self._landed_tokens: dict[SequenceKey, tuple[int, tuple[int, ...]]] = {}
        self._not_ended: list[QueuedStep] = []
        self._lock = threading.Lock()
        self._queue: SimpleQueue[QueuedStep | None] = SimpleQueue()
        self._device = threading.Thread(target=self._run_queue, daemon=True)
        self._device.start()

    def close(self) -> None:
        self._queue.put(None)
        self._device.join(PATIENCE_S)
        assert not self._device.is_alive() and not self._not_ended

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        super().add_sequence(key, sampling, token_ids, num_prompt)
        self._landed_tokens.setdefault(key, (len(token_ids), ()))

    def drop_sequence(self, key: SequenceKey) -> None:
        with self._lock:
            assert not any(row.key == key for step in self._not_ended for row in step.batch.rows), "a step needs it"
            self._landed_tokens.pop(key, None)
        super().drop_sequence(key)

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        with self._lock:
            stale = any(step.is_stale for step in self._not_ended)
        scored = any(self._sequences[row.key].prompt_logprobs is not None for row in batch.rows)
        return batch.is_plain and not stale and not scored

    def execute(self, batch: WorkerBatch) -> StepResult:
        return self.launch(batch).land()

    def launch(self, batch: WorkerBatch) -> LaunchedStep:
        if self.fails_at_launch and (error := self.fault(batch, once=True)) is not None:
            for step in list(self._not_ended):
                assert step.ended.wait(PATIENCE_S)
            raise error
        with self._lock:
            assert len(self._not_ended) < 2, "the device's queue is two steps deep"
            assert not self._not_ended or batch.is_plain
            self.launched.append(batch.step)
            step = QueuedStep(self, batch, self._not_ended[-1] if self._not_ended else None)
            self._not_ended.append(step)
            self.ask(step)
        return step

    def ask(self, step: QueuedStep) -> None:
        """Asks the device for a step: with the tokens that have landed, or those that the one before leaves there."""
        rows = []
        step.late = set()
        for row in step.batch.rows:
            token_ids, block_ids, sample = row.token_ids.copy(), row.block_ids.copy(), row.sample
            takes = row.has_placeholder and step.behind is not None
            if row.has_placeholder and not takes:
                at = row.position + len(token_ids) - 1
                first, landed = self._landed_tokens[row.key]
                token_ids[-1] = landed[at - first] if first <= at < first + len(landed) else 0
                # Else a grammar forced further tokens, or this one is missing.
                sample = row.sample and first + len(landed) == at + 1
                if first + len(landed) <= at:
                    step.late.add(row.key)
            rows.append(
                msgspec.structs.replace(
                    row, token_ids=token_ids, block_ids=block_ids, sample=sample, has_placeholder=takes
                )
            )
        step.rows = rows
        step.ended.clear()
        self._queue.put(step)

    def land(self, step: QueuedStep) -> StepResult:
        assert self._not_ended[0] is step, "steps end in the order of their launches"
        try:
            assert step.ended.wait(PATIENCE_S), "nobody lets the device run"
            if step.is_stale:
                self.num_run_again += 1
                step.behind = None
                self.let_run.release()
                with self._lock:
                    assert self._not_ended == [step], "nothing is launched behind a step that is run again"
                    self.ask(step)
                assert step.ended.wait(PATIENCE_S)
            self._raise_faults(step)
        except Exception:
            self._end(step)
            raise
        step.results = [
            RowResult(is_late=True) if row.key in step.late else result
            for row, result in zip(step.rows, step.results, strict=True)
        ]
        with self._lock:  # whoever is launched from now on takes its tokens from the host
            for row, result in zip(step.rows, step.results, strict=True):
                if result.token_ids:
                    first = row.position + len(row.token_ids) - row.num_drafts
                    self._landed_tokens[row.key] = first, tuple(result.token_ids)
            step.resampled = step.mistaken
            self._not_ended.remove(step)
        return StepResult(step.batch.step, step.results, 1e-6)

    def discard(self, step: QueuedStep) -> None:
        self.let_run.release()
        assert step.ended.wait(PATIENCE_S)
        self._end(step)
        if step.batch.step == self.lost_in:
            raise DeviceLost("as told")

    def _end(self, step: QueuedStep) -> None:
        with self._lock:
            self._not_ended.remove(step)

    def _raise_faults(self, step: QueuedStep) -> None:
        if step.batch.step == self.lost_in:
            raise DeviceLost("as told")
        if step.error is not None:
            raise step.error
        if not self.fails_at_launch and (error := self.fault(step.batch, once=True)) is not None:
            raise error

    def fault(self, batch: WorkerBatch, *, once: bool = False) -> Exception | None:
        """What a batch fails with, if it does; `once`: from now on it does not."""
        keys = []
        for row in batch.rows:
            at = self.fail_at.get(row.key)
            if at is not None and row.position <= at < row.position + len(row.token_ids):
                keys.append(row.key)
                if once:
                    del self.fail_at[row.key]
        if not keys:
            return None
        return RowsFailed("as told", keys) if self.blame and not self.fails_at_launch else RuntimeError("as told")

    # -- the device ---------------------------------------------------------------------------------------------------

    def _run_queue(self) -> None:
        while (step := self._queue.get()) is not None:
            self.let_run.acquire()
            step.error = None
            try:
                step.results, step.mistaken = self._run_step(step.batch, step.rows)
            except Exception as error:
                step.error = error
            step.ended.set()

    def _run_step(self, batch: WorkerBatch, rows: Sequence[WorkerRow]) -> tuple[list[RowResult], set[SequenceKey]]:
        if self.fault(batch) is not None:
            if self.blame:
                self._swap(batch)  # copies come before the rows
            return [RowResult()] * len(rows), set()
        results = super().execute(replace(batch, rows=rows)).rows
        mistaken = set()
        for row, result in zip(rows, results, strict=True):
            if result.token_ids and self._is_mistaken(row):
                self._sampled[row.key] = 1 + result.token_ids[-1] % (VOCAB_SIZE - 1)
                mistaken.add(row.key)
        return list(results), mistaken

    def _is_mistaken(self, row: WorkerRow) -> bool:
        if not self.mistakes:
            return False
        end = row.position + len(row.token_ids)
        digest = hashlib.blake2b(f"{row.key} {end}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % self.mistakes == 0


class QueuedStep:
    def __init__(self, runner: QueuedRunner, batch: WorkerBatch, behind: QueuedStep | None) -> None:
        self.runner = runner
        self.batch = batch
        self.behind = behind
        """The step from which placeholders take their tokens; None: they are taken from the host."""
        self.rows: list[WorkerRow] = []
        self.results: list[RowResult] = []
        self.late: set[SequenceKey] = set()  # rows for a token that is missing, as the step before was late with it
        self.mistaken: set[SequenceKey] = set()  # whose tokens on the device are not the true ones
        self.error: Exception | None = None
        self.ended = threading.Event()
        self.resampled: set[SequenceKey] = set()
        """`mistaken`, once the host knows it."""

    @property
    def is_stale(self) -> bool:
        if self.behind is None:
            return False
        return any(row.has_placeholder and row.key in self.behind.resampled for row in self.batch.rows)

    def land(self) -> StepResult:
        return self.runner.land(self)

    def discard(self) -> None:
        self.runner.discard(self)
