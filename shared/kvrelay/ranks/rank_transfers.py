"""A rank's own transports, by name: carries out rank 0's calls, and reports their events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import zmq

from kvrelay.messaging.zmq_context import ZmqContext
from kvrelay.ranks.messages import encode
from kvrelay.ranks.remote_transfers import report_of
from kvrelay.ranks.transfer_messages import AbortCall, AdmitCall, PushCall, ReleaseCall, TransferCall
from kvrelay.transfer.base import BlockPush, PartReceiver, PartSender, ReceiverEvent, SenderEvent
from kvrelay.transfer.endpoints import Endpoint

Fail = Callable[[str], None]
"""Ends the rank with a reason. Thread-safe."""


class RankTransfers:
    """One thread takes calls, another reports events. Both sockets belong to these threads from `start` on."""

    def __init__(self, process: str, rank: int, transports: Mapping[str, PartSender | PartReceiver]) -> None:
        self._process = process
        self._rank = rank
        self._transports = dict(transports)
        self._decoder = msgspec.msgpack.Decoder(TransferCall)
        self._num_done = 0
        self._changed = threading.Condition()  # guards the number of calls
        self._loop = asyncio.new_event_loop()

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The addresses of this rank's transports by name. That of a sender is empty."""
        return {
            name: dict(transport.endpoint) if isinstance(transport, PartReceiver) else {}
            for name, transport in self._transports.items()
        }

    def start(self, context: ZmqContext, calls: zmq.Socket[bytes], results: zmq.Socket[bytes], fail: Fail) -> None:
        """Returns once the transports have started."""
        for each in (calls, results):
            context.hand_over(each)
        started = threading.Event()
        self._reporter = threading.Thread(
            target=self._report, args=(results, started, fail), name="transfer-reports", daemon=True
        )
        self._reporter.start()
        started.wait()
        threading.Thread(target=self._take, args=(calls, fail), name="transfer-calls", daemon=True).start()

    def await_calls(self, number: int) -> None:
        """Waits until so many calls have been carried out."""
        if self._num_done < number:
            with self._changed:
                self._changed.wait_for(lambda: self._num_done >= number)

    def close(self) -> None:
        """Stops the transports and the reports. The thread of the calls ends with the context."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._reporter.join()
        for transport in self._transports.values():
            transport.close()
        self._loop.close()

    def _report(self, results: zmq.Socket[bytes], started: threading.Event, fail: Fail) -> None:
        def report(name: str, transport: PartSender | PartReceiver, event: SenderEvent | ReceiverEvent) -> None:
            counters = transport.counters if isinstance(transport, PartSender) else None
            results.send(encode(report_of(self._process, self._rank, name, event, counters)))

        async def start() -> None:
            for name, transport in self._transports.items():
                transport.start(partial(report, name, transport))

        try:
            self._loop.set_exception_handler(lambda _, context: fail(str(context.get("exception", context["message"]))))
            self._loop.run_until_complete(start())
            started.set()
            self._loop.run_forever()
        except Exception as error:
            fail(f"its transports did not start: {error}")
        finally:
            started.set()
            results.close(linger=0)

    def _take(self, calls: zmq.Socket[bytes], fail: Fail) -> None:
        try:
            while True:
                _, raw_number, body = calls.recv_multipart()
                number = int.from_bytes(raw_number, "little")
                if number != self._num_done + 1:
                    fail(f"call {number} came after call {self._num_done}: some were lost")
                    return
                self._carry_out(self._decoder.decode(body))
                with self._changed:
                    self._num_done = number
                    self._changed.notify_all()
        except zmq.ContextTerminated:
            pass
        except Exception as error:
            fail(f"a call to its transport failed: {type(error).__name__}: {error}")
        finally:
            calls.close(linger=0)

    def _carry_out(self, call: TransferCall) -> None:
        transport = self._transports[call.transport]
        if isinstance(transport, PartSender):
            match call:
                case PushCall(_, reservation, endpoint, numbers, part):
                    copies = [BlockPush(*each) for each in numbers]
                    if part is None:
                        transport.push(reservation, endpoint, copies)
                    else:
                        transport.push_part(reservation, endpoint, copies, part)
                case AbortCall(_, reservation):
                    transport.abort(reservation)
                case _:
                    raise ValueError(f"this rank sends blocks: {call}")
            return
        match call:
            case AdmitCall(_, reservation, first_block, slots, parts):
                if parts:
                    transport.admit_parts(reservation, first_block, slots, parts)
                else:
                    transport.admit(reservation, first_block, slots)
            case ReleaseCall(_, reservation):
                transport.release(reservation)
            case _:
                raise ValueError(f"this rank takes blocks: {call}")
