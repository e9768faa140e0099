"""Events into a handoff's state machines and instructions out of them, one JSON line each: for `kvrelay replay`.

A line says when (`at`, unix seconds), which machine (`machine`, `key`; `number` tells machines of one key apart), what
was called with which arguments, and what it answered. `born` is the first line of a machine, with what it was made of.
Lines hold prompts and output as token ids.

Where no log is kept nothing is wrapped, so it costs nothing.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.engine.batch import SequenceKey

log = logging.getLogger(__name__)

encoder = msgspec.json.Encoder(order="deterministic")
BORN = "born"


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
    """Appends to `path`. At `max_bytes` the file becomes `path.1`, in place of an earlier one: two files at most."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._numbers = itertools.count(1)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._is_broken = False

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

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
        try:
            self._file.write(encoder.encode(line) + b"\n")
            if self._file.tell() >= self._max_bytes:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            self._is_broken = True
            log.error("the event log ends here: %s", error)
