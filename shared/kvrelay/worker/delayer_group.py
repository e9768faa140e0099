"""The workers that delay prompts together: the loads they exchange, and which members count.

Each worker is a process of its own. They do not step together, and no worker waits for another: a pass is decided with
the loads known at that moment.

- A worker sends its four integers at once when a prompt comes or goes, and otherwise with a heartbeat several times a
  second while it has anything to do.
- A member that is silent for `silence_s` is left out, so that a dead or unreachable member holds up no prompt.
- An idle member is left out too: no prompt elsewhere could disturb it, and it has no prompt to admit at the same time.
- A member's prompt is often admitted, and its next load sent, before another member's next pass. So a worker that
  holds prompts back keeps a load with a prompt until its own next pass, and at least for `KEPT_S`: this is the load it
  waited for, and loads do not arrive in the same order everywhere.

Members are found in the registry. A member that sends a load before it is found there counts as well. Without Redis
the last known members remain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from kvrelay.fleet.worker_record import WorkerRecord
from kvrelay.fleet.worker_registry import Registry, RegistryError
from kvrelay.protocol.messages import GroupLoad, PeerRef
from kvrelay.scheduling.queue.prefill_delay import RankLoad

log = logging.getLogger(__name__)

KEPT_S = 0.05
IDLE = RankLoad(0, 0, 0, 0)


@dataclass(slots=True)
class _Member:
    peer: PeerRef
    load: RankLoad = IDLE
    heard_at: float = 0.0
    kept: RankLoad | None = None  # its latest load that had a prompt and that no pass here has used yet
    kept_at: float = 0.0


class DelayerGroup:
    """One worker's side of the group `name`. Implements `GroupExchange`. No method waits.

    `send` is the messenger's. `on_news` is called when news arrives that may end a delay here.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[PeerRef, GroupLoad], None],
        on_news: Callable[[], None],
        *,
        silence_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._send = send
        self._on_news = on_news
        self._silence_s = silence_s
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._own = self._told = IDLE

    @property
    def num_live_members(self) -> int:
        """The other members that count at the moment."""
        return len(self._counted(self._clock()))

    def share(self, load: RankLoad) -> Seq[RankLoad]:
        """Returns the load of this worker, then those of the members that count."""
        self._own = load
        if _matters(load, self._told):
            self._share_load()
        now = self._clock()
        others = self._counted(now)
        for member in self._members.values():
            if not load.prefillable or now - member.kept_at >= KEPT_S:
                member.kept = None
        return (load, *others)

    def heard(self, peer: PeerRef, body: GroupLoad) -> None:
        """Takes a member's load. Drops one from another group: either the member was reconfigured, or the registry is
        behind."""
        if body.group != self.name:
            return
        member = self._members.get(peer.peer_id)
        if member is None or member.peer != peer:
            member = self._members[peer.peer_id] = _Member(peer)
        load = RankLoad(body.prefillable, body.forced, body.num_running, body.largest_prefill)
        before, now = member.load, self._clock()
        member.load, member.heard_at = load, now
        if self._own.prefillable:
            if load.prefillable or before.prefillable:
                member.kept, member.kept_at = load if load.prefillable else before, now
            self._on_news()

    def lost(self, peer: PeerRef) -> None:
        """Removes a member whose process is silent or gone."""
        member = self._members.get(peer.peer_id)
        if member is not None and member.peer == peer:
            del self._members[peer.peer_id]
            if self._own.prefillable:
                self._on_news()

    def found(self, peers: Iterable[PeerRef]) -> None:
        """Replaces the list of members by what the registry has now."""
        listed = {peer.peer_id: peer for peer in peers}
        for peer_id in [name for name in self._members if name not in listed]:
            del self._members[peer_id]
        for peer_id, peer in listed.items():
            if peer_id not in self._members or self._members[peer_id].peer.incarnation < peer.incarnation:
                self._members[peer_id] = _Member(peer)

    def tick(self) -> None:
        """Sends this worker's load as a heartbeat, unless it is idle. Call it several times within `silence_s`."""
        if not _is_idle(self._own) or self._own != self._told:
            self._share_load()
        if self._own.prefillable:
            self._on_news()  # a member may have become silent since the last tick

    def _share_load(self) -> None:
        own = self._told = self._own
        body = GroupLoad(
            group=self.name,
            prefillable=own.prefillable,
            forced=own.forced,
            num_running=own.num_running,
            largest_prefill=own.largest_prefill,
        )
        for member in self._members.values():
            self._send(member.peer, body)

    def _counted(self, now: float) -> list[RankLoad]:
        loads = [
            member.kept or member.load for member in self._members.values() if now - member.heard_at <= self._silence_s
        ]
        return [load for load in loads if not _is_idle(load)]


def _is_idle(load: RankLoad) -> bool:
    return not load.prefillable and not load.num_running


def _matters(load: RankLoad, told: RankLoad) -> bool:
    """Whether the others need this load at once. A change in the number of running sequences can wait for the next
    heartbeat."""
    return _is_idle(load) != _is_idle(told) or replace(load, num_running=0) != replace(told, num_running=0)


class GroupDiscovery:
    """Polls the registry for the other members of a group."""

    def __init__(self, registry: Registry, group: DelayerGroup, me: WorkerRecord, interval_s: float) -> None:
        self._registry = registry
        self._group = group
        self._me = me
        self._interval_s = interval_s
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Runs until `stop`."""
        while not self._stopped.is_set():
            try:
                records = await self._registry.list_workers(self._me.model)
            except RegistryError as error:
                log.debug("the group stays as it was: %s", error)
            else:
                self._group.found(record_peer(record) for record in records if self._is_other_member(record))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), self._interval_s)

    def stop(self) -> None:
        """Ends `run`. It sets a flag because a library in between might swallow a cancellation."""
        self._stopped.set()

    async def close(self) -> None:
        await self._registry.close()

    def _is_other_member(self, record: WorkerRecord) -> bool:
        me = self._me
        same = (record.role, record.delayer_group, record.fingerprint) == (me.role, me.delayer_group, me.fingerprint)
        return same and record.worker_id != me.worker_id


def record_peer(record: WorkerRecord) -> PeerRef:
    """The address of a registered worker."""
    return PeerRef(record.worker_id, record.incarnation, record.address)
