"""Observes the steps of a worker and its sequences: records for the metrics file if there is one, events for
`/requests/{id}/timeline`, and OpenTelemetry spans if exported.

    kvrelay.prefill or kvrelay.decode   from arrival to end on this worker; child of the router's attempt span
      kvrelay.queue                     until the first chunk was scheduled
      kvrelay.compute                   from then until the first token, if the prompt is computed here
    kvrelay.step                        its own trace for each step with a chunk of a sampled prompt; linked to the
                                        spans of all sequences whose chunks it computed

A step without prompt chunks has no span: the span of a decoding sequence names its first and last step, and the metrics
have the cost of steps. Spans and events are written when the sequence leaves, so a worker that dies writes no partial
spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.protocol.messages import TimelineEvent
from kvrelay.protocol.sampling import FinishReason
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import StepResult
from kvrelay.telemetry.metrics_file import MetricsFile, SequenceRecord, StepRecord
from kvrelay.telemetry.tracer import RecentEvents, TraceContext, Tracer, new_trace, sampled, timeline_event

MAX_CHUNKS = 128
"""Chunks of a sequence that appear as events of their own. Later chunks are only counted."""


@dataclass(slots=True)
class _SequenceTimings:
    """Monotonic seconds; None: has not happened. `parent` is None unless the trace is recorded.

    `prefilled`: the prompt was computed here. `chunks`: start, end and number of tokens of each chunk.
    """

    sequence: Sequence
    parent: TraceContext | None
    context: TraceContext | None
    arrived: float
    num_output_before: int
    admitted: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    first_step: int = 0
    num_chunks: int = 0
    chunks: list[tuple[float, float, int]] = field(default_factory=list)


class StepObserver:
    """Observes one worker. Called on the event loop's thread around each step; without a file a step that has no prompt
    chunks costs nothing. `tracer` is None if no spans are exported.
    """

    def __init__(
        self,
        role: str,
        recent: RecentEvents | None = None,
        tracer: Tracer | None = None,
        file: MetricsFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file = file
        self._role = role
        self._recent = recent or RecentEvents()
        self._tracer = tracer
        self._clock = clock
        self._sequences: dict[SequenceKey, _SequenceTimings] = {}
        self._last_step = 0

    def arrived(self, sequence: Sequence, *, is_running: bool) -> None:
        """A sequence was queued or, with `is_running`, joined the running batch."""
        parent = sampled(sequence.origin.trace) if self._tracer is not None else None
        context = parent.child() if parent is not None else None
        now = self._clock()
        self._sequences[sequence.key] = timings = _SequenceTimings(sequence, parent, context, now, sequence.num_output)
        if is_running:
            timings.admitted, timings.first_step = now, self._last_step + 1

    def planned(self, plan: StepPlan) -> None:
        """Notes the admission of the sequences that the plan admits."""
        for sequence in plan.admitted:
            timings = self._sequences.get(sequence.key)
            if timings is not None and timings.admitted is None:
                timings.admitted, timings.first_step = self._clock(), plan.step

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
        """Notes the chunks and first tokens of a finished step, and writes its record."""
        self._last_step = plan.step
        has_chunks = bool(plan.rows) and plan.rows[0].is_prefill  # the rows of prompt chunks come first
        if self.file is not None:
            record = _step_record(plan, result, scheduler, schedule_s, commit_s, ahead=ahead, launched=launched_ahead)
            self.file.write(record)
        elif not has_chunks:
            return
        now = self._clock()
        if has_chunks:
            self._chunks_computed(plan, now - result.forward_s, now, len(scheduler.running))
        for output in outputs:
            if (timings := self._sequences.get(output.sequence.key)) is None:
                continue
            if output.prefilled and timings.prefilled is None:
                timings.prefilled = now
            if output.token_ids and timings.first_token is None:
                timings.first_token = now

    def left(self, key: SequenceKey, finish: FinishReason | None = None) -> None:
        """Ends a sequence and writes its record, events and spans. Unknown keys are ignored."""
        timings = self._sequences.pop(key, None)
        if timings is None:
            return
        now = self._clock()
        self._recent.add(key, self._events(timings, now))
        if self.file is not None:
            self.file.write(_sequence_record(timings, now, finish))
        if self._tracer is not None and timings.context is not None:
            self._trace(self._tracer, timings, timings.context, now, finish)

    def close(self) -> None:
        """Closes the file."""
        if self.file is not None:
            self.file.close()

    def _chunks_computed(self, plan: StepPlan, start: float, end: float, num_running: int) -> None:
        links = []
        for row in plan.rows:
            if not row.is_prefill:
                break
            if (timings := self._sequences.get(row.sequence.key)) is not None:
                timings.num_chunks += 1
                if len(timings.chunks) < MAX_CHUNKS:
                    timings.chunks.append((start, end, row.num_tokens))
                if timings.context is not None:
                    links.append(timings.context)
        if self._tracer is not None and links:
            self._trace_step(self._tracer, plan, start, end, num_running, links)

    def open_events(self, request: str) -> list[TimelineEvent]:
        """Events of the request's unfinished sequences. O(sequences on this worker)."""
        found = [timings for key, timings in self._sequences.items() if key[0] == request]
        return [each for timings in found for each in self._events(timings, None)]

    def _events(self, timings: _SequenceTimings, end: float | None) -> list[TimelineEvent]:
        key, sequence = timings.sequence.key, timings.sequence
        admitted = timings.admitted if timings.admitted is not None else end
        events = []
        if timings.admitted != timings.arrived:
            events.append(timeline_event(key, "queue", timings.arrived, admitted))
        events += [timeline_event(key, "chunk", start, until, {"tokens": num}) for start, until, num in timings.chunks]
        num_output = sequence.num_output - timings.num_output_before
        if self._role == "decode" and timings.admitted is not None and (num_output or not timings.num_chunks):
            detail: dict[str, float | str] = {
                "tokens": num_output,
                "first_step": timings.first_step,
                "last_step": self._last_step,
                "preemptions": sequence.num_preemptions,
            }
            events.append(timeline_event(key, "decode", timings.prefilled or timings.admitted, end, detail))
        return events

    def _trace_step(
        self, tracer: Tracer, plan: StepPlan, start: float, end: float, num_running: int, links: list[TraceContext]
    ) -> None:
        num_chunks = sum(row.is_prefill for row in plan.rows)
        attributes = {
            "kvrelay.step.number": plan.step,
            "kvrelay.step.prefill_tokens": plan.num_prefill_tokens,
            "kvrelay.step.decode_tokens": plan.num_decode_tokens,
            "kvrelay.step.chunks": num_chunks,
            "kvrelay.step.decodes": len(plan.rows) - num_chunks,
            "kvrelay.step.running": num_running,
            "kvrelay.step.preempted": len(plan.preempted),
        }
        tracer.record("kvrelay.step", new_trace(is_sampled=True), None, start, end, attributes=attributes, links=links)

    def _trace(
        self, tracer: Tracer, timings: _SequenceTimings, context: TraceContext, now: float, finish: FinishReason | None
    ) -> None:
        sequence, key = timings.sequence, timings.sequence.key
        attributes: dict[str, str | int] = {
            "kvrelay.request": key[0],
            "kvrelay.attempt": key[1],
            "kvrelay.sequence": key[2],
            "kvrelay.prompt_tokens": sequence.num_prompt,
            "kvrelay.cached_tokens": sequence.num_cached_tokens,
            "kvrelay.output_tokens": sequence.num_output - timings.num_output_before,
            "kvrelay.chunks": timings.num_chunks,
            "kvrelay.preemptions": sequence.num_preemptions,
            "kvrelay.finish": str(finish) if finish is not None else "left",
        }
        if timings.admitted is not None:
            attributes |= {"kvrelay.step.first": timings.first_step, "kvrelay.step.last": self._last_step}
        name = f"kvrelay.{self._role}"
        tracer.record(name, context, timings.parent, timings.arrived, now, kind="consumer", attributes=attributes)
        began = timings.admitted if timings.admitted is not None else now
        if began > timings.arrived:
            tracer.record("kvrelay.queue", context.child(), context, timings.arrived, began)
        if timings.num_chunks and timings.admitted is not None:
            tracer.record("kvrelay.compute", context.child(), context, timings.admitted, timings.prefilled or now)


