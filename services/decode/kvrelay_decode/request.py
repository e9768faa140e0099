"""One sequence on a decode worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.protocol.messages import PeerRef, Shards
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.handoffs import HandoffTimings
from kvrelay.worker.score_parts import ScoreParts
from kvrelay_decode.receiver_events import ReceiverHandoffEvent, ReceiverInstruction
from kvrelay_decode.receiver_handoff import ReceiverHandoff, ReceiverState


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """`handoff` and the fields of its sender are for a sequence that prefill hands over, not for a local prompt."""

    sequence: Sequence
    deadline: float
    handoff: ReceiverHandoff | None = None
    handle: Callable[[ReceiverHandoffEvent], list[ReceiverInstruction]] | None = None  # feeds `handoff`
    prefill: PeerRef | None = None
    processes: tuple[str, ...] = ()  # of the prefill worker's ranks, see `kvrelay.process_identity`
    transport: str = ""
    shards: Shards = field(default_factory=Shards)  # ranks of the prefill worker
    last_progress: float = 0.0  # the grant, or the last block or handoff message, by the clock of `OverdueTransfers`
    last_request: float = 0.0  # or the last resend request, whichever is later
    first_index: int = 0  # output index of the first token of this attempt
    scores: ScoreParts | None = None  # if log-probabilities of the prompt are asked for
    timings: HandoffTimings = field(default_factory=HandoffTimings)

    @property
    def is_quarantined(self) -> bool:
        """Returns whether the handoff has ended, but its sender may still write into its blocks."""
        return self.handoff is not None and self.handoff.state is ReceiverState.QUARANTINED

    @property
    def is_deferred(self) -> bool:
        """Returns whether the handoff waits for its reservation and holds nothing."""
        return self.handoff is not None and self.handoff.state is ReceiverState.ASKED
