"""Publishes a worker's cache to the index on a thread, so neither steps nor the event loop wait for Redis."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from redis.exceptions import RedisError, ResponseError

from kvrelay.fleet.connect import REDIS_AWAY, REDIS_FAILED, connect
from kvrelay.fleet.index.layout import MAX_BATCH_BLOCKS, MAX_SLOTS, IndexScripts, index_base
from kvrelay.fleet.index.publication import Apply, OpenSlot, Publication, RangeState
from kvrelay.kv.cache import CacheEvent

log = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
REFUSED_PAUSE_S = 5.0
SWEEP_PAUSE_S = 0.002
SWEEPER_TTL_MS = 3000
SWEEP_S = 0.5
"""Sweeping alternates with publishing."""
CLOSE_TIMEOUT_S = 2.0


class IndexPublisher:
    """`publish` takes events on any thread and returns at once. `worker_id` is the name that routers see.

    `incarnation` must be unique in the fleet, not only for this worker, because it identifies the owner of a slot.
    """

    def __init__(
        self,
        redis_url: str,
        prefix: str,
        model: str,
        worker_id: str,
        incarnation: str,
        *,
        ttl_s: float = 5.0,
        renew_interval_s: float = 1.0,
    ) -> None:
        self.publication = Publication(incarnation)
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._ttl_ms = int(ttl_s * 1000)
        self._renew_interval_s = renew_interval_s
        self._redis_url = redis_url
        self._base = index_base(prefix, model)
        self._client: Any = None
        self._name = secrets.token_hex(8)  # name of this sweeper
        self._events: deque[Sequence[CacheEvent]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._withdraws = True
        self._reason = ""
        self._renewed_at = 0.0
        self._pause_s = FIRST_PAUSE_S  # the next one, while Redis does not answer
        self._sweep_wanted = False
        self._thread = threading.Thread(target=self._run, name="prefix-index", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Queues cache events. Calls must follow the order of the events."""
        if events:
            self._events.append(events)
            self._wake.set()

    def abandon(self) -> None:
        """Ends the thread without withdrawing the range, as in a crash."""
        self._withdraws = False
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Withdraws the range, if Redis answers in time, and ends the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def report(self) -> dict[str, float]:
        """Counters for the worker's status, read without a lock; each single value is consistent."""
        publication = self.publication
        totals = {f"index_{name}": float(value) for name, value in asdict(publication.totals).items()}
        return totals | {
            "index_held": float(len(publication.mirror)),
            "index_pending": float(publication.num_pending),
            "index_open": float(publication.state is RangeState.OPEN),
        }

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._publish_all()
                self._say("")
            except REDIS_AWAY as error:
                self._say(f"Redis does not answer: {error}")
                self._pause(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            except ResponseError as error:
                # Redis is out of memory or read-only, or a script failed half-way: the range may be damaged.
                self._say(f"Redis refused: {error}")
                self.publication.lost()
                self._pause(LONGEST_PAUSE_S)
            except RedisError as error:
                self._say(f"Redis failed: {error}")
                self._pause(LONGEST_PAUSE_S)
            except Exception:
                log.exception("publishing to the prefix index failed")
                self.publication.lost()
                self._pause(LONGEST_PAUSE_S)
        self._withdraw()

    def _connect(self) -> None:
        """Connects on the thread, because a Cluster client asks for its nodes at once and may block."""
        if self._client is None:
            self._client = connect(self._redis_url, timeout_s=SOCKET_TIMEOUT_S)
            self._scripts = IndexScripts(self._client, self._base)

    def _publish_all(self) -> None:
        """Sends events and renews the lease until stopped or until a call fails."""
        self._connect()
        while not self._stopping:
            self._wake.clear()
            self._absorb()
            now = time.monotonic()
            call = self.publication.next_call(renew=now - self._renewed_at >= self._renew_interval_s)
            if call is not None:
                self._do(call, now)
                self._pause_s = FIRST_PAUSE_S
                self._say("")
            elif self.publication.state is RangeState.REFUSED:
                self._pause(REFUSED_PAUSE_S)
                self.publication.try_again()
            elif self._sweep_wanted:
                self._sweep()
            else:
                self._wake.wait(max(0.0, self._renewed_at + self._renew_interval_s - now))

    def _do(self, call: OpenSlot | Apply, now: float) -> None:
        if isinstance(call, OpenSlot):
            self._open(call)
            return
        arguments = [call.slot, call.range_id, call.seq, self._ttl_ms, call.operations, call.event]
        answer = bytes(self._scripts.run("apply", arguments))
        if answer in (b"OK", b"SWEEP"):
            self._sweep_wanted = self._sweep_wanted or answer == b"SWEEP"
            self.publication.applied()
            if not call.operations:
                self._renewed_at = now
        else:
            log.info("prefix index: Redis answered %s at batch %d, republishing the range", answer.decode(), call.seq)
            self.publication.lost()

    def _open(self, call: OpenSlot) -> None:
        arguments = [self._worker_id, self._incarnation, call.range_id, self._ttl_ms, MAX_SLOTS]
        slot = int(self._scripts.run("open", arguments))
        if slot >= 0:
            self.publication.opened(slot)
            self._sweep_wanted = True  # an earlier range may have been retired
        elif slot == -2:
            log.warning("prefix index: a later incarnation of worker %s publishes, this one does not", self._worker_id)
            self.publication.refused()
        else:
            self._sweep()
            self._pause(FIRST_PAUSE_S)

    def _sweep(self) -> None:
        """Clears retired ranges piece by piece for a short time; the fleet has one sweeper at a time."""
        until = time.monotonic() + SWEEP_S
        self._sweep_wanted = False
        while not self._stopping and not self._events and time.monotonic() < until:
            left = int(self._scripts.run("sweep", [self._name, SWEEPER_TTL_MS, MAX_BATCH_BLOCKS]))
            if left <= 0:
                return
            self._sweep_wanted = True
            time.sleep(SWEEP_PAUSE_S)

    def _absorb(self) -> None:
        while self._events:
            self.publication.absorb(self._events.popleft())

    def _pause(self, pause_s: float) -> None:
        """Waits, but takes over events meanwhile so that the queue remains bounded."""
        until = time.monotonic() + pause_s
        while not self._stopping and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()
            self._absorb()

    def _withdraw(self) -> None:
        publication = self.publication
        try:
            if self._withdraws and publication.state is RangeState.OPEN:
                self._scripts.run("close", [publication.slot, publication.range_id])
        except REDIS_FAILED as error:
            log.info("prefix index: the range remains until its lease expires: %s", error)
        finally:
            if self._client is not None:
                self._client.close()

    def _say(self, reason: str) -> None:
        """Logs a change of the connection state once."""
        if bool(reason) != bool(self._reason):
            if reason:
                log.warning("prefix index: not publishing: %s", reason)
            else:
                log.info("prefix index: publishing again")
        self._reason = reason
