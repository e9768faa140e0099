"""Writes the times of steps, sequences and handoffs to a file of JSON lines (`metrics_file`).

There is one line per step, per finished sequence and per handoff, and a few events per step; nothing per token. Times
are in seconds, `at` is seconds since the epoch. Lines are buffered and passed to a thread at most once a second, so a
step costs microseconds and never waits for the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvrelay.protocol.sampling import FinishReason
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.scheduler_protocol import Scheduler
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import StepResult
from kvrelay.telemetry.line_file import BackgroundLines
from kvrelay.telemetry.step_trace import StepEvent, StepTrace

FLUSH_INTERVAL_S = 1.0


class StepRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """One step: its contents, the queue, and its times.

    `ahead`: planned while the previous step ran; `launched_ahead`: also launched then; `captured`: replayed from a CUDA
    graph. Counts of sequences, slots and blocks are those after the commit.
    """

    at: float
    step: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_chunks: int
    num_decodes: int
    num_waiting: int
    num_running: int
    num_preempted: int
    num_recomputed: int  # sequences, preempted now or before, that lost their KV in this step
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_used_swap_slots: int
    num_available_blocks: int
    num_allocated_slots: int  # tokens that fit the running sequences' blocks
    num_committed_slots: int  # tokens with committed KV
    schedule_s: float
    copy_s: float  # copies between pool and host before the forward
    forward_s: float
    commit_s: float
    held_back: str
    ahead: bool = False
    captured: bool = False
    launched_ahead: bool = False


class SequenceRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="sequence"):
    """One sequence on this worker. `ttft_s` and `tpot_s` count from its arrival here; None without a token."""

    at: float
    request: str
    attempt: int
    sequence: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    finish: FinishReason | None  # None: handed over, cancelled or failed before its end


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="handoff"):
    """One handoff on one side, written when it ends there: on prefill at the commit, on decode at the first step with
    the sequence. `kvrelay.telemetry.handoffs` defines the times. Only prefill sets `num_tail_blocks`.
    """

    at: float
    request: str
    attempt: int
    sequence: int
    role: str
    transport: str
    num_blocks: int
    num_bytes: int
    num_tail_blocks: int
    num_resends: int
    grant_wait_s: float
    duration_s: float
    exposed_s: float


Record = StepRecord | SequenceRecord | StepEvent | HandoffRecord
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def read_metrics(path: Path) -> Iterator[Record]:
    """Reads the records of a file in order, without an incomplete last line."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield _decoder.decode(line)


@dataclass(slots=True)
class _SequenceTimes:
    """Times of a sequence in monotonic seconds; None: has not happened."""

    sequence: Sequence
    arrived: float
    num_output_before: int
    admitted: float | None = None
    first_token: float | None = None


class MetricsStore:
    """Appends to a file. Called on the event loop's thread around each step."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = BackgroundLines(path)
        self._encoder = msgspec.json.Encoder()
        self._clock = clock
        self._buffer = bytearray()
        self._flushed = clock()
        self._times: dict[SequenceKey, _SequenceTimes] = {}
        self.trace = StepTrace(clock)

    def arrived(self, sequence: Sequence, *, is_running: bool) -> None:
        """A sequence was queued or, with `is_running`, joined the running batch."""
        now = self._clock()
        self._times[sequence.key] = _SequenceTimes(sequence, now, sequence.num_output, now if is_running else None)

    def planned(self, plan: StepPlan) -> None:
        """Notes the admission of the sequences that the plan admits."""
        now = self._clock()
        for sequence in plan.admitted:
            times = self._times.get(sequence.key)
            if times is not None and times.admitted is None:
                times.admitted = now

    def committed(
        self,
        plan: StepPlan,
        result: StepResult,
        outputs: list[SequenceOutput],
        scheduler: Scheduler,
        schedule_s: float,
        commit_s: float,
        *,
        ahead: bool,
        launched_ahead: bool = False,
    ) -> None:
        """Writes a finished step, and the sequences that ended in it."""
        now = self._clock()
        num_chunks = sum(row.is_prefill for row in plan.rows)
        slots = scheduler.blocks.slot_use(scheduler.running.values())
        self._write(
            StepRecord(
                time.time(),
                plan.step,
                plan.num_prefill_tokens,
                plan.num_decode_tokens,
                num_chunks,
                len(plan.rows) - num_chunks,
                len(scheduler.waiting) - scheduler.num_pending_handoffs,
                len(scheduler.running),
                len(plan.preempted),
                len(plan.recomputed),
                len(plan.swaps.out.blocks) if plan.swaps is not None else 0,
                len(plan.swaps.back.blocks) if plan.swaps is not None else 0,
                scheduler.swap_use.num_used_slots,
                scheduler.blocks.pool.num_available,
                slots.allocated,
                slots.committed,
                schedule_s,
                result.copy_s,
                result.forward_s,
                commit_s,
                plan.held_back,
                ahead,
                result.captured,
                launched_ahead,
            )
        )
        self._write_trace()
        for output in outputs:
            times = self._times.get(output.sequence.key)
            if times is not None and times.first_token is None and output.token_ids:
                times.first_token = now
            if output.finish is not None:
                self.left(output.sequence.key, output.finish)
        self._flush_sometimes(now)

    def left(self, key: SequenceKey, finish: FinishReason | None = None) -> None:
        """Writes a sequence that left this worker. Unknown keys are ignored."""
        times = self._times.pop(key, None)
        if times is None:
            return
        now, sequence = self._clock(), times.sequence
        num_output = sequence.num_output - times.num_output_before
        ttft = times.first_token - times.arrived if times.first_token is not None else None
        rest = now - times.first_token if times.first_token is not None else 0.0
        self._write(
            SequenceRecord(
                time.time(),
                *key,
                sequence.num_prompt,
                num_output,
                sequence.num_cached_tokens,
                sequence.num_preemptions,
                times.admitted - times.arrived if times.admitted is not None else None,
                ttft,
                rest / (num_output - 1) if num_output > 1 else None,
                now - times.arrived,
                finish,
            )
        )

    def handoff(self, record: HandoffRecord) -> None:
        """Writes a handoff that ended on this worker."""
        if not self._file.is_closed:  # handoffs may end after the last step
            self._write(record)
            self._flush_sometimes(self._clock())

    def close(self) -> None:
        """Writes buffered lines and closes the file. Idempotent."""
        if not self._file.is_closed:
            self._write_trace()
            self._flush()
            self._file.close()

    def _write_trace(self) -> None:
        for event in self.trace.drain():
            self._write(event)

    def _write(self, record: Record) -> None:
        self._buffer += self._encoder.encode(record)
        self._buffer += b"\n"

    def _flush_sometimes(self, now: float) -> None:
        if now - self._flushed >= FLUSH_INTERVAL_S:
            self._flushed = now
            self._flush()

    def _flush(self) -> None:
        self._file.write(self._buffer)
        self._buffer.clear()
