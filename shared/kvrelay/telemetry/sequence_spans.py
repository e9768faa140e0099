"""What a worker's steps did for each sequence, as spans: its whole stay, its wait, and the chunks of its prompt.

    kvrelay.prefill or kvrelay.decode   from its arrival to its end here; child of the router's attempt
      kvrelay.queue                     until its first chunk was scheduled
      kvrelay.compute                   from then until its first token here, for a prompt that is computed here
    kvrelay.step                        a trace of its own for each step with a chunk of a sampled prompt; linked to the
                                        stays of all sequences whose chunks it computed

Steps that only decode have no span: a decode's stay names its first and last step, and a step's cost is in the metrics.
Spans are written when the sequence leaves, so a worker that dies leaves no half of them behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.batch import SequenceKey, StepResult
from kvrelay.protocol.sampling import FinishReason
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.trace_context import TraceContext, new_trace
from kvrelay.telemetry.tracing import Tracer, sampled


@dataclass(slots=True)
class _Stay:
    """Moments of a sequence here, monotonic seconds; None: not yet."""

    sequence: Sequence
    parent: TraceContext
    context: TraceContext
    arrived: float
    num_output_before: int
    admitted: float | None = None
    first_token: float | None = None
    first_step: int = 0
    num_chunks: int = 0


class SequenceSpans:
    """For one role. Called on the event loop's thread around each step; sequences of traces that nobody records cost a
    look at their context."""

    def __init__(self, role: str, tracer: Tracer, clock: Callable[[], float] = time.monotonic) -> None:
        self._role = role
        self._tracer = tracer
        self._clock = clock
        self._stays: dict[SequenceKey, _Stay] = {}
        self._last_step = 0

    def arrived(self, sequence: Sequence, *, is_running: bool) -> None:
        """A sequence was queued, or joined those that run."""
        parent = sampled(sequence.trace)
        if parent is not None:
            now = self._clock()
            stay = _Stay(sequence, parent, parent.child(), now, sequence.num_output)
            self._stays[sequence.key] = stay
            if is_running:
                stay.admitted, stay.first_step = now, self._last_step + 1

    def planned(self, plan: StepPlan) -> None:
        """Some sequences' waiting ended."""
        for sequence in plan.admitted:
            stay = self._stays.get(sequence.key)
            if stay is not None and stay.admitted is None:
                stay.admitted, stay.first_step = self._clock(), plan.step

    def committed(self, plan: StepPlan, result: StepResult, outputs: list[SequenceOutput], num_running: int) -> None:
        """A step is done."""
        self._last_step = plan.step
        if not self._stays or not plan.rows or not plan.rows[0].is_prefill:
            return  # chunks stand first
        now = self._clock()
        stays = []
        for row in plan.rows:
            if not row.is_prefill:
                break
            if (stay := self._stays.get(row.sequence.key)) is not None:
                stay.num_chunks += 1
                stays.append(stay)
        if not stays:
            return
        for output in outputs:
            stay = self._stays.get(output.sequence.key)
            if stay is not None and stay.first_token is None and output.prefilled:
                stay.first_token = now
        num_chunks = sum(row.is_prefill for row in plan.rows)
        self._tracer.record(
            "kvrelay.step",
            new_trace(is_sampled=True),
            None,
            now - result.forward_s,
            now,
            attributes={
                "kvrelay.step.number": plan.step,
                "kvrelay.step.prefill_tokens": plan.num_prefill_tokens,
                "kvrelay.step.decode_tokens": plan.num_decode_tokens,
                "kvrelay.step.chunks": num_chunks,
                "kvrelay.step.decodes": len(plan.rows) - num_chunks,
                "kvrelay.step.running": num_running,
                "kvrelay.step.preempted": len(plan.preempted),
            },
            links=[stay.context for stay in stays],
        )

    def left(self, key: SequenceKey, finish: FinishReason | None = None) -> None:
        """A sequence is over on this worker. Unknown keys are ignored."""
        stay = self._stays.pop(key, None)
        if stay is None:
            return
        now, sequence = self._clock(), stay.sequence
        attributes: dict[str, str | int] = {
            "kvrelay.request": key[0],
            "kvrelay.attempt": key[1],
            "kvrelay.sequence": key[2],
            "kvrelay.prompt_tokens": sequence.num_prompt,
            "kvrelay.cached_tokens": sequence.num_cached_tokens,
            "kvrelay.output_tokens": sequence.num_output - stay.num_output_before,
            "kvrelay.chunks": stay.num_chunks,
            "kvrelay.preemptions": sequence.num_preemptions,
            "kvrelay.finish": str(finish) if finish is not None else "left",
        }
        if stay.admitted is not None:
            attributes |= {"kvrelay.step.first": stay.first_step, "kvrelay.step.last": self._last_step}
        record, context = self._tracer.record, stay.context
        record(f"kvrelay.{self._role}", context, stay.parent, stay.arrived, now, kind="consumer", attributes=attributes)
        began = stay.admitted if stay.admitted is not None else now
        if began > stay.arrived:
            record("kvrelay.queue", context.child(), context, stay.arrived, began)
        if stay.num_chunks and stay.admitted is not None:
            record("kvrelay.compute", context.child(), context, stay.admitted, stay.first_token or now)
