"""The prefill and decode worker of one attempt, and the decode workers that were replaced during it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.protocol.messages import NeedDecode, PeerRef
from kvrelay_router.fleet.load import WorkerKey, worker_key


@dataclass(slots=True)
class AssignedWorkers:
    """Decode can change during an attempt, while prefill keeps the KV. A new prefill worker means a new attempt."""

    prefill: PeerRef | None = None
    decode: PeerRef | None = None
    replaced: list[PeerRef] = field(default_factory=list)  # earlier decode workers of this attempt
    excluded: set[WorkerKey] = field(default_factory=set)  # incarnations that cannot decode this attempt
    awaits_decode: bool = False  # FindDecode was returned and DecodeChosen has not come yet
    has_no_decode: bool = False  # prefill was sent Reassign(None) and will answer with Failed
    decode_returned: bool = False  # only with `has_no_decode`: the unreachable decode workers are ready again

    def present(self) -> list[PeerRef]:
        """Returns the prefill and the decode worker, without those that are None."""
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    def is_prefill(self, worker: PeerRef) -> bool:
        """Compares id and incarnation."""
        return is_same(worker, self.prefill)

    def is_decode(self, worker: PeerRef) -> bool:
        """Compares id and incarnation."""
        return is_same(worker, self.decode)

    def was_decode(self, worker: PeerRef) -> bool:
        """Returns whether this worker decoded the attempt before another one replaced it."""
        return any(is_same(worker, replaced) for replaced in self.replaced)

    def lacks_decode(self, need: NeedDecode) -> bool:
        """Returns whether prefill cannot hand over to the present decode worker, or only to an earlier one."""
        if self.decode is None:
            return False
        return self.decode.peer_id in need.excluded if need.lacks is None else self.is_decode(need.lacks)

    def exclude_decode(self, decode: PeerRef) -> None:
        """Marks the present decode worker as replaced. `choose_decode` must follow."""
        self.excluded.add(worker_key(decode))
        self.replaced.append(decode)
        self.decode = None  # it gets a Cancel: its late messages must not count while another worker is awaited
        self.awaits_decode = True

    def choose_decode(self, decode: PeerRef | None, *, returned: bool) -> None:
        """Sets the new decode worker, or None if there is none."""
        self.awaits_decode = False
        self.decode = decode
        self.has_no_decode = decode is None
        self.decode_returned = returned


def is_same(worker: PeerRef, assigned: PeerRef | None) -> bool:
    return assigned is not None and worker.peer_id == assigned.peer_id and worker.incarnation == assigned.incarnation
