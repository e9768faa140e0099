"""ZMQ contexts that are closed, closed twice, dropped, or left by a failed constructor: the collector never waits."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from kvrelay.curve import CurveKey, CurveKeys
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.handoff.transports.zmq_sender import ZmqSender
from kvrelay.messaging.messenger import Messenger
from kvrelay.messaging.zmq_context import ZmqContext
from kvrelay.protocol.messages import Cancel, PeerRef
from tests.fakes.waiting import until, wait_until
from tests.fakes.zmq_contexts import open_contexts

KEY = CurveKeys(CurveKey.new())
NOBODY = PeerRef("nobody", "1", "tcp://127.0.0.1:1")
POOL = np.zeros((4, 64), np.uint8)


def opened_messenger(curve: CurveKeys | None = None) -> Messenger:
    return Messenger("one", lambda event: None, curve=curve)


def messenger_with_messages() -> Messenger:
    """On an event loop that was closed before the messenger."""
    messenger = Messenger("one", lambda event: None)

    async def send() -> None:
        messenger.start()
        messenger.send(NOBODY, Cancel(reason="x" * 100_000))

    asyncio.run(send())
    return messenger


def context_with_sockets() -> ZmqContext:
    context = ZmqContext()
    sockets = [context.socket(kind) for kind in (zmq.PULL, zmq.PUSH)]
    sockets[1].connect("tcp://127.0.0.1:1")
    sockets[1].send(b"never arrives")
    return context


OWNERS: list[Callable[[], Any]] = [
    context_with_sockets,
    opened_messenger,
    lambda: opened_messenger(KEY),
    messenger_with_messages,
    lambda: ZmqReceiver(POOL.copy()),
    lambda: ZmqReceiver(POOL.copy(), curve=KEY),
]
NAMES = ["context", "messenger", "messenger with a key", "sent to nobody", "receiver", "receiver with a key"]


@pytest.mark.parametrize("make", OWNERS, ids=NAMES)
def test_an_owner_that_is_dropped_closes_its_context(make: Callable[[], Any]) -> None:
    before = open_contexts()
    gone = weakref.ref(make())
    gc.collect()  # a messenger that was started is in a reference cycle with its timer
    assert gone() is None
    wait_until(lambda: open_contexts() == before)


@pytest.mark.parametrize("make", OWNERS, ids=NAMES)
def test_an_owner_in_a_reference_cycle_does_not_block_the_collector(make: Callable[[], Any]) -> None:
    """The collector clears weak references to all that is in the cycle before it runs any `__del__`."""
    before = open_contexts()
    owner = make()
    cycle = [owner]
    cycle.append(cycle)
    gone = weakref.ref(owner)
    del owner, cycle
    gc.collect()
    assert gone() is None
    wait_until(lambda: open_contexts() == before)


@pytest.mark.parametrize("make", OWNERS, ids=NAMES)
def test_an_owner_may_be_closed_twice(make: Callable[[], Any]) -> None:
    before = open_contexts()
    owner = make()
    owner.close()
    assert open_contexts() == before
    owner.close()


def test_the_collector_may_run_on_the_thread_that_has_to_close_a_socket() -> None:
    """`term` waits for that very thread, so it must not run there."""
    before = open_contexts()
    context = ZmqContext()
    socket = context.socket(zmq.PULL)
    dropped, collected = threading.Event(), threading.Event()

    def receive() -> None:
        dropped.wait()
        gc.collect()
        collected.set()
        try:
            socket.recv()
        except zmq.ContextTerminated:
            socket.close()

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    context.hand_over(socket)
    cycle: list[Any] = [context]
    cycle.append(cycle)
    gc.disable()
    try:
        del context, cycle
        dropped.set()
        wait_until(collected.is_set)
    finally:
        gc.enable()
    wait_until(lambda: open_contexts() == before and not thread.is_alive())


async def test_a_receiver_whose_thread_fails_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it reads anything: its socket is closed all the same."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    receiver = ZmqReceiver(POOL.copy(), curve=KEY)
    monkeypatch.setattr(receiver._pool, "enter_thread", lambda: 1 / 0)
    receiver.start(lambda event: None)
    await asyncio.to_thread(receiver._thread.join)  # type: ignore[union-attr]
    await asyncio.sleep(0)
    receiver.close()
    receiver.close()
    assert [type(each["exception"]) for each in reported] == [ZeroDivisionError]


async def test_a_receiver_whose_thread_cannot_start_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = ZmqReceiver(POOL.copy())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="no thread"):
            receiver.start(lambda event: None)
    receiver.close()


def test_a_gate_that_cannot_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_contexts()
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    with pytest.raises(RuntimeError, match="no thread"):
        Messenger("one", lambda event: None, curve=KEY)
    assert open_contexts() == before


async def test_a_sender_whose_thread_fails_closes_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    sender = ZmqSender(POOL.copy())
    monkeypatch.setattr(sender, "_collect", lambda: 1 / 0)
    sender.start(lambda event: None)
    sender.abort("r")
    await until(lambda: reported)
    assert sender._context.is_closed
    sender.close()


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("no thread can be started")
