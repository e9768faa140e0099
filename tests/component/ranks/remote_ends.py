"""Transports behind the channel between ranks, in the test's own process: calls and reports cross sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread

import msgspec
import zmq

from kvrelay.messaging.zmq_context import ZmqContext
from kvrelay.process_identity import own_identity
from kvrelay.ranks.messages import Pushed, encode
from kvrelay.ranks.rank_transfers import RankTransfers
from kvrelay.ranks.remote_transfers import RemoteReceiver, RemoteSender
from kvrelay.ranks.transfer_messages import CALL_TOPIC, TransferCall, TransferReport
from kvrelay.transfer.base import PartReceiver, PartSender
from kvrelay.transfer.endpoints import Endpoint

RANK = 1
TOPIC = CALL_TOPIC + bytes([RANK])


class Channel:
    """One rank's end of the channel, and rank 0's."""

    def __init__(self, transports: Mapping[str, PartSender | PartReceiver]) -> None:
        self.failures: list[str] = []
        self.transfers = RankTransfers("process", RANK, transports)
        self._context = ZmqContext()
        self._publisher = self._context.socket(zmq.XPUB)
        calls, results = self._context.socket(zmq.SUB), self._context.socket(zmq.PUSH)
        self._reports = self._context.socket(zmq.PULL)
        port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        calls.subscribe(TOPIC)
        calls.connect(f"tcp://127.0.0.1:{port}")
        self._publisher.recv()  # the subscription
        results.connect(f"tcp://127.0.0.1:{self._reports.bind_to_random_port('tcp://127.0.0.1')}")
        self.transfers.start(self._context, calls, results, self.failures.append)
        self._num_calls = 0
        self._handlers: dict[str, Callable[[TransferReport], None]] = {}

    def publish_call(self, rank: int, call: TransferCall) -> None:
        assert rank == RANK
        self._num_calls += 1
        self._publisher.send_multipart([TOPIC, self._num_calls.to_bytes(8, "little"), encode(call)])

    def on_report(self, rank: int, transport: str, handle: Callable[[TransferReport], None]) -> None:
        assert rank == RANK and transport in self.transfers.endpoints
        self._handlers[transport] = handle
        if len(self._handlers) == 1:
            self._context.hand_over(self._reports)
            Thread(target=self._take_reports, daemon=True).start()

    def endpoints_of(self, rank: int) -> Mapping[str, Endpoint]:
        assert rank == RANK
        return self.transfers.endpoints

    @property
    def identities(self) -> list[str]:
        return [own_identity()]

    def await_calls(self) -> None:
        """Waits until the rank has carried out all calls."""
        self.transfers.await_calls(self._num_calls)

    def close(self) -> None:
        if not self._context.is_closed:
            self.transfers.close()
            self._context.close()

    def _take_reports(self) -> None:
        decoder = msgspec.msgpack.Decoder(Pushed)
        try:
            while True:
                report = decoder.decode(self._reports.recv())
                assert isinstance(report, TransferReport)
                self._handlers[report.transport](report)
        except zmq.ContextTerminated:
            pass
        finally:
            self._reports.close(linger=0)


class ChannelSender(RemoteSender):
    """A sender that ends with the test."""

    def __init__(self, transport: PartSender) -> None:
        self.channel = Channel({transport.name: transport})
        super().__init__(RANK, self.channel, transport.name)

    def close(self) -> None:
        self.channel.close()


class ChannelReceiver(RemoteReceiver):
    """A receiver that ends with the test."""

    def __init__(self, transport: PartReceiver) -> None:
        self.channel = Channel({transport.name: transport})
        super().__init__(RANK, self.channel, transport.name, is_one_sided=transport.is_one_sided)

    def close(self) -> None:
        self.channel.close()
