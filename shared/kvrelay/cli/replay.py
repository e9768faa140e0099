"""`kvrelay replay FILE...` feeds recorded events to fresh state machines and compares the instructions.

With `--request` it also prints the events of one request in the order of time.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.flag_parser import CommandFailed, FlagParser
from kvrelay.telemetry.event_log import BORN, Line, encode_answer

MACHINES = {
    "sender": ("kvrelay.handoff.sender", "SenderHandoff"),
    "receiver": ("kvrelay.handoff.receiver", "ReceiverHandoff"),
    "attempts": ("kvrelay_router.dispatch.attempt", "SequenceAttempts"),
    "intake": ("kvrelay_router.dispatch.running_request", "TokenIntake"),
}
"""Module and class of each kind of machine. They are imported by name, because the services import this package."""


@dataclass
class Replayed:
    """The result of a replay. `differences` are texts for people, each with file and line."""

    num_events: int = 0
    num_machines: int = 0
    num_without_birth: int = 0
    differences: list[str] = field(default_factory=list)


def replay_lines(lines: Iterable[tuple[str, bytes]]) -> Replayed:
    """Takes (place, line) pairs. Events of a machine whose first line is missing are counted and left out."""
    found = Replayed()
    machines: dict[tuple[str, str, int], Any] = {}
    for place, text in lines:
        try:
            line = msgspec.json.decode(text, type=Line)
            source = place.rpartition(":")[0].removesuffix(".1")
            name = (source, line.machine, line.number)
            if line.event == BORN:
                machines[name] = _make_machine(line)
                found.num_machines += 1
                continue
            machine = machines.get(name)
            if machine is None:
                found.num_without_birth += 1
                continue
            found.num_events += 1
            given, recorded = _handle(machine, line), (bytes(line.out), line.raised)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            found.differences.append(f"{place}: not a line of an event log: {error}")
            continue
        if given != recorded:
            found.differences.append(
                f"{place}: {line.machine} {'/'.join(map(str, line.key))} {line.event}{bytes(line.args).decode()}\n"
                f"  recorded {recorded[0].decode()} {recorded[1]}\n"
                f"  now      {given[0].decode()} {given[1]}"
            )
    return found


def events_of_request(lines: Iterable[tuple[str, bytes]], request: str) -> Iterator[str]:
    """One line of text per event of the request, over all its machines, in the order of time."""
    of_it = [msgspec.json.decode(text, type=Line) for _, text in lines]
    of_it = sorted((line for line in of_it if line.key[0] == request), key=lambda line: line.at)
    for line in of_it:
        at = datetime.fromtimestamp(line.at, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        out = line.raised or bytes(line.out).decode().removeprefix("[]")
        arguments = _shortened(bytes(line.args).decode())
        yield f"{at} {line.machine}#{line.number} attempt {line.key[1]}: {line.event}{arguments}" + (
            f" -> {_shortened(out)}" if out else ""
        )


def replay(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit status, which is 1 if a machine answers differently than recorded."""
    parsed = replay_parser().parse(arguments)
    try:
        lines = [
            (f"{path}:{number}", text)
            for path in parsed.file
            for number, text in enumerate(path.read_bytes().splitlines(), 1)
        ]
    except OSError as error:
        raise CommandFailed(f"cannot read {error.filename}: {error.strerror}", 2) from None
    found = replay_lines(lines)
    for difference in found.differences:
        print(difference)
    if parsed.request is not None and not found.differences:
        for text in events_of_request(lines, parsed.request):
            print(text)
    if found.num_without_birth:
        print(f"left out: {found.num_without_birth} events of machines that began before the log")
    print(f"{found.num_events} events of {found.num_machines} machines: {len(found.differences)} differences")
    return 1 if found.differences else 0


def replay_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay replay",
        "Feeds recorded events to fresh state machines and compares the instructions.",
        usage="kvrelay replay FILE... [flags]",
    )
    parser.add_argument(
        "file", metavar="FILE", nargs="+", type=Path, help="event logs of one or more services, FILE.1 before FILE"
    )
    parser.add_argument("--request", metavar="ID", help="print the events of this request, in the order of time")
    return parser


def _shortened(text: str, at_most: int = 160) -> str:
    return text if len(text) <= at_most else text[: at_most - 3] + "..."


def _class_of(kind: str) -> Any:
    module, name = MACHINES[kind]
    return getattr(importlib.import_module(module), name)


def _make_machine(line: Line) -> Any:
    machine_class = _class_of(line.machine)
    hints = typing.get_type_hints(machine_class.__init__)
    names = list(inspect.signature(machine_class).parameters)
    values = msgspec.json.decode(line.args, type=list[msgspec.Raw])
    if len(values) != len(names):
        raise TypeError(f"{line.machine} takes {len(names)} arguments, not {len(values)}")
    pairs = zip(names, values, strict=True)
    return machine_class(**{name: msgspec.json.decode(value, type=hints[name]) for name, value in pairs})


def _handle(machine: Any, line: Line) -> tuple[bytes, str]:
    """The encoded instructions, or the error."""
    event = msgspec.json.decode(line.args, type=_events_of(line.machine)[line.event])
    try:
        return encode_answer(machine.handle(event)), ""
    except Exception as error:
        return b"[]", type(error).__name__


@cache
def _events_of(kind: str) -> dict[str, Any]:
    """The classes in the annotation of the only parameter of the machine's `handle`, by name."""
    hints = typing.get_type_hints(_class_of(kind).handle)
    (parameter,) = hints.keys() - {"return"}
    return {event.__name__: event for event in typing.get_args(hints[parameter]) or (hints[parameter],)}
