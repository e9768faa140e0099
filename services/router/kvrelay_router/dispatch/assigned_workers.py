"""The workers that one attempt rests on: P and D, and what became of decode workers that P could not hand over to."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.protocol.messages import PeerRef
from kvrelay_router.dispatch.events import DecodeNeeded
from kvrelay_router.dispatch.load import WorkerKey, worker_key


@dataclass(slots=True)
class AssignedWorkers:
    """Of one sequence's current attempt; D's are found and left within it, while P keeps the K/V."""

    prefill: PeerRef | None = None
    decode: PeerRef | None = None
    former: list[PeerRef] = field(default_factory=list)  # decode workers that were replaced within this attempt
    excluded: set[WorkerKey] = field(default_factory=set)  # starts of workers that cannot decode this attempt
    decode_wanted: bool = False  # FindDecode is out
    gave_up: bool = False  # P was told that there is no decode worker, and will answer Failed
    came_back: bool = False  # with `gave_up`: those that P could not reach are there again

    def present(self) -> list[PeerRef]:
        """P and D, as far as there are any."""
        return [leg for leg in (self.prefill, self.decode) if leg is not None]

    def is_prefill(self, worker: PeerRef) -> bool:
        """Whether it is P, of this incarnation."""
        return _same(worker, self.prefill)

    def is_decode(self, worker: PeerRef) -> bool:
        """Whether it is D, of this incarnation."""
        return _same(worker, self.decode)

    def is_former(self, worker: PeerRef) -> bool:
        """Whether it was D, and was replaced."""
        return any(_same(worker, former) for former in self.former)

    def lacks_decode(self, event: DecodeNeeded) -> bool:
        """Whether the worker that P says it cannot hand over to is D."""
        if self.decode is None:
            return False
        return self.decode.peer_id in event.excluded if event.lacks is None else self.is_decode(event.lacks)

    def leave(self, decode: PeerRef) -> None:
        """D cannot have the sequence: another one is wanted."""
        self.excluded.add(worker_key(decode))
        self.former.append(decode)
        self.decode_wanted = True

    def choose(self, decode: PeerRef | None, *, came_back: bool) -> None:
        """The one that was wanted; None: there is none."""
        self.decode_wanted = False
        self.decode = decode
        self.gave_up = decode is None
        self.came_back = came_back


def _same(worker: PeerRef, leg: PeerRef | None) -> bool:
    return leg is not None and worker.peer_id == leg.peer_id and worker.incarnation == leg.incarnation
