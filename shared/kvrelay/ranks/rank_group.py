"""The engine's side of a group of ranks: starts those of this machine, publishes to all, watches them.

One thread receives, watches and starts processes. The step's thread publishes, under a lock, and waits for the ranks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from kvrelay.curve import CurveKey
from kvrelay.messaging.sockets import tcp_host
from kvrelay.messaging.zmq_context import ZmqContext, open_curve_gate
from kvrelay.process import describe_exit
from kvrelay.ranks.group_state import GroupState, Phase
from kvrelay.ranks.messages import (
    BEAT_TOPIC,
    STEP_TOPIC,
    Announce,
    Beat,
    End,
    Hello,
    PoolFacts,
    Progress,
    Published,
    Pushed,
    RankSettings,
    Ready,
    Software,
    Start,
    Step,
    encode,
)
from kvrelay.ranks.rank_process import RankProcess
from kvrelay.ranks.transfer_messages import CALL_TOPIC, TransferCall, TransferReport
from kvrelay.step.batch import DeviceLost, WorkerBatch
from kvrelay.transfer.endpoints import Endpoint

log = logging.getLogger(__name__)

ANNOUNCE_S = 0.1
BEATS_A_SILENCE = 6
"""Life signs in the time after which silence means death."""
MAX_PUSHED_BYTES = 1 << 20
END_S = 3.0
"""Time for ranks to end by themselves."""
REASON_S = 1.0
"""How long the first error of a failed group may take to be known. A collective may fail before the exit is noticed."""
LINGER_MS = 500


class RanksFailed(ValueError):
    """The group could not start. The message is for the user."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """A group of `size` ranks. The engine listens on `host`, and `port` or any free one if it is 0."""

    size: int
    group: str
    software: Software
    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 60.0
    silence_s: float = 15.0
    curve: CurveKey | None = field(default=None, repr=False)

    @property
    def beat_s(self) -> float:
        return self.silence_s / BEATS_A_SILENCE


@dataclass(frozen=True, slots=True)
class RankCommand:
    """The command that starts a rank on this machine."""

    rank: int
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


MakeCommands = Callable[[str], Sequence[RankCommand]]
"""The ranks to start here, for the address of the engine, HOST:PORT."""


class RankGroup:
    """The ranks 1 to size - 1 and their processes. `close` ends them, also after a failure."""

    def __init__(self, options: GroupOptions, make_commands: MakeCommands) -> None:
        """Opens the sockets and starts the processes. Raises zmq.ZMQError if the address is taken."""
        self.lost: Future[None] = Future()
        """Gets a DeviceLost when the group fails after its start."""
        self._options = options
        self._make_commands = make_commands
        now = time.monotonic()
        self._state = GroupState(
            options.group,
            options.size,
            options.software,
            join_by=now + options.timeout_s,
            join_s=options.timeout_s,
            silence_s=options.silence_s,
        )
        self._changed = threading.Condition()  # guards the state
        self._publishing = threading.Lock()  # guards the publisher and the number of its messages
        self._num_published = 0
        self._num_calls = np.zeros(options.size, np.uint32)  # by rank
        self._report_handlers: dict[tuple[int, str], Callable[[TransferReport], None]] = {}
        self._processes: list[RankProcess] = []
        self._decoder = msgspec.msgpack.Decoder(Pushed)
        self._is_closing = False
        self._context = ZmqContext()
        try:
            self._publisher, self._results = self._open_sockets()
        except BaseException:
            self._context.close()
            raise
        self._wake_fd, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    @property
    def processes(self) -> Sequence[RankProcess]:
        """Those of this machine."""
        return self._processes

    # -- the start ----------------------------------------------------------------------------------------------------

    def await_joined(self) -> None:
        """Waits until all ranks have joined. Raises RanksFailed."""
        self._await(lambda: self._state.phase is not Phase.JOINING)

    def start(self, settings: RankSettings) -> None:
        """Has the ranks load their parts."""
        self._publish(Start(settings))

    def await_ready(self, facts: PoolFacts) -> None:
        """Waits until all ranks have loaded what rank 0 has. Raises RanksFailed."""
        with self._changed:
            self._state.on_own_facts(facts)
        self._await(lambda: self._state.phase is Phase.READY)

    def check_start(self) -> None:
        """Raises RanksFailed if the group has failed."""
        if self._state.phase is Phase.FAILED:
            raise RanksFailed(self._state.failure)

    def _await(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._state.phase is Phase.FAILED)
        self.check_start()

    # -- steps --------------------------------------------------------------------------------------------------------

    def publish_step(self, batch: WorkerBatch) -> int:
        """Sends a step to all ranks. Returns the number for `await_done`. Raises DeviceLost if the group has failed."""
        if self._state.phase is Phase.FAILED:
            raise DeviceLost(self._state.failure)
        return self._publish(Step(batch))

    def await_done(self, number: int) -> str:
        """Waits until all ranks have ended the step. Returns the error of one that left the ranks in step, or "".

        Raises DeviceLost if the group has failed.
        """
        state = self._state
        with self._changed:
            self._changed.wait_for(lambda: state.num_done >= number or state.phase is Phase.FAILED)
            if state.phase is Phase.FAILED:
                raise DeviceLost(state.failure)
            error, state.step_error = state.step_error, ""
            return error

    def take_step_s(self, number: int) -> float:
        """The longest time that a rank computed a step which all have ended."""
        with self._changed:
            return self._state.take_step_s(number)

    @property
    def busy_s(self) -> list[float]:
        """Seconds that each rank computed steps, from rank 1 on."""
        with self._changed:
            return self._state.busy_s

    # -- transfers ----------------------------------------------------------------------------------------------------

    def publish_call(self, rank: int, call: TransferCall) -> None:
        """Has a rank carry out a call, before all steps that are published later. Does nothing if the group has
        failed or is closed."""
        body = encode(call)
        with self._publishing:
            if self._is_closing or self._state.phase is Phase.FAILED:
                return
            self._num_calls[rank] += 1
            number = int(self._num_calls[rank]).to_bytes(8, "little")
            self._publisher.send_multipart([CALL_TOPIC + bytes([rank]), number, body])

    def on_report(self, rank: int, transport: str, handle: Callable[[TransferReport], None]) -> None:
        """From now on `handle` gets what this transport of the rank reports, on the group's thread."""
        self._report_handlers[rank, transport] = handle

    def endpoints_of(self, rank: int) -> Mapping[str, Endpoint]:
        """The addresses of a rank's transports by name. That of a sender is empty."""
        return self._state.endpoints_of(rank)

    @property
    def identities(self) -> Sequence[str]:
        """The processes of the other ranks. See `kvrelay.process_identity`."""
        return self._state.identities

    # -- the end ------------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> str:
        """Ends the group because of an error of rank 0. Returns the first reason, which may be another: if a rank is
        lost, rank 0 has an error too."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.phase is Phase.FAILED, REASON_S)
            self._state.fail(reason)
            reason = self._state.failure
        self._wake()
        return reason

    def close(self) -> None:
        """Ends the ranks. Waits for those of this machine, and kills them if that takes long. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._publish(End(self._state.failure))
        self._wake()
        self._thread.join()
        os.close(self._wake_fd)
        os.close(self._wake_writer)
        self._context.close(LINGER_MS)

    # -- sockets ------------------------------------------------------------------------------------------------------

    def _open_sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        options = self._options
        publisher, results = self._context.socket(zmq.PUB), self._context.socket(zmq.PULL)
        if options.curve is not None:
            open_curve_gate(self._context, options.curve)
        for socket in (publisher, results):
            socket.set_hwm(0)  # without a limit ZMQ drops no message for a slow rank
            socket.setsockopt(zmq.IPV6, int(":" in options.host))
            if options.curve is not None:
                options.curve.guard_server(socket)
        results.setsockopt(zmq.MAXMSGSIZE, MAX_PUSHED_BYTES)
        try:
            if options.port:
                self.port = options.port
                publisher.bind(f"{tcp_host(options.host)}:{options.port}")
            else:
                self.port = publisher.bind_to_random_port(tcp_host(options.host))
        except zmq.ZMQError as error:
            raise RanksFailed(
                f"cannot listen for ranks on {options.host} port {options.port}: {error}; stop what listens there, or "
                f"name another rank_port"
            ) from None
        self._results_port = results.bind_to_random_port(tcp_host(options.host))
        return publisher, results

    def _publish(self, message: Published) -> int:
        body = encode(message)
        with self._publishing:
            self._num_published += 1
            number = self._num_published
            frames = [STEP_TOPIC, number.to_bytes(8, "little"), body, self._num_calls.tobytes()]
            self._publisher.send_multipart(frames)
        return number

    def _beat(self) -> None:
        with self._publishing:
            beat = Beat(self._options.group, self._num_published)
            self._publisher.send_multipart([BEAT_TOPIC, encode(beat)])

    def _announce(self) -> None:
        options = self._options
        self._publish(Announce(options.group, options.size, self._results_port, options.software, options.silence_s))

    def _wake(self) -> None:
        os.write(self._wake_writer, b"\0")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._start_processes()
            self._serve()
        except Exception as error:
            log.exception("the thread of the ranks failed")
            self._fail(f"the thread of the ranks failed: {error}")
        finally:
            self._end_processes()

    def _start_processes(self) -> None:
        options = self._options
        address = f"[{options.host}]:{self.port}" if ":" in options.host else f"{options.host}:{self.port}"
        log.info("%d ranks join at %s", options.size - 1, address)
        for each in self._make_commands(address):
            self._processes.append(RankProcess(each.rank, each.command, each.environ))

    def _serve(self) -> None:
        """Until the group is closed or has failed."""
        poller = zmq.Poller()
        for source in (self._results, self._wake_fd, *(process.fd for process in self._processes)):
            poller.register(source, zmq.POLLIN)
        beat_at = 0.0
        while not self._is_closing and self._state.phase is not Phase.FAILED:
            joining = self._state.phase is Phase.JOINING
            ready = dict(poller.poll(int(1000 * (ANNOUNCE_S if joining else self._options.beat_s))))
            self._receive()
            if self._is_closing:
                return
            self._note_exits(ready)
            now = time.monotonic()
            with self._changed:
                self._state.on_tick(now)
            if joining:
                self._announce()
            if now >= beat_at:
                self._beat()
                beat_at = now + self._options.beat_s / 2
        if self._state.phase is Phase.FAILED:
            self._fail(self._state.failure)

    def _receive(self) -> None:
        """Takes all messages that have arrived."""
        while True:
            try:
                raw = self._results.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(raw)
            except msgspec.DecodeError as error:
                log.warning("ignored a message that is none of a rank's: %s", error)
                continue
            if isinstance(message, TransferReport):
                self._take_report(message)
            with self._changed:
                before = self._state.phase
                self._state.on_message(message, time.monotonic())
                self._changed.notify_all()
            _log_message(message, before)

    def _take_report(self, report: TransferReport) -> None:
        handle = self._report_handlers.get((report.rank, report.transport))
        if handle is not None and self._state.has_joined(report.rank, report.process):
            handle(report)

    def _note_exits(self, ready: Mapping[object, int]) -> None:
        for process in self._processes:
            if process.fd not in ready:
                continue
            status = process.exit_status()
            if status is not None:
                with self._changed:
                    self._state.on_exit(process.rank, describe_exit(status))

    def _fail(self, reason: str) -> None:
        """Ends all ranks, so that rank 0 leaves a collective in which it waits for them."""
        log.error("the engine's ranks failed: %s", reason)
        for process in self._processes:
            process.kill()
        self._publish(End(reason))
        with self._changed:
            self._state.fail(reason)
            self._changed.notify_all()
        if not self.lost.done():
            self.lost.set_exception(DeviceLost(reason))

    def _end_processes(self) -> None:
        deadline = time.monotonic() + END_S
        for process in self._processes:
            if not process.wait(max(0.0, deadline - time.monotonic())):
                log.warning("rank %d did not end within %g s and is killed", process.rank, END_S)
            process.close()


def _log_message(message: Pushed, phase: Phase) -> None:
    match message:
        case Hello() if phase is Phase.JOINING:
            log.info("rank %d joined: %s", message.rank, message.where)
        case Progress():
            log.info("rank %d: %s", message.rank, message.text)
        case Ready():
            log.info("rank %d has loaded its part in %.1f s", message.rank, message.load_s)
        case _:
            pass
