"""One sequence on a prefill worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.protocol.messages import Prompt
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import BeamCandidates
from kvrelay.telemetry.handoffs import HandoffTimings
from kvrelay.worker.score_parts import ScoreParts
from kvrelay_prefill.sender_events import SenderHandoffEvent, SenderInstruction
from kvrelay_prefill.sender_handoff import SenderHandoff


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """`handle` is the handoff machine's, recorded if an event log is kept. `held` are the blocks that the handoff holds
    beside the scheduler; `reservations` are those whose transfers are reported to the machine.
    """

    sequence: Sequence
    prompt: Prompt
    handoff: SenderHandoff
    handle: Callable[[SenderHandoffEvent], list[SenderInstruction]]
    deadline: float
    held: set[int] = field(default_factory=set)
    reservations: set[str] = field(default_factory=set)
    scores: ScoreParts | None = None  # if log-probabilities of the prompt are asked for
    timings: HandoffTimings = field(default_factory=HandoffTimings)
    candidates: BeamCandidates | None = None  # that follow the prompt of a beam search
