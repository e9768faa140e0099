"""A rank other than 0: joins the engine's group, loads its part, and computes every step that is published.

The main thread does all of that. A second one sends life signs and ends the process when the engine is silent, also
while the main thread waits in a collective.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import zmq

from kvrelay.curve import CurveKey
from kvrelay.messaging.zmq_context import ZmqContext
from kvrelay.process_identity import own_identity
from kvrelay.ranks.messages import (
    BEAT_TOPIC,
    STEP_TOPIC,
    Announce,
    Beat,
    Done,
    End,
    Hello,
    PoolFacts,
    Progress,
    Published,
    Pushed,
    RankAlive,
    RankFailed,
    RankSettings,
    Ready,
    Software,
    Start,
    Step,
    encode,
    published_decoder,
)
from kvrelay.ranks.rank_group import BEATS_A_SILENCE, LINGER_MS
from kvrelay.ranks.rank_transfers import RankTransfers
from kvrelay.ranks.transfer_messages import CALL_TOPIC, TransferSettings
from kvrelay.step.batch import ModelSpec, WorkerBatch
from kvrelay.transfer.base import PartReceiver, PartSender
from kvrelay.transfer.endpoints import Endpoint
from kvrelay.transfer.pool_memory import PoolLike

log = logging.getLogger(__name__)

POLL_MS = 100
SETTLED_BEATS = 2
"""Life signs of the engine after which a message that it published before the first of them is lost."""


class RankEnds(Exception):
    """The rank cannot go on. The message is for the user."""


class OutOfStep(Exception):
    """A message of the engine was lost. The rank cannot go on."""


class FollowingRunner(Protocol):
    """A rank's part of the model and of the KV pool."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def pool_memory(self) -> PoolLike: ...

    @property
    def waited_s(self) -> float:
        """Seconds that this stage has waited for the one before."""
        ...

    def follow(self, batch: WorkerBatch) -> None:
        """Computes this rank's part of a step that rank 0 runs at the same time, and samples nothing.

        Raises IndexError for copies of blocks that do not exist, which leaves the ranks in step.
        """
        ...


Report = Callable[[str], None]
Load = Callable[[RankSettings, int, Report], FollowingRunner]
"""Loads a rank's part, and reports what it does. Its errors are reported to the engine."""
OpenTransports = Callable[[TransferSettings, PoolLike], Mapping[str, PartSender | PartReceiver]]
"""Opens a rank's transports over its pool, by name."""


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """`engine`: HOST:PORT of the engine's group."""

    engine: str
    rank: int
    software: Software
    timeout_s: float = 60.0
    curve: CurveKey | None = field(default=None, repr=False)


def facts_of(spec: ModelSpec) -> PoolFacts:
    """Returns the facts of a rank's model that must be equal on all ranks."""
    return PoolFacts(
        model=spec.fingerprint,
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        num_swap_slots=spec.num_swap_slots,
        max_model_len=spec.max_model_len,
    )


