"""Transfers between workers whose ranks hold different layers and heads of each block.

Each rank has a sender or receiver of its own over its own pool. Those of rank 0 are in this process; those of others
may be proxies, which carry calls and events to and from the rank's process. To a handoff, all ranks are one transfer.
A pair of workers with one rank each pushes whole blocks, and nothing is counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from kvrelay.handoff.transports.base import (
    BlockPush,
    Corrupted,
    Endpoint,
    Landed,
    Pushed,
    ReceiverEvent,
    SenderCounters,
    SenderDrained,
    SenderEvent,
    TransferFailed,
    TransferReceiver,
    TransferSender,
)
from kvrelay.handoff.transports.pool_memory import BlockPart, PartCopy
from kvrelay.kv.shard_map import HeadCopy, LayerCopy, ShardShape, layers_of_stage, map_heads, map_layers


@dataclass(frozen=True, slots=True)
class RankCopy:
    """A part that one rank sends to another."""

    source_rank: int
    target_rank: int
    part: PartCopy


def rank_copies(source: ShardShape, target: ShardShape, num_layers: int, head_bytes: int) -> tuple[RankCopy, ...]:
    """The parts that ranks of one worker send to ranks of another. `num_layers`: of the whole model; `head_bytes`: of
    one head's tokens in a row.

    A target rank's parts are numbered from 0 and cover its blocks without overlap. Raises ValueError if the shapes do
    not go together.
    """
    copies: list[RankCopy] = []
    numbers = [0] * target.num_ranks
    heads = map_heads(source, target)
    for layer in map_layers(source, target, num_layers):
        for head in heads:
            source_rank = source.rank_in(layer.source_stage, head.source_rank)
            target_rank = target.rank_in(layer.target_stage, head.target_rank)
            parts = (
                _part(
                    source, source_rank, (layer.source_layer, head.source_head), (layer, head), num_layers, head_bytes
                ),
                _part(
                    target, target_rank, (layer.target_layer, head.target_head), (layer, head), num_layers, head_bytes
                ),
            )
            copies.append(RankCopy(source_rank, target_rank, PartCopy(numbers[target_rank], *parts)))
            numbers[target_rank] += 1
    return tuple(copies)


def _part(
    shape: ShardShape,
    rank: int,
    first: tuple[int, int],
    copies: tuple[LayerCopy, HeadCopy],
    num_layers: int,
    head_bytes: int,
) -> BlockPart:
    """The part of a rank's blocks that begins with the layer and the head `first`."""
    (first_layer, first_head), (layer, head) = first, copies
    return BlockPart(
        block_rows=2 * len(layers_of_stage(num_layers, shape.stage_of(rank), shape.num_stages)),
        row_bytes=shape.heads_per_rank * head_bytes,
        first_row=2 * first_layer,
        num_rows=2 * layer.num_layers,
        first_byte=first_head * head_bytes,
        num_bytes=head.num_heads * head_bytes,
    )


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How a worker's blocks are divided. `num_layers` and `head_bytes`: see `rank_copies`."""

    shape: ShardShape
    num_layers: int
    head_bytes: int

    @staticmethod
    def of(shape: ShardShape, num_layers: int, layer_bytes: int) -> ShardLayout:
        """Makes one for blocks with `layer_bytes` per layer on a rank."""
        return ShardLayout(shape, num_layers, layer_bytes // 2 // shape.heads_per_rank)

    def copies_to(self, other: ShardShape) -> tuple[RankCopy, ...]:
        """What this worker's ranks send to another worker's. Raises ValueError if the shapes do not go together."""
        return _copies(self.shape, other, self.num_layers, self.head_bytes)

    def copies_from(self, other: ShardShape) -> tuple[RankCopy, ...]:
        """What another worker's ranks send to this one's. Raises ValueError if the shapes do not go together."""
        return _copies(other, self.shape, self.num_layers, self.head_bytes)


_copies = cache(rank_copies)


class ShardedSender:
    """The senders of one transport of all ranks of a worker, rank 0 first."""

    def __init__(self, ranks: Sequence[TransferSender], layout: ShardLayout) -> None:
        """Raises ValueError if there is not one sender for each rank."""
        if len(ranks) != layout.shape.num_ranks:
            raise ValueError(f"{len(ranks)} senders for {layout.shape.num_ranks} ranks")
        self.name = ranks[0].name
        self.shape = layout.shape
        self._ranks = tuple(ranks)
        self._layout = layout
        self._progress = PushProgress(len(ranks))

    @property
    def counters(self) -> list[SenderCounters]:
        """Those of all ranks."""
        return [sender.counters for sender in self._ranks]

    def _copies_to(self, num_ranks: int, num_stages: int) -> tuple[RankCopy, ...]:
        """Raises ValueError."""
        if num_stages < 1 or num_ranks % num_stages:
            raise ValueError(f"{num_ranks} ranks do not divide among {num_stages} stages")
        return self._layout.copies_to(ShardShape(num_ranks // num_stages, self.shape.num_kv_heads, num_stages))

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        self._on_event = on_event
        for sender in self._ranks:
            sender.start(self._handle)

    def push(
        self, reservation: str, endpoints: Sequence[Endpoint], copies: Sequence[BlockPush], num_stages: int = 1
    ) -> None:
        """Pushes to a worker with one rank for each endpoint, in `num_stages`. `Pushed` follows for blocks that have
        left all ranks, and one `TransferFailed` at most, also if the worker's shape does not go with this one's."""
        if len(self._ranks) == len(endpoints) == num_stages == 1:
            self._ranks[0].push(reservation, endpoints[0], copies)
            return
        try:
            parts = self._copies_to(len(endpoints), num_stages)
        except ValueError as error:
            self._on_event(TransferFailed(reservation, str(error)))
            return
        self._progress.started(reservation, (copy.index for copy in copies), len(parts))
        for each in parts:
            self._ranks[each.source_rank].push(reservation, endpoints[each.target_rank], copies, each.part)

    def abort(self, reservation: str) -> None:
        """Drops what is queued. `SenderDrained` follows when all ranks have drained."""
        if self._progress.aborted(reservation):
            for sender in self._ranks:
                sender.abort(reservation)

    def close(self) -> None:
        for sender in self._ranks:
            sender.close()

    def _handle(self, event: SenderEvent) -> None:
        if (joined := self._progress.handle(event)) is not None:
            self._on_event(joined)


class ShardedReceiver:
    """The receivers of one transport of all ranks of a worker, rank 0 first."""

    def __init__(self, ranks: Sequence[TransferReceiver], layout: ShardLayout) -> None:
        """Raises ValueError if there is not one receiver for each rank."""
        if len(ranks) != layout.shape.num_ranks:
            raise ValueError(f"{len(ranks)} receivers for {layout.shape.num_ranks} ranks")
        self.name = ranks[0].name
        self.is_one_sided = any(receiver.is_one_sided for receiver in ranks)
        self._ranks = tuple(ranks)
        self._layout = layout
        self._progress = LandingProgress(len(ranks))

    @property
    def num_stages(self) -> int:
        """For `ShardedSender.push`."""
        return self._layout.shape.num_stages

    @property
    def endpoints(self) -> list[Endpoint]:
        """Those of all ranks, for `ShardedSender.push`."""
        return [receiver.endpoint for receiver in self._ranks]

    def why_not_from(self, source: ShardShape) -> str:
        """Why nothing of a worker of this shape can be taken. Empty if it can."""
        if source.num_ranks == len(self._ranks) == 1:
            return ""
        try:
            self._layout.copies_from(source)
        except ValueError as error:
            return str(error)
        return ""

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        self._on_event = on_event
        for rank, receiver in enumerate(self._ranks):
            receiver.start(on_event if len(self._ranks) == 1 else partial(self._handle, rank))

    def admit(self, reservation: str, first_block: int, slots: Sequence[int], source: ShardShape) -> None:
        """From now on blocks of a worker of this shape may land. `Landed` follows for blocks that are whole on all
        ranks. Raises ValueError, changing nothing, if the shapes do not go together."""
        if source.num_ranks == len(self._ranks) == 1:
            self._ranks[0].admit(reservation, first_block, slots)
            return
        copies = self._layout.copies_from(source)
        self._progress.admitted(reservation, range(first_block, first_block + len(slots)))
        for rank, receiver in enumerate(self._ranks):
            parts = [each.part.target for each in copies if each.target_rank == rank]
            receiver.admit(reservation, first_block, slots, parts)

    def release(self, reservation: str) -> None:
        self._progress.released(reservation)
        for receiver in self._ranks:
            receiver.release(reservation)

    def close(self) -> None:
        for receiver in self._ranks:
            receiver.close()

    def _handle(self, rank: int, event: ReceiverEvent) -> None:
        if (joined := self._progress.handle(rank, event)) is not None:
            self._on_event(joined)


@dataclass(slots=True)
class _Pushes:
    parts_left: Counter[int] = field(default_factory=Counter)  # pushed parts per block that have not left
    num_bytes: int = 0  # sent parts of blocks that were not reported
    ranks_left: int | None = None  # that have not drained; None: not aborted
    has_failed: bool = False


class PushProgress:
    """Joins the events of `num_ranks` senders. An event of a reservation that is not known here comes through."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pushes: dict[str, _Pushes] = {}

    def started(self, reservation: str, blocks: Iterable[int], num_parts: int) -> None:
        """Each of the blocks is pushed in `num_parts` parts."""
        pushes = self._pushes.setdefault(reservation, _Pushes())
        pushes.parts_left.update(dict.fromkeys(blocks, num_parts))

    def aborted(self, reservation: str) -> bool:
        """Returns whether all ranks must now abort. False: an earlier abort has not drained yet."""
        pushes = self._pushes.setdefault(reservation, _Pushes())
        if pushes.ranks_left is not None:
            return False
        pushes.ranks_left = self._num_ranks
        return True

    def handle(self, event: SenderEvent) -> SenderEvent | None:
        """Returns the event for the handoff, if one follows from that of a rank."""
        pushes = self._pushes.get(event.reservation)
        if pushes is None:
            return event
        match event:
            case Pushed():
                return self._pushed(pushes, event)
            case TransferFailed():
                is_first, pushes.has_failed = not pushes.has_failed, True
                return event if is_first else None
            case SenderDrained():
                return self._drained(pushes, event)

    def _pushed(self, pushes: _Pushes, event: Pushed) -> Pushed | None:
        pushes.num_bytes += event.num_bytes
        pushes.parts_left.subtract(event.blocks)
        left = tuple(block for block in event.blocks if pushes.parts_left[block] <= 0)
        for block in left:
            del pushes.parts_left[block]
        if not left:
            return None
        num_bytes, pushes.num_bytes = pushes.num_bytes, 0
        if not pushes.parts_left and pushes.ranks_left is None and not pushes.has_failed:
            del self._pushes[event.reservation]
        return Pushed(event.reservation, left, num_bytes)

    def _drained(self, pushes: _Pushes, event: SenderDrained) -> SenderDrained | None:
        if pushes.ranks_left is None:
            return None  # answers an abort of an earlier time
        pushes.ranks_left -= 1
        if pushes.ranks_left > 0:
            return None
        del self._pushes[event.reservation]
        return event


class LandingProgress:
    """Joins the events of `num_ranks` receivers."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks_of: dict[str, dict[int, set[int]]] = {}  # ranks where a block landed, by reservation

    def admitted(self, reservation: str, blocks: Iterable[int]) -> None:
        """The blocks may land on all ranks."""
        self._ranks_of[reservation] = {block: set() for block in blocks}

    def released(self, reservation: str) -> None:
        """Nothing more is said of this reservation."""
        self._ranks_of.pop(reservation, None)

    def handle(self, rank: int, event: ReceiverEvent) -> ReceiverEvent | None:
        """Returns the event for the handoff, if one follows from that of a rank."""
        ranks_of = self._ranks_of.get(event.reservation)
        if ranks_of is None:
            return None
        known = [block for block in event.blocks if block in ranks_of]
        if isinstance(event, Corrupted):
            for block in known:
                ranks_of[block].discard(rank)
            return Corrupted(event.reservation, tuple(known)) if known else None
        for block in known:
            ranks_of[block].add(rank)
        whole = tuple(block for block in known if len(ranks_of[block]) == self._num_ranks)
        return Landed(event.reservation, whole) if whole else None
