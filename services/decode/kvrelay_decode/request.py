"""One sequence on a decode worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.handoffs import HandoffTimings
from kvrelay_decode.receiver_events import ReceiverHandoffEvent, ReceiverInstruction
from kvrelay_decode.receiver_handoff import ReceiverHandoff, ReceiverState


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One sequence on this worker: a wish, a reservation, or running. `handoff` is None for a local prompt."""

    sequence: Sequence
    deadline: float
    handoff: ReceiverHandoff | None = None
    handle: Callable[[ReceiverHandoffEvent], list[ReceiverInstruction]] | None = None  # the handoff's, may be recorded
    prefill: PeerRef | None = None
    process: str = ""  # of the prefill worker
    transport: str = ""
    last_progress: float = 0.0
    first_index: int = 0  # of the first token that this attempt sends
    num_siblings: int = 0  # samples of the request that its sender is to hand over besides
    arrival: int = 0  # counts up; who came first is served first
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    timings: HandoffTimings = field(default_factory=HandoffTimings)

    @property
    def is_quarantined(self) -> bool:
        """Given up, and its slots may still be written."""
        return self.handoff is not None and self.handoff.state is ReceiverState.QUARANTINED

    @property
    def is_received(self) -> bool:
        """On its way here: it will be committed, or end."""
        return self.handoff is not None and self.handoff.state in (ReceiverState.RESERVED, ReceiverState.FILLING)
