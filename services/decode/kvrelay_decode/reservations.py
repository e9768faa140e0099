"""Slots that are granted to prefill workers: their reservations' names, the transports that fill them, and how much of
the pool each sender may write into."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from kvrelay.protocol.messages import Granted, PeerRef
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.transfer.base import ReceiverEvent, TransferReceiver
from kvrelay_decode.shares import Shares

log = logging.getLogger(__name__)


class Reservations:
    """Of one start of a worker, its `incarnation`. `receivers`: its transports by name."""

    def __init__(self, receivers: dict[str, TransferReceiver], num_pool_blocks: int, incarnation: str) -> None:
        self._receivers = receivers
        self._shares = Shares(num_pool_blocks)
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        self._keys: dict[str, SequenceKey] = {}
        self._pairs: dict[PeerRef, str] = {}  # the transport that was last taken with a prefill worker

    @property
    def num_one_sided(self) -> int:
        """Sequences whose slots a sender may write into without asking."""
        return len(self._shares)

    def start(self, on_transfer: Callable[[ReceiverEvent], None]) -> None:
        """The event loop runs: blocks may land."""
        for receiver in self._receivers.values():
            receiver.start(on_transfer)

    def close(self) -> None:
        """Stops the transports."""
        for receiver in self._receivers.values():
            receiver.close()

    # -- before a grant -----------------------------------------------------------------------------------------------

    def why_none_in_common(self, offered: list[str]) -> str:
        """Empty where one of the sender's transports is here, too."""
        if any(name in self._receivers for name in offered):
            return ""
        return f"no common transport: {offered} offered, {list(self._receivers)} here"

    def choose_transport(self, prefill: PeerRef, offered: list[str]) -> str:
        """The sender's best that is here too; logged when it is the pair's first, or another one than before."""
        taken = next(name for name in offered if name in self._receivers)
        if self._pairs.get(prefill) != taken:
            self._pairs[prefill] = taken
            log.info(
                "KV blocks of %s come by %s: it offers %s, and %s can be taken here",
                prefill.peer_id,
                taken,
                ", ".join(offered),
                ", ".join(self._receivers),
            )
        return taken

    def is_within_share(self, prefill: PeerRef, transport: str, num_blocks: int) -> bool:
        """Whether the sender may get so many blocks more. Where it asks for each write, it may always."""
        return not self.needs_quarantine(transport) or self._shares.allows(prefill, num_blocks)

    def needs_quarantine(self, transport: str) -> bool:
        """Whether its writes cannot be refused, so that a slot given up is not safe before the sender says so."""
        return self._receivers[transport].needs_quarantine

    # -- grants -------------------------------------------------------------------------------------------------------

    def name(self, key: SequenceKey) -> str:
        """A new reservation, of this sequence until it is forgotten."""
        reservation = f"{self._incarnation}-{next(self._numbers)}"
        self._keys[reservation] = key
        return reservation

    def key_of(self, reservation: str) -> SequenceKey | None:
        """Whose it is."""
        return self._keys.get(reservation)

    def open(self, reservation: str, prefill: PeerRef, transport: str, first_block: int, slots: list[int]) -> Granted:
        """From now on the sender's blocks are taken into these slots. Returns what to tell it."""
        receiver = self._receivers[transport]
        if receiver.needs_quarantine:
            self._shares.granted(self._keys[reservation], prefill, len(slots))
        receiver.admit(reservation, first_block, slots)
        return Granted(
            reservation=reservation,
            first_block=first_block,
            slots=slots,
            transport=transport,
            endpoint=receiver.endpoint,
        )

    def stop(self, reservation: str, transport: str) -> None:
        """Nothing more is taken for it, as far as the transport can refuse."""
        self._receivers[transport].release(reservation)

    def settled(self, key: SequenceKey) -> None:
        """Nothing is written for this sequence any more. One that has no reservation is fine."""
        self._shares.settled(key)

    def forget(self, reservation: str) -> None:
        """What its transport reports is nobody's any more."""
        self._keys.pop(reservation, None)

    def peer_lost(self, prefill: PeerRef) -> None:
        """The next pair with a worker of this name may take another transport."""
        self._pairs.pop(prefill, None)
