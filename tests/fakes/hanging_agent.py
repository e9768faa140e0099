"""A fake of NIXL's agent for tests without NIXL: it copies between pools of this process, and its writes can hang.

A hanging write may land at any later moment, or end with its connection.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import pytest

from kvrelay.handoff.transports import nixl_receiver, nixl_sender
from kvrelay.handoff.transports.nixl_agent import NixlError, Region
from kvrelay.handoff.transports.pool_memory import BlockPart
from kvrelay.handoff.transports.wire import Indices


@dataclass(eq=False)
class FakeWrite:
    """A write of rows `copies` (from, to addresses), and the notification that follows it."""

    peer: str
    copies: list[tuple[int, int]]
    num_bytes: int  # of a row
    notification: bytes
    done: bool = False
    error: str = ""


@dataclass
class FakeNetwork:
    """All agents of a test. `num_good`: writes that come through before the others hang; None: all do."""

    num_good: int | None = None
    num_rows: list[int] = field(default_factory=list)  # of each write that was posted
    num_hung: int = 0
    num_removed: int = 0  # hanging writes whose peer was removed, which are still carried out by `land_late`
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    hanging: list[FakeWrite] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def land(self, write: FakeWrite) -> None:
        """Copies the blocks and delivers the notification. The caller holds the lock."""
        for source, target in write.copies:
            ctypes.memmove(target, source, write.num_bytes)
        self.agents[write.peer].inbox.append(write.notification)
        write.done = True

    def end(self, error: str) -> None:
        """All writes that hang fail, and never land."""
        with self.lock:
            for write in self.hanging:
                write.error = error
            self.hanging.clear()

    def land_late(self) -> None:
        """All writes that hang come through after all."""
        with self.lock:
            for write in self.hanging:
                self.land(write)
            self.hanging.clear()


class FakeAgent:
    """Has the methods of `NixlAgent`, over a `FakeNetwork`."""

    _numbers = itertools.count(1)

    def __init__(self, network: FakeNetwork, region: Region) -> None:
        self._network = network
        self._region = region
        self.name = f"fake-{next(self._numbers)}"
        self.inbox: list[bytes] = []
        network.agents[self.name] = self

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def forget_peer(self, name: str) -> None:
        with self._network.lock:
            for write in [write for write in self._network.hanging if write.peer == name and not write.error]:
                write.error = "the peer was removed"
                self._network.num_removed += 1

    def prepare(self, region: Region, peer: str = "", part: BlockPart | None = None) -> Any:
        return region.descriptors(part), peer

    def discard(self, prepared: Any) -> None:
        pass

    def post(self, own: Any, sources: Indices, theirs: Any, slots: Indices, notification: bytes) -> FakeWrite:
        (from_rows, _), (to_rows, peer) = own, theirs
        copies = list(zip(from_rows[sources, 0].tolist(), to_rows[slots, 0].tolist(), strict=True))
        write = FakeWrite(peer, copies, int(to_rows[0, 1]), notification)
        with self._network.lock:
            self._network.num_rows.append(len(copies))
            if self._network.num_good == 0:
                self._network.num_hung += 1
                self._network.hanging.append(write)
                return write
            if self._network.num_good is not None:
                self._network.num_good -= 1
            self._network.land(write)
        return write

    def poll(self, write: FakeWrite) -> bool:
        if write.error:
            raise NixlError(write.error)
        return write.done

    def end(self, write: FakeWrite) -> None:
        pass

    def notifications(self) -> list[bytes]:
        with self._network.lock:
            inbox, self.inbox = self.inbox, []
        return inbox

    def close(self) -> None:
        pass


@contextmanager
def fake_network(**settings: Any) -> Iterator[FakeNetwork]:
    """While it is open, senders and receivers of NIXL are on it."""
    network = FakeNetwork(**settings)

    def make(region: Region, **_: str) -> FakeAgent:
        return FakeAgent(network, region)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl_sender, "NixlAgent", make)
        patch.setattr(nixl_receiver, "NixlAgent", make)
        yield network
