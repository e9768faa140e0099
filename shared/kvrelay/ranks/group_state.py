"""What the engine knows of the other ranks. Pure: messages, exits and times go in, a phase or a failure comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvrelay.ranks.messages import Done, Hello, PoolFacts, Progress, Pushed, RankAlive, RankFailed, Ready, Software
from kvrelay.ranks.transfer_messages import TransferReport


class Phase(StrEnum):
    """The phases of a group in their order. It may fail in each of them, which is final."""

    JOINING = "joining"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True)
class _Rank:
    """A rank that has joined."""

    process: str
    where: str
    heard_at: float
    facts: PoolFacts | None = None
    endpoints: dict[str, dict[str, str]] = field(default_factory=dict)
    identity: str = ""
    num_done: int = 0  # number of the last published message that it has ended
    busy_s: float = 0.0  # of all steps
    step_s: dict[int, float] = field(default_factory=dict)  # of each step, until it is asked for


class GroupState:
    """The ranks 1 to `size` - 1 of a group. Times are those of one monotonic clock, in seconds."""

    def __init__(
        self, group: str, size: int, software: Software, *, join_by: float, join_s: float, silence_s: float
    ) -> None:
        self.phase = Phase.JOINING
        self.failure = ""
        """The first error, for the user. Set in the phase FAILED."""
        self.step_error = ""
        """The latest error of a step that left the ranks in step."""
        self._group = group
        self._size = size
        self._software = software
        self._join_by = join_by
        self._join_s = join_s
        self._silence_s = silence_s
        self._ranks: dict[int, _Rank] = {}
        self._own: PoolFacts | None = None

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined."""
        return [rank for rank in range(1, self._size) if rank not in self._ranks]

    @property
    def num_done(self) -> int:
        """All ranks have ended what was published up to this number."""
        return min((rank.num_done for rank in self._ranks.values()), default=0)

    @property
    def busy_s(self) -> list[float]:
        """Seconds that each rank computed steps, from rank 1 on."""
        return [rank.busy_s for _, rank in sorted(self._ranks.items())]

    def take_step_s(self, number: int) -> float:
        """The longest time that a rank computed a step which all have ended."""
        return max((rank.step_s.pop(number, 0.0) for rank in self._ranks.values()), default=0.0)

    def has_joined(self, rank: int, process: str) -> bool:
        """Whether this process is a rank of the group."""
        known = self._ranks.get(rank)
        return known is not None and known.process == process

    def endpoints_of(self, rank: int) -> dict[str, dict[str, str]]:
        """The addresses of a rank's transports by name. That of a sender is empty."""
        return self._ranks[rank].endpoints

    @property
    def identities(self) -> list[str]:
        """The processes of the ranks, from rank 1 on. See `kvrelay.process_identity`."""
        return [rank.identity for _, rank in sorted(self._ranks.items())]

    def fail(self, reason: str) -> None:
        """Ends the group. Only the first reason counts: the others follow from it."""
        if self.phase is not Phase.FAILED:
            self.phase, self.failure = Phase.FAILED, reason

    def on_message(self, message: Pushed, now: float) -> None:
        """Takes a rank's message. Those of processes that have not joined are ignored."""
        if isinstance(message, Hello):
            self._on_hello(message, now)
            return
        rank = self._ranks.get(message.rank)
        if rank is None or rank.process != message.process:
            return
        rank.heard_at = now
        match message:
            case Done():
                rank.num_done = message.number
                rank.step_s[message.number] = message.seconds
                rank.busy_s += message.seconds
                self.step_error = f"rank {message.rank}: {message.error}" if message.error else self.step_error
            case Ready():
                rank.facts, rank.endpoints, rank.identity = message.facts, message.endpoints, message.identity
                self._compare()
            case RankFailed():
                self.fail(f"rank {message.rank} ({rank.where}) failed: {message.reason}")
            case Progress() | RankAlive() | TransferReport():
                pass

    def on_own_facts(self, facts: PoolFacts) -> None:
        """Rank 0 has loaded its part."""
        self._own = facts
        self._compare()

    def on_exit(self, rank: int, how: str) -> None:
        """The process of a rank on this machine has ended, for example `was killed by SIGKILL`."""
        what = {Phase.JOINING: " before it joined", Phase.LOADING: " while it loaded"}.get(self.phase, "")
        self.fail(f"rank {rank} {how}{what}")

    def on_tick(self, now: float) -> None:
        """Fails if a rank is late or silent."""
        if self.phase is Phase.JOINING and now > self._join_by:
            which = ", ".join(map(str, self.missing))
            self.fail(
                f"{'ranks' if len(self.missing) > 1 else 'rank'} {which} of {self._size} did not join within "
                f"{self._join_s:g} s (rank_timeout_s)"
            )
        for number, rank in self._ranks.items():
            if now - rank.heard_at > self._silence_s:
                self.fail(f"rank {number} ({rank.where}) has been silent for {self._silence_s:g} s")

    def _on_hello(self, hello: Hello, now: float) -> None:
        known = self._ranks.get(hello.rank)
        if known is not None and known.process == hello.process:
            return
        if self.phase is not Phase.JOINING or hello.group != self._group:
            return  # a process of another group, or a late one: it ends after its own timeout
        if not 1 <= hello.rank < self._size:
            self.fail(
                f"{hello.where} joined as rank {hello.rank} of {self._size} (allowed: 1 to {self._size - 1}; rank 0 is "
                f"the engine)"
            )
        elif known is not None:
            self.fail(f"rank {hello.rank} joined twice, from {known.where} and from {hello.where}")
        elif hello.software != self._software:
            self.fail(
                f"rank {hello.rank} ({hello.where}) runs {hello.software}, and rank 0 runs {self._software}: install "
                f"the same versions"
            )
        else:
            self._ranks[hello.rank] = _Rank(hello.process, hello.where, now)
            if not self.missing:
                self.phase = Phase.LOADING

    def _compare(self) -> None:
        """Goes on to READY if all ranks have loaded the same."""
        if self._own is None or self.phase is not Phase.LOADING:
            return
        own = msgspec.structs.asdict(self._own)
        for number, rank in self._ranks.items():
            if rank.facts is None:
                return
            theirs = msgspec.structs.asdict(rank.facts)
            differing = [name for name in own if own[name] != theirs[name]]
            if differing:
                values = "; ".join(f"{name} {theirs[name]} instead of {own[name]}" for name in differing)
                self.fail(f"rank {number} ({rank.where}) loaded another model or pool than rank 0: {values}")
                return
        self.phase = Phase.READY
