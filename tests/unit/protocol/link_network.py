"""Processes joined by a network that delays and loses, under a clock that tests turn. Messages of a process arrive in
order."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import msgspec

from kvrelay.protocol import codec
from kvrelay.protocol.link import Delivered, LinkEvent, Links, LinkSettings, PeerLost, PeerRefused
from kvrelay.protocol.messages import Cancel, Header, PeerRef

TICK_S = 0.05
PEER_TIMEOUT_S = LinkSettings().peer_timeout_s


@dataclass
class Process:
    """One incarnation of a peer and what it saw. `is_running` is False while it is stopped, and for good when dead."""

    me: PeerRef
    links: Links
    is_running: bool = True
    is_dead: bool = False
    inbox: list[list[bytes]] = field(default_factory=list)
    events: list[LinkEvent] = field(default_factory=list)

    def texts_from(self, peer: PeerRef) -> list[str]:
        """What this incarnation of the peer told us, in order."""
        return [text for life in self.lives_with(peer) for text in life]

    def lives_with(self, peer: PeerRef) -> list[list[str]]:
        """The same, cut wherever the peer was reported lost."""
        lives: list[list[str]] = [[]]
        for event in self.events:
            if event.peer != peer:
                continue
            if isinstance(event, Delivered):
                assert isinstance(event.body, Cancel)
                lives[-1].append(event.body.reason)
            else:
                lives.append([])
        return lives

    def lost(self) -> list[PeerLost]:
        return [event for event in self.events if isinstance(event, PeerLost)]

    def refused(self) -> list[PeerRefused]:
        return [event for event in self.events if isinstance(event, PeerRefused)]


class Network:
    """Addresses are peer ids: a restarted process is found where the old one was."""

    def __init__(self, seed: int = 0, settings: LinkSettings | None = None) -> None:
        self.now = 1000.0
        self.settings = settings or LinkSettings()
        self.loss = 0.0
        self.delay_s = (0.001, 0.002)
        self.cut: set[tuple[str, str]] = set()
        self.processes: dict[str, Process] = {}
        self.num_sent: Counter[str] = Counter()
        self.log: list[tuple[float, Header]] = []
        self._random = random.Random(seed)
        self._wire: list[tuple[float, int, str, list[bytes]]] = []
        self._last_arrival: defaultdict[tuple[PeerRef, str], float] = defaultdict(float)
        self._num_on_wire = 0
        self._num_starts = 0

    def start(self, peer_id: str, fingerprint: str = "", incarnation: str = "") -> Process:
        """Starts a process, in the place of the one that may have run there. Its clock may name it otherwise."""
        if peer_id in self.processes:
            self.kill(peer_id)
        self._num_starts += 1
        me = PeerRef(peer_id, incarnation or f"{self._num_starts:06}", peer_id)
        process = Process(me, Links(me, fingerprint, self.settings))
        self.processes[peer_id] = process
        return process

    def kill(self, peer_id: str) -> None:
        process = self.processes[peer_id]
        process.is_running, process.is_dead = False, True
        process.inbox.clear()

    def stop(self, peer_id: str) -> None:
        """As SIGSTOP does: messages pile up."""
        self.processes[peer_id].is_running = False

    def resume(self, peer_id: str) -> None:
        self.processes[peer_id].is_running = not self.processes[peer_id].is_dead

    def partition(self, one: str, other: str) -> None:
        self.cut |= {(one, other), (other, one)}

    def heal(self) -> None:
        self.cut.clear()
        self.loss = 0.0
        self.delay_s = (0.001, 0.002)

    def send(self, process: Process, peer: PeerRef, text: str) -> None:
        process.links.send(peer, Cancel(reason=text), self.now)
        self._collect(process)

    def run(self, duration_s: float) -> None:
        """Lets time pass; each process ticks, and takes its messages when they come."""
        end = self.now + duration_s
        while self.now < end:
            next_tick = min(self.now + TICK_S, end)
            while self._wire and self._wire[0][0] <= next_tick:
                self.now, _, address, frames = heapq.heappop(self._wire)
                if address in self.processes and not self.processes[address].is_dead:
                    self.processes[address].inbox.append(frames)
                    self._take_inbox(self.processes[address])
            self.now = next_tick
            for process in self.processes.values():
                self._take_inbox(process)
                if process.is_running:
                    process.links.tick(self.now)
                    self._collect(process)

    def _take_inbox(self, process: Process) -> None:
        if process.is_running and process.inbox:
            frames, process.inbox = process.inbox, []
            for message in frames:
                process.links.receive(message, self.now)
                self._collect(process)

    def _collect(self, process: Process) -> None:
        process.events += process.links.take_events()
        for address, frames in process.links.take_outgoing():
            self.num_sent[process.me.peer_id] += 1
            self.log.append((self.now, codec.decode_header(frames)))
            if (process.me.peer_id, address) in self.cut:
                continue
            if self._random.random() >= self.loss:
                at = max(self.now + self._random.uniform(*self.delay_s), self._last_arrival[process.me, address])
                self._last_arrival[process.me, address] = at
                self.inject(address, frames, at - self.now)

    def inject(self, address: str, frames: list[bytes], delay_s: float = 0.0) -> None:
        """Puts a message on the wire."""
        self._num_on_wire += 1
        heapq.heappush(self._wire, (self.now + delay_s, self._num_on_wire, address, frames))


def size_of_state(links: Links) -> int:
    return len(links._links) + len(links._refusals)


def with_header(frames: list[bytes], **changes: object) -> list[bytes]:
    header = msgspec.structs.replace(codec.decode_header(frames), **changes)
    return [codec.encode_header(header), *frames[1:]]
