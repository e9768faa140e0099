"""What a worker's steps did for each sequence: as stages that can be asked for, and as spans where these are exported.

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
from dataclasses import dataclass, field

from kvrelay.engine.batch import SequenceKey, StepResult
from kvrelay.protocol.messages import Stage
from kvrelay.protocol.sampling import FinishReason
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.stages import RecentStages, stage
from kvrelay.telemetry.trace_context import TraceContext, new_trace
from kvrelay.telemetry.tracing import Tracer, sampled

MAX_CHUNKS = 128
"""Of a sequence, that its stages show each by itself."""


@dataclass(slots=True)
class _Stay:
    """Moments of a sequence here, monotonic seconds; None: not yet. `parent`: of a trace that is recorded.

    `chunks`: when each began and ended, and its tokens.
    """

    sequence: Sequence
    parent: TraceContext | None
    context: TraceContext | None
    arrived: float
    num_output_before: int
    admitted: float | None = None
    first_token: float | None = None
    first_step: int = 0
    num_chunks: int = 0
    chunks: list[tuple[float, float, int]] = field(default_factory=list)


class SequenceStays:
    """For one role. Called on the event loop's thread around each step; steps without a chunk of a prompt cost nothing.

    `tracer` is None where no spans are exported.
    """

    def __init__(
        self,
        role: str,
        recent: RecentStages,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role = role
        self._recent = recent
        self._tracer = tracer
        self._clock = clock
        self._stays: dict[SequenceKey, _Stay] = {}
        self._last_step = 0

    def arrived(self, sequence: Sequence, *, is_running: bool) -> None:
        """A sequence was queued, or joined those that run."""
        parent = sampled(sequence.trace) if self._tracer is not None else None
        context = parent.child() if parent is not None else None
        now = self._clock()
        self._stays[sequence.key] = stay = _Stay(sequence, parent, context, now, sequence.num_output)
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
        if not plan.rows or not plan.rows[0].is_prefill:
            return  # chunks stand first
        now = self._clock()
        links = []
        for row in plan.rows:
            if not row.is_prefill:
                break
            if (stay := self._stays.get(row.sequence.key)) is not None:
                stay.num_chunks += 1
                if len(stay.chunks) < MAX_CHUNKS:
                    stay.chunks.append((now - result.forward_s, now, row.num_tokens))
                if stay.context is not None:
                    links.append(stay.context)
        for output in outputs:
            stay = self._stays.get(output.sequence.key) if output.prefilled else None
            if stay is not None and stay.first_token is None:
                stay.first_token = now
        if self._tracer is not None and links:
            self._trace_step(self._tracer, plan, now - result.forward_s, now, num_running, links)

    def left(self, key: SequenceKey, finish: FinishReason | None = None) -> None:
        """A sequence is over on this worker. Unknown keys are ignored."""
        stay = self._stays.pop(key, None)
        if stay is None:
            return
        now = self._clock()
        self._recent.add(key, self._stages(stay, now))
        if self._tracer is not None and stay.context is not None:
            self._trace(self._tracer, stay, stay.context, now, finish)

    def open_stages(self, request: str) -> list[Stage]:
        """Of a request's sequences that are here now. O(sequences here)."""
        stays = [stay for key, stay in self._stays.items() if key[0] == request]
        return [each for stay in stays for each in self._stages(stay, None)]

    def _stages(self, stay: _Stay, end: float | None) -> list[Stage]:
        key, sequence = stay.sequence.key, stay.sequence
        admitted = stay.admitted if stay.admitted is not None else end
        stages = [stage(key, "queue", stay.arrived, admitted)] if stay.admitted != stay.arrived else []
        stages += [stage(key, "chunk", start, until, {"tokens": num}) for start, until, num in stay.chunks]
        num_output = sequence.num_output - stay.num_output_before
        if self._role == "decode" and stay.admitted is not None and (num_output or not stay.num_chunks):
            detail: dict[str, float | str] = {
                "tokens": num_output,
                "first_step": stay.first_step,
                "last_step": self._last_step,
                "preemptions": sequence.num_preemptions,
            }
            stages.append(stage(key, "decode", stay.first_token or stay.admitted, end, detail))
        return stages

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
        self, tracer: Tracer, stay: _Stay, context: TraceContext, now: float, finish: FinishReason | None
    ) -> None:
        sequence, key = stay.sequence, stay.sequence.key
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
        name = f"kvrelay.{self._role}"
        tracer.record(name, context, stay.parent, stay.arrived, now, kind="consumer", attributes=attributes)
        began = stay.admitted if stay.admitted is not None else now
        if began > stay.arrived:
            tracer.record("kvrelay.queue", context.child(), context, stay.arrived, began)
        if stay.num_chunks and stay.admitted is not None:
            tracer.record("kvrelay.compute", context.child(), context, stay.admitted, stay.first_token or now)
