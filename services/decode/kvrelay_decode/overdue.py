"""Decides when a transfer has stalled, when missing blocks are requested again, and when a transport is taken for
broken. Time is passed in.

The latter two follow from what a pair of workers needs usually: the silence before a block that decode waited for,
smoothed with its deviation as TCP does for its retransmission timeout (RFC 6298).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.awake_clock import AwakeClock
from kvrelay.protocol.messages import PeerRef
from kvrelay_decode.receiver_events import HandoffOverdue, TransferStalled
from kvrelay_decode.request import DecodeRequest

FIRST_RESEND_S = 1.0
"""Before a pair was measured."""
SHORTEST_RESEND_S, LONGEST_RESEND_S = 0.25, 5.0
STALLED_AFTER_S = 10.0
"""If no block of a handoff has come for this long, other sequences do not wait for its prefix any more."""
ONE_SIDED_STALL_S = 5.0
"""Later than the sender, which sees each write and ends a hanging one after 3 s."""
TWO_SIDED_STALL_S = 10.0
"""ZMQ repairs a lost connection itself, and the link reports a peer that is silent."""
_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4


@dataclass(slots=True)
class PairTimes:
    """How long blocks of one prefill worker by one transport let decode wait."""

    last_landed: float = 0.0
    mean_s: float = 0.0
    deviation_s: float = 0.0
    is_measured: bool = False

    @property
    def resend_after_s(self) -> float:
        """The silence after which missing blocks are requested again."""
        if not self.is_measured:
            return FIRST_RESEND_S
        return min(max(self.mean_s + 4 * self.deviation_s, SHORTEST_RESEND_S), LONGEST_RESEND_S)

    def waited(self, silence_s: float) -> None:
        """A block came after this time without any; 0 if all blocks were there before the handoff message."""
        if not self.is_measured:
            self.mean_s, self.deviation_s, self.is_measured = silence_s, silence_s / 2, True
            return
        self.deviation_s += _DEVIATION_GAIN * (abs(silence_s - self.mean_s) - self.deviation_s)
        self.mean_s += _GAIN * (silence_s - self.mean_s)


class OverdueTransfers:
    """`is_one_sided` tells of a transport whether the sender writes into the slots itself."""

    def __init__(self, is_one_sided: Callable[[str], bool]) -> None:
        self._is_one_sided = is_one_sided
        self._clock = AwakeClock()
        self._pairs: dict[tuple[PeerRef, str], PairTimes] = {}

    def granted(self, request: DecodeRequest, now: float) -> None:
        """The sender may begin."""
        request.last_progress = self._clock.read(now)

    def has_stalled(self, request: DecodeRequest, now: float) -> bool:
        """Returns whether nothing of a handoff has come for `STALLED_AFTER_S`. Call it several times a second."""
        return self._clock.read(now) - request.last_progress > STALLED_AFTER_S

    def handed(self, request: DecodeRequest, now: float, *, is_repeated: bool) -> None:
        """The handoff message is here. To be called after the machine got it."""
        at = self._clock.read(now)
        assert request.handoff is not None
        if not is_repeated and not request.handoff.awaits_blocks:
            self._pair_of(request).waited(0.0)
        request.last_progress = request.last_request = at

    def landed(self, request: DecodeRequest, now: float) -> None:
        """A block is here, as it was sent or corrupted. To be called before the machine gets it."""
        at, pair = self._clock.read(now), self._pair_of(request)
        pair.last_landed = at
        assert request.handoff is not None
        if request.handoff.awaits_blocks:
            pair.waited(at - request.last_progress)
        request.last_progress = request.last_request = at

    def check(self, request: DecodeRequest, now: float) -> HandoffOverdue | TransferStalled | None:
        """Returns the event for a handoff whose message is here and whose blocks are not, if it is time for one. Call
        it several times a second."""
        at, handoff = self._clock.read(now), request.handoff
        if handoff is None or not handoff.awaits_blocks:
            return None
        pair = self._pair_of(request)
        silence_s = at - max(request.last_progress, pair.last_landed)
        if silence_s >= max(self._stall_s(request.transport), 2 * pair.resend_after_s):
            return TransferStalled(f"no block came by {request.transport} for {silence_s:.1f} s")
        # The time doubles: resends must not add to the load of a crowded network. It does not if prefill has answered
        # that the blocks have left and nothing of this pair is under way, so that they should be here.
        is_lost = handoff.is_answered and pair.last_landed <= request.last_request
        if at - request.last_request > pair.resend_after_s * (1 if is_lost else 2**handoff.num_silent_rounds):
            request.last_request = at
            return HandoffOverdue()
        return None

    def peer_lost(self, prefill: PeerRef) -> None:
        """Forgets what was measured with a prefill worker."""
        for pair in [pair for pair in self._pairs if pair[0] == prefill]:
            del self._pairs[pair]

    def _pair_of(self, request: DecodeRequest) -> PairTimes:
        assert request.prefill is not None
        return self._pairs.setdefault((request.prefill, request.transport), PairTimes())

    def _stall_s(self, transport: str) -> float:
        return ONE_SIDED_STALL_S if self._is_one_sided(transport) else TWO_SIDED_STALL_S