def _step_record(
    plan: StepPlan,
    result: StepResult,
    scheduler: Scheduler,
    schedule_s: float,
    commit_s: float,
    *,
    ahead: bool,
    launched: bool,
) -> StepRecord:
    num_chunks = sum(row.is_prefill for row in plan.rows)
    slots = scheduler.blocks.slot_use(scheduler.running.values())
    return StepRecord(
        at=time.time(),
        step=plan.step,
        num_prefill_tokens=plan.num_prefill_tokens,
        num_decode_tokens=plan.num_decode_tokens,
        num_chunks=num_chunks,
        num_decodes=len(plan.rows) - num_chunks,
        num_waiting=len(scheduler.waiting) - scheduler.waiting.num_remote,
        num_running=len(scheduler.running),
        num_preempted=len(plan.preempted),
        num_recomputed=len(plan.recomputed),
        num_swapped_out_blocks=len(plan.host_copies.out.blocks) if plan.host_copies is not None else 0,
        num_swapped_in_blocks=len(plan.host_copies.back.blocks) if plan.host_copies is not None else 0,
        num_used_swap_slots=scheduler.lifecycle.offload.use.num_used_slots,
        num_available_blocks=scheduler.blocks.pool.num_available,
        num_allocated_slots=slots.allocated,
        num_committed_slots=slots.committed,
        schedule_s=schedule_s,
        copy_s=result.copy_s,
        forward_s=result.forward_s,
        commit_s=commit_s,
        held_back=plan.held_back,
        ahead=ahead,
        captured=result.captured,
        launched_ahead=launched,
    )


def _sequence_record(timings: _SequenceTimings, now: float, finish: FinishReason | None) -> SequenceRecord:
    sequence, first_token = timings.sequence, timings.first_token
    num_output = sequence.num_output - timings.num_output_before
    rest_s = now - first_token if first_token is not None else 0.0
    return SequenceRecord(
        time.time(),
        *sequence.key,
        sequence.num_prompt,
        num_output,
        sequence.num_cached_tokens,
        sequence.num_preemptions,
        queue_s=timings.admitted - timings.arrived if timings.admitted is not None else None,
        ttft_s=first_token - timings.arrived if first_token is not None else None,
        tpot_s=rest_s / (num_output - 1) if num_output > 1 else None,
        total_s=now - timings.arrived,
        finish=finish,
    )
