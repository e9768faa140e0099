"""Transports behind the messages between ranks, in the test's own process."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread

from kvrelay.handoff.transports.base import TransferReceiver, TransferSender
from kvrelay.ranks.local_ranks import LocalRanks
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.ranks.rank_member import RankMember, Transport
from kvrelay.ranks.transfers import RemoteReceiver, RemoteSender
from kvrelay.step.batch import WorkerBatch
from tests.fakes.hash_runner import HashRunner
from tests.fakes.replicas import HashReplica
from tests.fakes.waiting import PATIENCE_S

RANK = 1


class Channel:
    """A group of two ranks, of which the other one has these transports."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self.group = RankGroup(2, LocalRanks([]))
        member = RankMember(RANK, "127.0.0.1", self.group.meeting)
        runner = HashReplica(HashRunner(2, 4, 8))
        self._thread = Thread(target=member.run, args=(runner, transports), daemon=True)
        self._thread.start()
        self.group.await_ready(runner.spec.fingerprint, PATIENCE_S)

    def await_calls(self) -> None:
        """Waits until the rank has carried out all calls."""
        self.group.publish_step(WorkerBatch(0, []))
        self.group.await_done()

    def close(self) -> None:
        self.group.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class ChannelSender(RemoteSender):
    """A sender that ends with the test."""

    def __init__(self, transport: TransferSender) -> None:
        self.channel = Channel({transport.name: transport})
        super().__init__(RANK, self.channel.group, transport.name)

    def close(self) -> None:
        self.channel.close()


class ChannelReceiver(RemoteReceiver):
    """A receiver that ends with the test."""

    def __init__(self, transport: TransferReceiver) -> None:
        self.channel = Channel({transport.name: transport})
        super().__init__(RANK, self.channel.group, transport.name, is_one_sided=transport.is_one_sided)

    def close(self) -> None:
        self.channel.close()
