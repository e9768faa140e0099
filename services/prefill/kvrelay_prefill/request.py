"""What a prefill worker knows of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.engine.batch import BeamCandidates
from kvrelay.protocol.messages import Prompt
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.handoffs import HandoffTimings
from kvrelay_prefill.handoff import SenderHandoff


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One sequence on this worker. `held`: blocks that the handoff itself holds, beside the scheduler; `reservations`:
    those whose transfers are to be reported to its machine."""

    sequence: Sequence
    prompt: Prompt
    handoff: SenderHandoff
    deadline: float
    held: set[int] = field(default_factory=set)
    reservations: set[str] = field(default_factory=set)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    timings: HandoffTimings = field(default_factory=HandoffTimings)
    candidates: BeamCandidates | None = None  # that follow the prompt of a beam search