class RankMember:
    """One rank's connection to the engine."""

    def __init__(self, options: MemberOptions, load: Load, open_transports: OpenTransports | None = None) -> None:
        """`open_transports` is needed for workers that hand KV over."""
        self._options = options
        self._load = load
        self._open_transports = open_transports
        self._transfers: RankTransfers | None = None
        self._process = secrets.token_hex(8)
        self._context = ZmqContext()
        self._decoder = published_decoder()
        self._steps = self._subscribe(STEP_TOPIC)
        self._calls = self._subscribe(CALL_TOPIC + bytes([options.rank]))
        self._num_calls_before = 0  # calls published before the last message
        self._num_received = 0  # number of the last published message
        self._waits = False  # True while the main thread waits for a message
        self._runner: FollowingRunner | None = None

    def run(self) -> None:
        """Runs until the engine ends the group. Raises RankEnds."""
        try:
            announce = self._announce = self._join()
            self._results = self._push_socket(announce)
            self._watch = _Watch(self, announce)
            self._say(Hello(announce.group, self._options.rank, self._process, _where(), self._options.software))
            self._watch.start()
            while self._handle(self._receive(), announce):
                pass
        except Exception as error:
            self._report(error)
            raise RankEnds(str(error) or type(error).__name__) from error
        finally:
            if self._transfers is not None:
                self._transfers.close()
            self._context.close(LINGER_MS)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _join(self) -> Announce:
        """Waits for the engine to announce its group. Raises RankEnds."""
        options, deadline = self._options, time.monotonic() + self._options.timeout_s
        while time.monotonic() < deadline:
            if not self._steps.poll(POLL_MS):
                continue
            _, number, body, *_ = self._steps.recv_multipart()
            message = self._decoder.decode(body)
            if isinstance(message, Announce):
                self._num_received = int.from_bytes(number, "little")
                return message
        raise RankEnds(
            f"no engine at {options.engine} asked for ranks within {options.timeout_s:g} s (rank_timeout_s); check "
            f"its address, and that its group is not complete"
        )

    def _receive(self) -> Published:
        """The next message. Raises OutOfStep if one before it is missing."""
        self._waits = True
        _, raw_number, body, *calls = self._steps.recv_multipart()
        self._waits = False
        if calls:
            self._num_calls_before = int(np.frombuffer(calls[0], np.uint32)[self._options.rank])
        number = int.from_bytes(raw_number, "little")
        if number != self._num_received + 1:
            raise OutOfStep(f"message {number} came after message {self._num_received}: some were lost")
        self._num_received = number
        message: Published = self._decoder.decode(body)
        return message

    def _handle(self, message: Published, announce: Announce) -> bool:
        """Returns False when the group ends."""
        match message:
            case Step(batch):
                self._run_step(batch)
            case Announce() if message.group != announce.group:
                raise RankEnds("the engine was restarted")
            case Announce():
                pass
            case Start():
                self._run_load(message.settings)
            case End():
                log.info("the engine ends%s", f": {message.reason}" if message.reason else "")
                return False
        return True

    def _run_load(self, settings: RankSettings) -> None:
        began = time.monotonic()
        rank = self._options.rank
        self._runner = self._load(settings, rank, lambda text: self._say(Progress(self._process, rank, text)))
        endpoints = self._start_transfers(settings, self._runner)
        took_s = time.monotonic() - began
        self._say(Ready(self._process, rank, facts_of(self._runner.spec), took_s, endpoints, own_identity()))

    def _start_transfers(self, settings: RankSettings, runner: FollowingRunner) -> dict[str, Endpoint]:
        """Returns the addresses of this rank's transports by name. That of a sender is empty."""
        if settings.transfers is None:
            return {}
        if self._open_transports is None:
            raise RankEnds("this rank has no transports, and the worker hands KV over")
        transports = self._open_transports(settings.transfers, runner.pool_memory)
        self._transfers = RankTransfers(self._process, self._options.rank, transports)
        results = self._push_socket(self._announce)
        self._transfers.start(self._context, self._calls, results, self._end_with)
        return self._transfers.endpoints

    def _end_with(self, reason: str) -> None:
        """Ends the process, because a thread of it failed. The engine notices that it is gone."""
        _end(reason)

    def _run_step(self, batch: WorkerBatch) -> None:
        if self._runner is None:
            raise OutOfStep("a step came before the model")
        if self._transfers is not None:
            self._transfers.await_calls(self._num_calls_before)
        began, error, waited_s = time.perf_counter(), "", self._runner.waited_s
        try:
            self._runner.follow(batch)
        except IndexError as wrong:
            error = str(wrong)
        took_s = time.perf_counter() - began - (self._runner.waited_s - waited_s)
        self._say(Done(self._process, self._options.rank, self._num_received, took_s, error))

    def _report(self, error: Exception) -> None:
        """Sends the error to the engine, if this rank has joined it."""
        log.debug("the rank ends", exc_info=error)
        if hasattr(self, "_results"):
            text = str(error) if isinstance(error, RankEnds | OutOfStep) else f"{type(error).__name__}: {error}"
            with suppress(zmq.ZMQError):
                self._say(RankFailed(self._process, self._options.rank, text))

    # -- sockets ------------------------------------------------------------------------------------------------------

    def _subscribe(self, topic: bytes) -> zmq.Socket[bytes]:
        subscriber = self._socket(zmq.SUB)
        subscriber.subscribe(topic)
        subscriber.connect(f"tcp://{self._options.engine}")
        return subscriber

    def _push_socket(self, announce: Announce) -> zmq.Socket[bytes]:
        host = self._options.engine.rpartition(":")[0]
        results = self._socket(zmq.PUSH)
        results.connect(f"tcp://{host}:{announce.results_port}")
        return results

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set_hwm(0)
        made.setsockopt(zmq.IPV6, int("[" in self._options.engine))
        if self._options.curve is not None:
            self._options.curve.guard_client(made)
        return made

    def _say(self, message: Pushed) -> None:
        self._results.send(encode(message))


class _Watch:
    """Sends life signs, and ends the process when those of the engine stop."""

    def __init__(self, member: RankMember, announce: Announce) -> None:
        self._member = member
        self._silence_s = announce.silence_s
        self._group = announce.group
        self._results = member._push_socket(announce)
        self._beats = member._subscribe(BEAT_TOPIC)
        for each in (self._results, self._beats):
            member._context.hand_over(each)
        self._decoder = msgspec.msgpack.Decoder(Beat)
        self._lost: tuple[int, int] = (0, 0)  # the last message when the rank seemed to miss one; life signs since

    def start(self) -> None:
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _run(self) -> None:
        member, interval_s = self._member, self._silence_s / BEATS_A_SILENCE
        alive = encode(RankAlive(member._process, member._options.rank))
        heard_at = time.monotonic()
        try:
            while True:
                self._results.send(alive)
                if self._beats.poll(int(1000 * interval_s)):
                    self._take(self._decoder.decode(self._beats.recv_multipart()[1]))
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at > self._silence_s:
                    _end(f"the engine at {member._options.engine} has been silent for {self._silence_s:g} s")
        except zmq.ContextTerminated:
            pass
        finally:
            self._results.close(linger=0)
            self._beats.close(linger=0)

    def _take(self, beat: Beat) -> None:
        """Ends the process if the engine is another one, or has published what does not arrive here."""
        member = self._member
        if beat.group != self._group:
            _end("the engine was restarted")
        received = member._num_received
        if not member._waits or received >= beat.num_published:
            self._lost = (0, 0)
            return
        since = self._lost[1] + 1 if self._lost[0] == received else 1
        self._lost = (received, since)
        if since > SETTLED_BEATS:
            _end(f"messages {received + 1} to {beat.num_published} of the engine were lost")


def _end(reason: str) -> None:
    """Ends the process at once: its main thread may wait for another rank for ever."""
    log.error("the rank ends: %s", reason)
    logging.shutdown()
    os._exit(1)


def _where() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
