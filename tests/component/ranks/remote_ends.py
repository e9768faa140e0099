"""Transports behind the channel between ranks, in the test's own process: calls and reports cross sockets."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import msgspec
import zmq

from kvrelay.messaging.zmq_context import ZmqContext
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

    def __init__(self, transport: PartSender | PartReceiver) -> None:
        self.failures: list[str] = []
        self.transfers = RankTransfers("process", RANK, transport)
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

    def publish_call(self, rank: int, call: TransferCall) -> None:
        assert rank == RANK
        self._num_calls += 1
        self._publisher.send_multipart([TOPIC, self._num_calls.to_bytes(8, "little"), encode(call)])

    def on_report(self, rank: int, handle: Callable[[TransferReport], None]) -> None:
        assert rank == RANK
        self._context.hand_over(self._reports)
        Thread(target=self._take_reports, args=(handle,), daemon=True).start()

    def endpoint_of(self, rank: int) -> Endpoint:
        assert rank == RANK and self.transfers.endpoint is not None
        return self.transfers.endpoint

    def await_calls(self) -> None:
        """Waits until the rank has carried out all calls."""
        self.transfers.await_calls(self._num_calls)

    def close(self) -> None:
        if not self._context.is_closed:
            self.transfers.close()
            self._context.close()

    def _take_reports(self, handle: Callable[[TransferReport], None]) -> None:
        decoder = msgspec.msgpack.Decoder(Pushed)
        try:
            while True:
                report = decoder.decode(self._reports.recv())
                assert isinstance(report, TransferReport)
                handle(report)
        except zmq.ContextTerminated:
            pass
        finally:
            self._reports.close(linger=0)


class ChannelSender(RemoteSender):
    """A sender that ends with the test."""

    def __init__(self, transport: PartSender) -> None:
        self.channel = Channel(transport)
        super().__init__(RANK, self.channel)

    def close(self) -> None:
        self.channel.close()


class ChannelReceiver(RemoteReceiver):
    """A receiver that ends with the test."""

    def __init__(self, transport: PartReceiver) -> None:
        self.channel = Channel(transport)
        super().__init__(RANK, self.channel)

    def close(self) -> None:
        self.channel.close()
