"""Measures the handoffs of a worker: duration, the part that compute does not hide, size, rate and failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.telemetry.metrics import BYTES, GIGABYTES_PER_SECOND, SECONDS, Instruments
from kvrelay.telemetry.metrics_file import HandoffRecord, MetricsFile
from kvrelay.telemetry.tracer import Attributes, RecentEvents, Tracer, sampled, timeline_event

FailureCause = Literal[
    "refused", "released", "transfer", "decode_lost", "prefill_lost", "aborted", "cancelled", "reassigned"
]
"""`transfer`: the transport failed, or blocks were missing or corrupted. The other causes name who ended the handoff.
"""


@dataclass(slots=True, eq=False)
class HandoffTimings:
    """Times of one handoff on this worker in monotonic seconds; 0: has not happened."""

    asked_at: float = 0.0
    granted_at: float = 0.0
    complete_at: float = 0.0
    """Prefill: the last chunk was computed. Decode: the `Handoff` message arrived."""
    committed_at: float = 0.0
    transport: str = ""
    num_blocks: int = 0
    num_tail_blocks: int = 0
    """Prefill only: blocks first given to the transport after the last chunk."""
    key: SequenceKey = ("", 0, 0)
    trace: str = ""
    """The trace context of the attempt."""
    is_over: bool = False
    """Committed or failed; reset by the next `Reserve`."""


class HandoffMeter:
    """Records the handoffs of one role. A block has `block_bytes` bytes.

    `duration` is the time from `Reserve` to the commit. `exposed` is the time that compute does not hide: on prefill
    from the last chunk's end to the commit's arrival, on decode from the `Handoff` message to the first step. `rate` is
    bytes divided by the time from grant to commit, during which prefill may still compute.
    """

    def __init__(
        self,
        role: str,
        block_bytes: int,
        instruments: Instruments,
        file: MetricsFile | None = None,
        tracer: Tracer | None = None,
        recent: RecentEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role = role
        self._block_bytes = block_bytes
        self._file = file
        self._tracer = tracer
        self._recent = recent if recent is not None else RecentEvents()
        self._clock = clock
        self._duration = instruments.histogram("kvrelay.handoff.duration", SECONDS)
        self._wait = instruments.histogram("kvrelay.handoff.grant_wait", SECONDS)
        self._exposed = instruments.histogram("kvrelay.handoff.exposed", SECONDS)
        self._size = instruments.histogram("kvrelay.handoff.size", BYTES)
        self._rate = instruments.histogram("kvrelay.handoff.rate", GIGABYTES_PER_SECOND)
        self._failures = instruments.counter("kvrelay.handoff.failures")

    def asked(self, timings: HandoffTimings) -> None:
        """`Reserve` was sent or received. Times of an earlier one are discarded."""
        if timings.asked_at and not timings.is_over:  # the router noticed the end of the earlier handoff first
            self.failed("reassigned", timings)
        timings.asked_at = self._clock()
        timings.granted_at = timings.committed_at = 0.0
        timings.num_blocks = timings.num_tail_blocks = 0
        timings.is_over = False

    def granted(self, timings: HandoffTimings, transport: str) -> None:
        """Decode granted slots over this transport."""
        timings.granted_at = self._clock()
        timings.transport = transport
        self._wait.record(timings.granted_at - timings.asked_at)

    def pushed(self, timings: HandoffTimings, num_blocks: int) -> None:
        """Prefill: the transport accepted blocks."""
        timings.num_blocks += num_blocks
        timings.num_tail_blocks += num_blocks if timings.complete_at else 0

    def complete(self, timings: HandoffTimings) -> None:
        """Sets `HandoffTimings.complete_at` once."""
        timings.complete_at = timings.complete_at or self._clock()

    def committed(self, timings: HandoffTimings, key: SequenceKey) -> None:
        """Decode owns the sequence. On prefill this ends the handoff."""
        now = timings.committed_at = self._clock()
        num_bytes = timings.num_blocks * self._block_bytes
        self._duration.record(now - timings.asked_at)
        self._size.record(num_bytes)
        if num_bytes and now > timings.granted_at:
            self._rate.record(num_bytes / (now - timings.granted_at) / 1e9)
        self._over(timings, now)
        if self._role == "prefill":
            self._end(timings, key, now)

    def first_step(self, timings: HandoffTimings, key: SequenceKey) -> None:
        """Decode: the first step with the sequence begins, which ends the handoff."""
        self._end(timings, key, self._clock())

    def failed(self, cause: FailureCause, timings: HandoffTimings | None) -> None:
        """Counts a failed handoff. `timings` is None if the handoff was dropped before."""
        self._failures[cause] += 1
        if timings is not None and not timings.is_over:
            self._over(timings, self._clock(), cause)

    def _over(self, timings: HandoffTimings, now: float, failure: FailureCause | None = None) -> None:
        timings.is_over = True
        if not timings.asked_at:
            return
        self._trace(timings, now, failure)
        granted = timings.granted_at or now
        detail: dict[str, float | str] = {
            "blocks": timings.num_blocks,
            "bytes": timings.num_blocks * self._block_bytes,
            "transport": timings.transport,
        }
        if failure is not None:
            detail["failed"] = failure
        wait = timeline_event(timings.key, "slots", timings.asked_at, granted)
        self._recent.add(timings.key, [wait, timeline_event(timings.key, "transfer", granted, now, detail)])

    def _trace(self, timings: HandoffTimings, now: float, failure: FailureCause | None = None) -> None:
        """Writes the span `kvrelay.handoff.send` or `.receive`, from `Reserve` to the commit or failure."""
        parent = sampled(timings.trace) if self._tracer is not None else None
        if self._tracer is None or parent is None:
            return
        is_sender = self._role == "prefill"
        attributes: Attributes = {
            "kvrelay.handoff.transport": timings.transport,
            "kvrelay.handoff.blocks": timings.num_blocks,
            "kvrelay.handoff.bytes": timings.num_blocks * self._block_bytes,
            "kvrelay.handoff.grant_wait_s": max(0.0, timings.granted_at - timings.asked_at),
        }
        if failure is not None:
            attributes = {**attributes, "error.type": failure}
        self._tracer.record(
            "kvrelay.handoff.send" if is_sender else "kvrelay.handoff.receive",
            parent.child(),
            parent,
            timings.asked_at,
            now,
            kind="producer" if is_sender else "consumer",
            attributes=attributes,
            error=failure,
        )

    def _end(self, timings: HandoffTimings, key: SequenceKey, now: float) -> None:
        self._exposed.record(now - timings.complete_at)
        if self._file is not None:
            to_epoch = time.time() - self._clock()
            self._file.write(
                HandoffRecord(
                    at=to_epoch + now,
                    request=key[0],
                    attempt=key[1],
                    sequence=key[2],
                    role=self._role,
                    transport=timings.transport,
                    num_blocks=timings.num_blocks,
                    num_bytes=timings.num_blocks * self._block_bytes,
                    num_tail_blocks=timings.num_tail_blocks,
                    grant_wait_s=timings.granted_at - timings.asked_at,
                    duration_s=timings.committed_at - timings.asked_at,
                    exposed_s=now - timings.complete_at,
                )
            )
