"""The receiver over NIXL: senders write into the pool themselves, and this thread reads their notifications.

A write has no sender identity and cannot be refused: any process that has the endpoint may write at any moment, also
after `release`. Only the notification can be refused: a block counts as landed if its reservation is admitted, and
once. Therefore slots are not reused until the sender has reported Drained or its process has ended.

NIXL has no descriptor to wait for, so a thread polls while a reservation is open: every 0.5 ms, and every 0.2 ms while
blocks arrive. Otherwise it polls every 50 ms, until `admit` wakes it. UCX transports that copy on this side do so
during a poll.

Checksums are computed from the slots when the notification is read, so they also detect a write to a wrong slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event

from kvrelay.handoff.transports.base import Endpoint, ReceiverEvent, ended_in_time
from kvrelay.handoff.transports.nixl_agent import NixlAgent, NixlEndpoint, Region
from kvrelay.handoff.transports.pool_memory import BlockPart, PoolLike
from kvrelay.handoff.transports.receiver_thread import ReceiverThread
from kvrelay.process_identity import own_identity

BUSY_POLL_S = 0.0002
BUSY_FOR_S = 0.02
OPEN_POLL_S = 0.0005
IDLE_POLL_S = 0.05


class NixlReceiver(ReceiverThread):
    """Receives blocks into `pool`, or into a writable array that `as_pool` accepts.

    `endpoint` is valid from the construction on, before `start`. Raises ValueError for a pool of another kind, and
    TransportUnavailable if NIXL or UCX does not work.
    """

    name = "nixl"
    is_one_sided = True

    def __init__(
        self, pool: PoolLike, *, ucx_transports: str = "", ucx_devices: str = "", admission_wait_s: float = 0.0
    ) -> None:
        # The base class keeps the pool alive: others write there.
        super().__init__("kv-receiver-nixl", pool, admission_wait_s=admission_wait_s)
        region = Region.of(self._pool)
        self._agent = NixlAgent(region, ucx_transports=ucx_transports, ucx_devices=ucx_devices)
        self._endpoint = NixlEndpoint(self._agent.name, self._agent.metadata(), region, own_identity()).encode()
        self._wake = Event()

    @property
    def endpoint(self) -> Endpoint:
        return dict(self._endpoint)

    def admit(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart] = ()) -> None:
        """As the base's; notifications are asked for more often from now on."""
        super().admit(reservation, first_block, slots, parts)
        self._wake.set()

    def close(self) -> None:
        """Stops the thread and leaves UCX. Senders that do not know yet may still write until then. Idempotent.

        A thread that does not end keeps UCX with it.
        """
        if self._closed:
            return
        with self._changed:  # the thread may wait for an admission
            self._closed = True
            self._changed.notify_all()
        self._wake.set()
        if self._thread is None or ended_in_time(self._thread):
            self._agent.close()

    def _serve(self, emit: Callable[[ReceiverEvent], None]) -> None:
        busy_until = 0.0
        while not self._closed:
            notes = self._agent.notifications()
            for note in notes:
                for event in self._take(note, None):
                    emit(event)
            now = time.monotonic()
            busy_until = now + BUSY_FOR_S if notes else busy_until
            self._pause(is_busy=now < busy_until)

    def _pause(self, *, is_busy: bool) -> None:
        if len(self._permits):
            time.sleep(BUSY_POLL_S if is_busy else OPEN_POLL_S)
        else:
            self._wake.wait(IDLE_POLL_S)
            self._wake.clear()
