"""Maintains a replica of the index: loads it, follows the stream, and compares it with Redis once a second.

States:

1. AWAY     Redis does not answer. The replica may be old and must not be used.
2. LOADING  A snapshot is being read, or the replica lags behind the stream.
3. CURRENT  The replica is at most `MAX_LAG_S` old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvrelay.fleet.connect import REDIS_FAILED, connect_async
from kvrelay.fleet.index.layout import MAX_BATCH_BLOCKS, NUM_BUCKETS, IndexScripts, decode_event, index_base, parse_id
from kvrelay.fleet.index.replica import IndexReplica, Ranges, ReplicaOutOfStep
from kvrelay.kv.hashing import BlockHash

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
MAX_LAG_S = 1.5
RETRY_S = 0.2
SOCKET_TIMEOUT_S = 1.0
BLOCK_MS = 250
READ_COUNT = 64

StreamId = tuple[int, int]
Entry = tuple[StreamId, bytes]


@dataclass(frozen=True, slots=True)
class IndexState:
    """All ranges at one moment. `epoch` changes if Redis was emptied."""

    epoch: str
    last_id: StreamId
    num_retired: int
    ranges: Ranges


class IndexReader:
    """Reads one model's index. Every method raises one of `REDIS_FAILED` if Redis is away."""

    def __init__(self, redis_url: str, prefix: str, model: str, *, block_ms: int | None = BLOCK_MS) -> None:
        self._block_ms = block_ms
        self._client = connect_async(redis_url, timeout_s=SOCKET_TIMEOUT_S)
        base = index_base(prefix, model)
        self._scripts = IndexScripts(self._client, base)
        self._stream = f"{base}:stream"

    async def state(self) -> IndexState:
        """The ranges and the last stream id, read atomically."""
        epoch, last_id, num_retired, ranges = await self._scripts.run("slots")
        found = {}
        for slot, holder, seq in zip(ranges[::3], ranges[1::3], ranges[2::3], strict=True):
            range_id, _, worker_id = holder.decode().partition(" ")
            found[int(slot)] = (range_id, worker_id, int(seq))
        return IndexState(epoch.decode(), parse_id(last_id), int(num_retired), found)

    async def snapshot(self, bucket: int) -> tuple[int | None, bytes]:
        """Blocks of the buckets from `bucket` on, and the next bucket (None at the end)."""
        following, piece = await self._scripts.run("snapshot", [bucket, MAX_BATCH_BLOCKS])
        return (None if following >= NUM_BUCKETS else int(following)), piece

    async def read(self, after: StreamId) -> list[Entry]:
        """The next stream entries, at most READ_COUNT; waits `block_ms` for the first (None: no wait)."""
        position = f"{after[0]}-{after[1]}"
        answer = await self._client.xread({self._stream: position}, count=READ_COUNT, block=self._block_ms)
        if not answer:
            return []
        streams = list(answer.values()) if isinstance(answer, dict) else [answer[0][1]]
        entries = streams[0][0] if isinstance(answer, dict) else streams[0]
        return [(parse_id(stream_id), fields[b"e"]) for stream_id, fields in entries]

    async def close(self) -> None:
        await self._client.aclose()


class FeedState(StrEnum):
    AWAY = "away"
    LOADING = "loading"
    CURRENT = "current"


@dataclass(slots=True)
class FeedTotals:
    """Counters since the start."""

    loads: int = 0
    events: int = 0
    resyncs: int = 0
    """Reloads because the replica missed a batch or differed from Redis."""


