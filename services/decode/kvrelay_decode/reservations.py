"""Reservations: their names, and the transports that write the KV of each into the pool."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping

from kvrelay.handoff.transports.base import ReceiverEvent, TransferReceiver
from kvrelay.handoff.transports.sharded import ShardedReceiver
from kvrelay.kv.shard_map import ShardShape
from kvrelay.protocol.messages import Granted, PeerRef, Shards
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.transfers import as_sharded_receiver
from kvrelay.step.batch import ModelSpec

log = logging.getLogger(__name__)


class Reservations:
    """`receivers`: the worker's transports by name, of its pool or of all ranks. `incarnation`: the worker's, which
    makes the names unique."""

    def __init__(
        self, receivers: Mapping[str, TransferReceiver | ShardedReceiver], incarnation: str, spec: ModelSpec
    ) -> None:
        self._receivers = {name: as_sharded_receiver(receiver, spec) for name, receiver in receivers.items()}
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        self._keys: dict[str, SequenceKey] = {}
        self._last_transports: dict[PeerRef, str] = {}  # that each prefill worker used

    def start(self, on_transfer: Callable[[ReceiverEvent], None]) -> None:
        """Starts the transports. Needs a running event loop."""
        for receiver in self._receivers.values():
            receiver.start(on_transfer)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()

    # -- the choice of a transport ------------------------------------------------------------------------------------

    def why_none_in_common(self, offered: list[str], shards: Shards) -> str:
        """Why a sender with these transports and ranks cannot write here. Empty if it can."""
        found = next((self._receivers[name] for name in offered if name in self._receivers), None)
        if found is not None:
            return found.why_not_from(_shape_of(shards))
        return f"no common transport: {offered} offered, {list(self._receivers)} here"

    def choose_transport(self, prefill: PeerRef, offered: list[str]) -> str:
        """The first of the sender's transports that is available here. Logs the first choice and every change."""
        chosen = next(name for name in offered if name in self._receivers)
        if self._last_transports.get(prefill) != chosen:
            self._last_transports[prefill] = chosen
            log.info(
                "KV blocks of %s come by %s: it offers %s, and %s can be taken here",
                prefill.peer_id,
                chosen,
                ", ".join(offered),
                ", ".join(self._receivers),
            )
        return chosen

    def is_one_sided(self, transport: str) -> bool:
        """Whether a sender writes into the slots itself: this worker cannot refuse a write, so slots of a cancelled
        reservation are unsafe until the sender says that it has stopped."""
        return self._receivers[transport].is_one_sided

    # -- reservations -------------------------------------------------------------------------------------------------

    def key_of(self, reservation: str) -> SequenceKey | None:
        """The sequence that a reservation is for; None after `forget`."""
        return self._keys.get(reservation)

    def open(self, key: SequenceKey, transport: str, first_block: int, slots: list[int], shards: Shards) -> Granted:
        """Makes a reservation for a sequence: a sender with these ranks may write its blocks from `first_block` on into
        `slots`. Returns the message to the sender."""
        reservation = f"{self._incarnation}-{next(self._numbers)}"
        self._keys[reservation] = key
        receiver = self._receivers[transport]
        receiver.admit(reservation, first_block, slots, _shape_of(shards))
        endpoint, *rank_endpoints = receiver.endpoints
        return Granted(
            reservation=reservation,
            first_block=first_block,
            slots=slots,
            transport=transport,
            endpoint=endpoint,
            rank_endpoints=rank_endpoints,
            num_stages=receiver.num_stages,
        )

    def stop(self, reservation: str, transport: str) -> None:
        """Refuses further writes, if the transport can."""
        self._receivers[transport].release(reservation)

    def forget(self, reservation: str) -> None:
        """Ignores what its transport still reports."""
        self._keys.pop(reservation, None)

    def peer_lost(self, prefill: PeerRef) -> None:
        """The next worker of this name may use another transport."""
        self._last_transports.pop(prefill, None)


def _shape_of(shards: Shards) -> ShardShape:
    return ShardShape(shards.size, shards.num_kv_heads, shards.num_stages)
