"""Reads the index for routers: ranges, snapshot pieces and the stream."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.fleet.connect import connect_async
from kvrelay.fleet.index.layout import MAX_BATCH_BLOCKS, NUM_BUCKETS, index_base, parse_id
from kvrelay.fleet.index.replica import Ranges
from kvrelay.fleet.index.scripts import IndexScripts

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