class IndexFeed:
    """Maintains one model's replica on one event loop."""

    def __init__(self, reader: IndexReader, *, check_interval_s: float = CHECK_INTERVAL_S) -> None:
        self.totals = FeedTotals()
        self._reader = reader
        self._check_interval_s = check_interval_s
        self._replica: IndexReplica | None = None
        self._epoch = ""
        self._position: StreamId = (0, 0)
        self._caught_up_at = 0.0
        self._is_loaded = False
        self._check: IndexState | None = None
        self._checked_at = 0.0
        self._num_retired = 0
        self._away = "not asked yet"
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """Call it on the event loop."""
        self._task = asyncio.create_task(self._run(), name="prefix-index")

    async def close(self) -> None:
        """Stops following and closes the connections. It sets a flag, since redis-py may swallow a cancellation."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._reader.close()

    @property
    def state(self) -> FeedState:
        if self._away:
            return FeedState.AWAY
        is_current = self._is_loaded and time.monotonic() - self._caught_up_at <= MAX_LAG_S
        return FeedState.CURRENT if is_current else FeedState.LOADING

    @property
    def replica(self) -> IndexReplica | None:
        """The replica, or None unless it is current."""
        return self._replica if self.state is FeedState.CURRENT else None

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Worker id to the number of leading blocks of the chain that it holds; none unless the replica is current."""
        replica = self.replica
        return replica.match(hashes) if replica is not None else {}

    def describe(self) -> dict[str, Any]:
        """State and counters as JSON types."""
        replica = self._replica
        caught_up = self._caught_up_at
        return {
            "state": str(self.state),
            "reason": self._away,
            "blocks": replica.num_blocks if replica is not None else 0,
            "held": replica.num_held if replica is not None else 0,
            "ranges": len(replica.ranges) if replica is not None else 0,
            "retired_ranges": self._num_retired,
            "stream_id": f"{self._position[0]}-{self._position[1]}",
            "age_s": round(time.monotonic() - caught_up, 3) if caught_up else None,
            "loads": self.totals.loads,
            "events": self.totals.events,
            "resyncs": self.totals.resyncs,
        }

    # -- following ----------------------------------------------------------------------------------------------------

    async def step(self) -> None:
        """One round: loads the replica if needed, checks it once a second, and applies the next stream entries.

        Raises one of `REDIS_FAILED` when Redis is away.
        """
        try:
            if not self._is_loaded:
                await self._load()
            await self._look()
            await self._follow()
        except ReplicaOutOfStep as error:
            log.info("prefix index: reloading the replica: %s", error)
            self.totals.resyncs += 1
            self._is_loaded = False

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self.step()
            except REDIS_FAILED as error:
                if not self._away:
                    log.warning("prefix index: Redis does not answer, routing uses load only: %s", error)
                self._away = str(error) or type(error).__name__
                await self._pause(RETRY_S)
            except Exception as error:
                log.exception("prefix index: following the stream failed")
                self._away, self._is_loaded = f"{type(error).__name__}: {error}", False
                await self._pause(CHECK_INTERVAL_S)

    async def _pause(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()

    def _answered(self) -> None:
        if self._away:
            log.info("prefix index: Redis answers again")
            self._away = ""

    async def _load(self) -> None:
        """Reads a snapshot in pieces. It is exact after `_follow` has replayed the stream."""
        state = await self._reader.state()
        self._answered()
        replica = IndexReplica(state.ranges)
        bucket: int | None = 0
        while bucket is not None and not self._stopping.is_set():
            bucket, piece = await self._reader.snapshot(bucket)
            replica.load(piece)
        self.totals.loads += 1
        self._replica, self._epoch, self._position = replica, state.epoch, state.last_id
        self._is_loaded, self._caught_up_at, self._check = True, 0.0, None

    async def _look(self) -> None:
        """Reads the ranges once per check interval; `_follow` compares them."""
        now = time.monotonic()
        if now - self._checked_at < self._check_interval_s and not self._away:
            return
        state = await self._reader.state()
        self._answered()
        self._checked_at = now
        self._num_retired = state.num_retired
        if self._epoch and state.epoch != self._epoch:
            raise ReplicaOutOfStep("Redis was emptied")
        self._epoch = state.epoch  # of the first worker, if there was no index before
        self._check = state

    async def _follow(self) -> None:
        """Applies the next entries of the stream."""
        entries = await self._reader.read(self._position)
        self._answered()
        for number, (stream_id, data) in enumerate(entries):
            self._compare(before=stream_id)
            self._apply(data)
            self._position = stream_id
            if number % 8 == 7:
                await asyncio.sleep(0)  # a batch takes about 1 ms
        while self._replica is not None and self._replica.clear_some():
            await asyncio.sleep(0)
        if len(entries) < READ_COUNT:
            self._compare()
            self._caught_up_at = time.monotonic()

    def _apply(self, data: bytes) -> None:
        assert self._replica is not None
        try:
            event = decode_event(data)
        except ValueError as error:
            log.warning("prefix index: %s", error)
            return
        self._replica.apply(event)
        self.totals.events += 1

    def _compare(self, before: StreamId | None = None) -> None:
        """Compares the replica with Redis' ranges once it has reached their stream id. Raises ReplicaOutOfStep."""
        check, replica = self._check, self._replica
        if check is None or replica is None or (before is not None and before <= check.last_id):
            return
        self._check = None
        if replica.ranges != check.ranges:
            raise ReplicaOutOfStep("its ranges differ from those in Redis")
