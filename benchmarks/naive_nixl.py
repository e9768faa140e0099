"""NIXL as its examples use it: descriptors made anew for each push, one request for all blocks, the library's defaults.

The measure of what the transport's own care is worth: prepared descriptors, merged neighbours, pieces, its own polling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import numpy as np

from kvrelay.handoff.transports.base import BlockPush, Landed
from kvrelay.handoff.transports.nixl_agent import NixlEndpoint, Region, import_api
from kvrelay.handoff.transports.wire import Bytes

POLL_S = 0.001


def make_agent(name: str, region: Region) -> Any:
    """With its progress thread, and the pool registered."""
    api = import_api()
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(region.address, region.num_blocks * region.block_bytes, 0, "")], "DRAM")
    return agent


class NaiveSender:
    """`push` returns when all is written."""

    def __init__(self, pool: Bytes) -> None:
        self._region = Region.of(pool)
        self._agent = make_agent("naive-sender", self._region)
        self._peers: set[str] = set()

    def push(self, reservation: str, words: dict[str, str], copies: Sequence[BlockPush]) -> None:
        """Raises AssertionError if it fails."""
        endpoint = NixlEndpoint.decode(words)
        if endpoint.agent not in self._peers:
            self._agent.add_remote_agent(endpoint.metadata)
            self._peers.add(endpoint.agent)
        own, theirs = self._region.descriptors(), endpoint.region.descriptors()
        handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(np.ascontiguousarray(own[[copy.source for copy in copies]]), "DRAM"),
            self._agent.get_xfer_descs(np.ascontiguousarray(theirs[[copy.slot for copy in copies]]), "DRAM"),
            endpoint.agent,
            reservation.encode(),
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE", state
        self._agent.release_xfer_handle(handle)


class NaiveReceiver:
    """Reports a push as one `Landed` of `num_blocks` blocks."""

    def __init__(self, pool: Bytes, num_blocks: int) -> None:
        region = Region.of(pool)
        self._num_blocks = num_blocks
        self._agent = make_agent("naive-receiver", region)
        self.endpoint = NixlEndpoint("naive-receiver", self._agent.get_agent_metadata(), region).encode()
        self._closed = False
        self._thread: Thread | None = None

    def start(self, on_landed: Callable[[Landed], None]) -> None:
        self._thread = Thread(target=self._run, args=(on_landed,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.join()

    def _run(self, on_landed: Callable[[Landed], None]) -> None:
        while not self._closed:
            for notes in self._agent.get_new_notifs().values():
                for note in notes:
                    on_landed(Landed(note.decode(), tuple(range(self._num_blocks))))
            time.sleep(POLL_S)
