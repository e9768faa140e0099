"""Writes the times of steps, sequences and handoffs to a file of JSON lines (`metrics_file`).

There is one line per step, per finished sequence and per handoff, and a few events per step; nothing per token. Times
are in seconds, `at` is seconds since the epoch. Lines are buffered and passed to a thread at most once a second, so a
step costs microseconds and never waits for the disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec

from kvrelay.background_writer import BackgroundWriter, open_to_append, write_all
from kvrelay.protocol.sampling import FinishReason

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 2.0
MAX_WAITING_BYTES = 16 << 20
"""Bytes kept in memory while the disk is slow: minutes of a busy worker."""
MAX_LINE_BYTES = 1 << 20
StepEventName = Literal[
    "plan_begins", "planned", "plan_cancelled", "forward_begins", "forward_ends", "committed", "published", "failed"
]


class StepEvent(msgspec.Struct, frozen=True, tag_field="kind", tag="event"):
    """One event of a step. `order` increases over all events of the process; `at_s` is in monotonic seconds."""

    order: int
    at_s: float
    step: int
    event: StepEventName


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


Mark = tuple[int, float]
"""A position in the order, and its time."""


class StepTrace:
    """Collects events until `drain`. `note` and `mark` may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._orders = count()
        self._events: deque[StepEvent] = deque()

    def mark(self) -> Mark:
        """Reserves a position for an event whose step is not known yet."""
        return next(self._orders), self._clock()

    def note(self, event: StepEventName, step: int, mark: Mark | None = None) -> None:
        """Notes an event now, or at the mark."""
        order, at_s = mark or self.mark()
        self._events.append(StepEvent(order, at_s, step, event))

    def drain(self) -> Iterator[StepEvent]:
        """Removes and yields the events so far. Events noted from a mark may follow events of a higher order."""
        while self._events:
            yield self._events.popleft()


class MetricsFile:
    """Appends records to a file of whole lines. Called on the event loop's thread, but for `trace`.

    Lines that cannot be written, or not in time, are dropped, with a warning when dropping begins: they are not worth
    failing the process or keeping them in memory. Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.trace = StepTrace(clock)
        self._path = path
        self._file = open_to_append(path)
        _remove_cut_line(path)
        self._writer = BackgroundWriter(self._write_lines, MAX_WAITING_BYTES, "metrics-file")
        self._encoder = msgspec.json.Encoder()
        self._clock = clock
        self._buffer = bytearray()
        self._flushed = clock()
        self._is_late = self._is_failing = self._is_closed = False

    def write(self, record: Record) -> None:
        """Writes a record, behind the events of steps so far. Does nothing once closed: handoffs may end after the last
        step."""
        if self._is_closed:
            return
        self._put(record)
        for event in self.trace.drain():
            self._put(event)
        now = self._clock()
        if now - self._flushed >= FLUSH_INTERVAL_S:
            self._flushed = now
            self._flush()

    def close(self) -> None:
        """Writes buffered lines and closes the file, within `CLOSE_TIMEOUT_S`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for event in self.trace.drain():
            self._put(event)
        self._flush()
        if self._writer.close(CLOSE_TIMEOUT_S):
            self._file.close()
        else:
            log.warning("%s takes no bytes: its last lines are lost", self._path)

    def _put(self, record: Record) -> None:
        self._buffer += self._encoder.encode(record)
        self._buffer += b"\n"

    def _flush(self) -> None:
        is_late = not self._writer.put(bytes(self._buffer))
        if is_late and not self._is_late:
            log.warning("%s is not written as fast as lines come: some are lost", self._path)
        self._is_late = is_late
        self._buffer.clear()

    def _write_lines(self, parts: list[bytes]) -> None:
        """Runs on the writer's thread."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            write_all(self._file, b"".join(parts))
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("%s cannot be written, lines are lost until it can: %s", self._path, error)
            self._is_failing = True
            with suppress(OSError):  # pipes and devices
                self._file.truncate(size)  # leaves no part of a line


def _remove_cut_line(path: Path) -> None:
    """Removes what a crash left of a last line."""
    if not path.is_file():  # a pipe or device
        return
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - MAX_LINE_BYTES)
        file.seek(start)
        tail = file.read()
    if tail and not tail.endswith(b"\n"):
        os.truncate(path, start + tail.rfind(b"\n") + 1)
