"""Events into a handoff's state machines and instructions out of them, one JSON line each: for `kvrelay replay`.

A line says when (`at`, unix seconds), which machine (`machine`, `key`; `number` tells machines of one key apart), what
was called with which arguments, and what it answered. `born` is the first line of a machine, with what it was made of.
Lines hold prompts and output as token ids.

Where no log is kept nothing is wrapped, so it costs nothing. Where one is, a line is encoded where it happens, because
what it tells of changes, and written by a thread of its own: a slow disk holds up no step. What that thread has not
written yet, some milliseconds' worth, is lost with a process that is killed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import msgspec

from kvrelay.protocol.sequence_key import SequenceKey

log = logging.getLogger(__name__)

encoder = msgspec.json.Encoder(order="deterministic")
BORN = "born"
MAX_WAITING_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 5.0


class MachineKind(msgspec.Struct, frozen=True):
    """Where a machine's class is, and which of its methods are events."""

    module: str
    name: str
    events: tuple[str, ...]


KINDS = {
    "sender": MachineKind(
        "kvrelay_prefill.handoff",
        "SenderHandoff",
        (
            "scheduled", "computed", "prefilled", "granted", "deferred", "refused", "decode_lost", "released",
            "committed", "resend", "reassigned", "cancel", "pushed", "transfer_failed", "drained",
        ),
    ),
    "receiver": MachineKind(
        "kvrelay_decode.handoff",
        "ReceiverHandoff",
        (
            "granted", "landed", "corrupted", "handed", "overdue", "aborted", "cancel", "sender_lost", "drained",
            "not_adopted",
        ),
    ),
    "attempts": MachineKind("kvrelay_router.dispatch.attempt", "SequenceAttempts", ("handle",)),
    "intake": MachineKind("kvrelay_router.dispatch.intake", "TokenIntake", ("handle",)),
}  # fmt: skip


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line. `out`: the instructions; `raised`: the error instead of them."""

    at: float
    machine: str
    key: tuple[str, int, int]
    number: int
    event: str
    args: msgspec.Raw
    out: msgspec.Raw
    raised: str = ""


def encode_named(value: Any) -> Any:
    """Instructions and events by the names of their classes, for a line."""
    if isinstance(value, list):
        return [encode_named(item) for item in value]
    return {type(value).__name__: value}


class EventLog:
    """Appends to `path`. At `max_bytes` the file becomes `path.1`, in place of an earlier one: two files at most.

    Where the disk is behind by `MAX_WAITING_BYTES`, the log ends: one with holes would replay to nonsense.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._numbers = itertools.count(1)
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._waiting_bytes = 0
        self._lock = Lock()
        self._is_broken = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = _Writer(path, max_bytes)
        self._thread = Thread(target=self._write_out, name="event-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for what is not written yet, but not longer than a stuck disk deserves. Idempotent."""
        self._lines.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def watch(self, kind: str, key: SequenceKey, machine: object, *born: object) -> None:
        """Records every event of this machine from now on. `born`: its constructor's arguments."""
        number = next(self._numbers)
        self._write(kind, key, number, BORN, list(born), [], "")
        inside = False

        def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def record(*args: Any, **more: Any) -> Any:
                nonlocal inside
                if inside:
                    return call(*args, **more)
                taken = [list(value) if isinstance(value, Iterator) else value for value in args]  # it is read twice
                said = [encode_named(taken[0])] if name == "handle" else [*taken, *more.values()]
                before = encoder.encode(said)
                inside, raised, out = True, "", None
                try:
                    out = call(*taken, **more)
                except Exception as error:
                    raised = type(error).__name__
                    raise
                finally:
                    inside = False
                    self._write(kind, key, number, name, msgspec.Raw(before), out or [], raised)
                return out

            return record

        for name in KINDS[kind].events:
            setattr(machine, name, recorded(name, getattr(machine, name)))

    def _write(self, kind: str, key: SequenceKey, number: int, event: str, args: Any, out: Any, raised: str) -> None:
        if self._is_broken:
            return
        line = Line(
            at=time.time(),
            machine=kind,
            key=key,
            number=number,
            event=event,
            args=args if isinstance(args, msgspec.Raw) else msgspec.Raw(encoder.encode(args)),
            out=msgspec.Raw(encoder.encode(encode_named(out))),
            raised=raised,
        )
        self._put(encoder.encode(line) + b"\n")

    def _put(self, line: bytes) -> None:
        with self._lock:
            self._waiting_bytes += len(line)
            is_too_far = self._waiting_bytes > MAX_WAITING_BYTES
        if is_too_far:
            self._end(f"the disk is {MAX_WAITING_BYTES >> 20} MiB behind")
        else:
            self._lines.put(line)

    def _end(self, why: object) -> None:
        self._is_broken = True
        log.error("the event log ends here: %s", why)

    def _write_out(self) -> None:
        """On the log's own thread: all that is there in one write."""
        is_last = False
        while not is_last:
            lines = [self._lines.get(), *(self._lines.get_nowait() for _ in range(self._lines.qsize()))]
            is_last = None in lines
            taken = [line for line in lines if line is not None]
            if not self._is_broken:
                try:
                    self._writer.write(taken)
                except OSError as error:
                    self._end(error)
            with self._lock:
                self._waiting_bytes -= sum(map(len, taken))
        self._writer.close()


class _Writer:
    """The files."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size

    def write(self, lines: list[bytes]) -> None:
        """In as few calls as the files' size allows. Raises OSError."""
        together: list[bytes] = []
        for line in lines:
            together.append(line)
            self._size += len(line)
            if self._size >= self._max_bytes:
                self._write_all(b"".join(together))
                self._begin_anew()
                together = []
        self._write_all(b"".join(together))

    def _write_all(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def _begin_anew(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._file = self._path.open("ab", buffering=0)
        self._size = 0

    def close(self) -> None:
        self._file.close()
