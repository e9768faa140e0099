"""A state of the world that is searched: what routers, workers, links and transport hold, and how it is changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

from kvrelay.handoff.quarantine import Quarantine
from kvrelay.handoff.receiver import ReceiverHandoff
from kvrelay.handoff.sender import SenderHandoff
from kvrelay.handoff.transports.sharded import LandingProgress, PushProgress, rank_copies
from kvrelay.kv.shard_map import ShardShape
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sequence_key import SequenceKey
from tests.unit.dispatch.driven_sequence import DrivenSequence
from tests.unit.handoff.check.values import clone

R = "r"
MAX_TOKENS = 2
Write = tuple[str, str, str, int, int, int]  # prefill, decode, reservation, block, slot, number of the part
Part = tuple[int, int]  # a block's number and that of one of its parts


@dataclass(frozen=True)
class Size:
    """An instance. `budget`: how often each disturbance may happen. `samples`: its requests are samples of one, which
    decode workers are sent one prompt for. `ranks`: of a prefill and of a decode worker, with one KV head for each rank
    of the larger one.
    """

    num_requests: int = 1
    prefills: tuple[str, ...] = ("p",)
    decodes: tuple[str, ...] = ("d",)
    num_blocks: int = 2
    prefill_pool: int = 2
    decode_pool: int = 2
    max_attempts: int = 2
    one_sided: bool = True
    samples: bool = False
    budget: tuple[tuple[str, int], ...] = ()
    ranks: tuple[int, int] = (1, 1)

    @property
    def has_ranks(self) -> bool:
        return self.ranks != (1, 1)

    @property
    def routes(self) -> tuple[tuple[int, int], ...]:
        """The rank that sends each part of a block, and the rank that takes it."""
        return _routes(*self.ranks)

    def source_rank(self, write: Write) -> int:
        return self.routes[write[5]][0]

    def parts_of(self, blocks: Iterable[int]) -> frozenset[Part]:
        return frozenset((block, number) for block in blocks for number in range(len(self.routes)))


@cache
def _routes(num_sources: int, num_targets: int) -> tuple[tuple[int, int], ...]:
    num_heads = max(num_sources, num_targets)
    copies = rank_copies(ShardShape(num_sources, num_heads), ShardShape(num_targets, num_heads), 1, 1)
    return tuple((copy.source_rank, copy.target_rank) for copy in copies)


@dataclass
class Sending:
    """A sequence on a prefill worker. `own`: its blocks, none before it was admitted."""

    machine: SenderHandoff
    num_output: int
    own: tuple[int, ...] = ()
    num_computed: int = 0
    aborting: frozenset[tuple[str, int]] = frozenset()  # reservations, on ranks


@dataclass
class Receiving:
    """A sequence on a decode worker. `machine` is None for a local prompt."""

    machine: ReceiverHandoff | None
    prefill: str
    num_output: int
    slots: tuple[int, ...] = ()
    landed: frozenset[Part] = frozenset()
    running: bool = False


def peer(name: str) -> PeerRef:
    return PeerRef(name, "1", name)


@dataclass
class State:
    """All that is. It is changed only after `copy`; machines only after `sending` or `receiving`."""

    size: Size
    attempts: dict[str, DrivenSequence]
    senders: dict[str, dict[SequenceKey, Sending]]
    receivers: dict[str, dict[SequenceKey, Receiving]]
    quarantines: dict[str, Quarantine]
    pushes: dict[str, PushProgress]
    landings: dict[str, LandingProgress]
    budget: dict[str, int]
    wishes: dict[str, Any] = field(default_factory=dict)  # of the router: placements to be found
    ended: dict[str, int] = field(default_factory=dict)
    buried: dict[str, frozenset[SequenceKey]] = field(default_factory=dict)
    links: dict[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    void: frozenset[tuple[str, str]] = frozenset()  # directions whose link the other end has dropped
    unaware: frozenset[tuple[str, str]] = frozenset()  # (who, of whose death) has not been told
    lost: frozenset[str] = frozenset()  # workers that the router does not use
    dead: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    writes: frozenset[Write] = frozenset()
    granted: int = 0

    def copy(self) -> Self:
        return replace(
            self,
            attempts=dict(self.attempts),
            senders={who: dict(all_) for who, all_ in self.senders.items()},
            receivers={who: dict(all_) for who, all_ in self.receivers.items()},
            quarantines=dict(self.quarantines),
            pushes=dict(self.pushes),
            landings=dict(self.landings),
            budget=dict(self.budget),
            wishes=dict(self.wishes),
            ended=dict(self.ended),
            buried=dict(self.buried),
            links=dict(self.links),
        )

    def sending(self, who: str, key: SequenceKey) -> Sending:
        old = self.senders[who][key]
        made = self.senders[who][key] = replace(old, machine=clone(old.machine))
        return made

    def receiving(self, who: str, key: SequenceKey) -> Receiving:
        old = self.receivers[who][key]
        made = replace(old, machine=clone(old.machine) if old.machine is not None else None)
        self.receivers[who][key] = made
        return made

    def pushing(self, who: str) -> PushProgress:
        made = self.pushes[who] = clone(self.pushes[who])
        return made

    def landing(self, who: str) -> LandingProgress:
        made = self.landings[who] = clone(self.landings[who])
        return made

    def free(self, who: str) -> list[int]:
        if who in self.senders:
            held = {block for s in self.senders[who].values() for block in s.own}
            return [block for block in range(self.size.prefill_pool) if block not in held]
        held = {block for r in self.receivers[who].values() for block in r.slots}
        return [block for block in range(self.size.decode_pool) if block not in held]

    def post(self, source: str, to: str, *message: Any) -> None:
        if (source, to) in self.void or to in self.dead:
            return
        self.links[source, to] = (*self.links.get((source, to), ()), message)
