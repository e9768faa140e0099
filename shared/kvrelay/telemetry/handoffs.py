"""What a worker measures of its handoffs: how long each took, how much of that its client could feel, and how they
failed. A few additions per handoff."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvrelay.engine.batch import SequenceKey
from kvrelay.telemetry.instruments import BYTES, GIGABYTES_PER_SECOND, SECONDS, Instruments
from kvrelay.telemetry.metrics_store import HandoffRecord, MetricsStore
from kvrelay.telemetry.stages import RecentStages, stage
from kvrelay.telemetry.tracing import Attributes, Tracer, sampled

FailureCause = Literal[
    "refused", "released", "transfer", "decode_lost", "prefill_lost", "aborted", "cancelled", "reassigned"
]
"""`transfer`: the transport could not, or blocks did not come, or came corrupted. The others: who ended it."""


@dataclass(slots=True, eq=False)
class HandoffCourse:
    """Moments of one handoff on this worker, monotonic seconds; 0: not yet."""

    asked_at: float = 0.0
    granted_at: float = 0.0
    complete_at: float = 0.0
    """Prefill: the last chunk was computed. Decode: the handoff message came."""
    committed_at: float = 0.0
    transport: str = ""
    num_blocks: int = 0
    num_tail_blocks: int = 0
    """Prefill: those first given to the transport after the last chunk."""
    num_resends: int = 0
    is_handed: bool = False
    key: SequenceKey = ("", 0, 0)
    trace: str = ""
    """The context of the attempt that it belongs to."""
    is_over: bool = False
    """Committed, or failed; until the next question."""


class HandoffMeter:
    """For one role. Blocks are of `block_bytes` bytes.

    `duration` is from the question for slots to the commit; `exposed` is what is left of it after the last chunk: on
    prefill from the chunk's end to the commit's arrival, on decode from the handoff message to the first step. `rate`
    is bytes by the time from the grant to the commit, in which prefill may still have computed.
    """

    def __init__(
        self,
        role: str,
        block_bytes: int,
        instruments: Instruments,
        store: MetricsStore | None = None,
        tracer: Tracer | None = None,
        recent: RecentStages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role = role
        self._block_bytes = block_bytes
        self._store = store
        self._tracer = tracer
        self._recent = recent if recent is not None else RecentStages()
        self._clock = clock
        self._duration = instruments.histogram("kvrelay.handoff.duration", "s", SECONDS)
        self._wait = instruments.histogram("kvrelay.handoff.grant_wait", "s", SECONDS)
        self._exposed = instruments.histogram("kvrelay.handoff.exposed", "s", SECONDS)
        self._size = instruments.histogram("kvrelay.handoff.size", "By", BYTES)
        self._rate = instruments.histogram("kvrelay.handoff.rate", "GBy/s", GIGABYTES_PER_SECOND)
        self._failures = instruments.counter("kvrelay.handoff.failures", "cause")

    def asked(self, course: HandoffCourse) -> None:
        """Decode was asked for slots; what an earlier question brought does not count any more."""
        if course.asked_at and not course.is_over:  # the router saw its end before this worker did
            self.failed("reassigned", course)
        course.asked_at = self._clock()
        course.granted_at = course.committed_at = 0.0
        course.num_blocks = course.num_tail_blocks = 0
        course.is_handed = course.is_over = False

    def granted(self, course: HandoffCourse, transport: str) -> None:
        """Slots were granted."""
        course.granted_at = self._clock()
        course.transport = transport
        self._wait.record(course.granted_at - course.asked_at)

    def pushed(self, course: HandoffCourse, num_blocks: int) -> None:
        """Prefill: blocks were given to the transport. Those that are sent again are not counted again."""
        if course.is_handed:
            return
        course.num_blocks += num_blocks
        course.num_tail_blocks += num_blocks if course.complete_at else 0

    def complete(self, course: HandoffCourse) -> None:
        """See `HandoffCourse.complete_at`."""
        course.complete_at = course.complete_at or self._clock()

    def committed(self, course: HandoffCourse, key: SequenceKey) -> None:
        """Decode owns the sequence. On prefill that is the end."""
        now = course.committed_at = self._clock()
        num_bytes = course.num_blocks * self._block_bytes
        self._duration.record(now - course.asked_at)
        self._size.record(num_bytes)
        if num_bytes and now > course.granted_at:
            self._rate.record(num_bytes / (now - course.granted_at) / 1e9)
        self._over(course, now)
        if self._role == "prefill":
            self._end(course, key, now)

    def first_step(self, course: HandoffCourse, key: SequenceKey) -> None:
        """Decode: the first step with the sequence begins."""
        self._end(course, key, self._clock())

    def failed(self, cause: FailureCause, course: HandoffCourse | None) -> None:
        """A handoff that was asked for came to nothing. Without its course it is one that was given up before."""
        self._failures.add(cause)
        if course is not None and not course.is_over:
            self._over(course, self._clock(), cause)

    def _over(self, course: HandoffCourse, now: float, failure: FailureCause | None = None) -> None:
        course.is_over = True
        if not course.asked_at:
            return
        self._trace(course, now, failure)
        granted = course.granted_at or now
        detail: dict[str, float | str] = {
            "blocks": course.num_blocks,
            "bytes": course.num_blocks * self._block_bytes,
            "transport": course.transport,
        }
        if failure is not None:
            detail["failed"] = failure
        wait = stage(course.key, "slots", course.asked_at, granted)
        self._recent.add(course.key, [wait, stage(course.key, "transfer", granted, now, detail)])

    def _trace(self, course: HandoffCourse, now: float, failure: FailureCause | None = None) -> None:
        """A span from the question to the commit, or to the failure: `kvrelay.handoff.send` or `.receive`."""
        parent = sampled(course.trace) if self._tracer is not None else None
        if self._tracer is None or parent is None:
            return
        is_sender = self._role == "prefill"
        attributes: Attributes = {
            "kvrelay.handoff.transport": course.transport,
            "kvrelay.handoff.blocks": course.num_blocks,
            "kvrelay.handoff.bytes": course.num_blocks * self._block_bytes,
            "kvrelay.handoff.resends": course.num_resends,
            "kvrelay.handoff.grant_wait_s": max(0.0, course.granted_at - course.asked_at),
        }
        if failure is not None:
            attributes = {**attributes, "error.type": failure}
        self._tracer.record(
            "kvrelay.handoff.send" if is_sender else "kvrelay.handoff.receive",
            parent.child(),
            parent,
            course.asked_at,
            now,
            kind="producer" if is_sender else "consumer",
            attributes=attributes,
            error=failure,
        )

    def _end(self, course: HandoffCourse, key: SequenceKey, now: float) -> None:
        self._exposed.record(now - course.complete_at)
        if self._store is not None:
            to_epoch = time.time() - self._clock()
            self._store.handoff(
                HandoffRecord(
                    at=to_epoch + now,
                    request=key[0],
                    attempt=key[1],
                    sequence=key[2],
                    role=self._role,
                    transport=course.transport,
                    num_blocks=course.num_blocks,
                    num_bytes=course.num_blocks * self._block_bytes,
                    num_tail_blocks=course.num_tail_blocks,
                    num_resends=course.num_resends,
                    grant_wait_s=course.granted_at - course.asked_at,
                    duration_s=course.committed_at - course.asked_at,
                    exposed_s=now - course.complete_at,
                )
            )
