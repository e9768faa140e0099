"""`kvrelay replay FILE...`: feeds recorded events to fresh machines, compares the answers, tells a request's tale."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.telemetry.event_log import BORN, KINDS, Line, encode_named, encoder


@dataclass
class Replayed:
    """What a replay found. `differences`: one text each, with file and line."""

    num_events: int = 0
    num_machines: int = 0
    num_without_birth: int = 0
    differences: list[str] = field(default_factory=list)


def replay_lines(lines: Iterable[tuple[str, bytes]]) -> Replayed:
    """`lines`: each with its place. Events of a machine whose first line is not there are counted and left out."""
    found = Replayed()
    machines: dict[tuple[str, str, int], Any] = {}
    for place, text in lines:
        try:
            line = msgspec.json.decode(text, type=Line)
            source = place.rpartition(":")[0].removesuffix(".1")
            name = (source, line.machine, line.number)
            if line.event == BORN:
                machines[name] = _born(line)
                found.num_machines += 1
                continue
            machine = machines.get(name)
            if machine is None:
                found.num_without_birth += 1
                continue
            found.num_events += 1
            given, recorded = _answer(machine, line), (bytes(line.out), line.raised)
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


def story(lines: Iterable[tuple[str, bytes]], request: str) -> Iterator[str]:
    """The events of one request over all its machines, in the order of time."""
    of_it = [msgspec.json.decode(text, type=Line) for _, text in lines]
    of_it = sorted((line for line in of_it if line.key[0] == request), key=lambda line: line.at)
    for line in of_it:
        at = datetime.fromtimestamp(line.at, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        out = line.raised or bytes(line.out).decode().removeprefix("[]")
        said = _shortened(bytes(line.args).decode())
        yield f"{at} {line.machine}#{line.number} attempt {line.key[1]}: {line.event}{said}" + (
            f" -> {_shortened(out)}" if out else ""
        )


def replay(arguments: Sequence[str]) -> int:
    """The command; returns the exit status: 1 where a machine answers otherwise than recorded."""
    parser = argparse.ArgumentParser(prog="kvrelay replay", description=__doc__)
    parser.add_argument("file", nargs="+", type=Path, help="event logs of one or more services, FILE.1 before FILE")
    parser.add_argument("--request", help="tell the story of this request")
    parsed = parser.parse_args(arguments)
    try:
        lines = [
            (f"{path}:{number}", text)
            for path in parsed.file
            for number, text in enumerate(path.read_bytes().splitlines(), 1)
        ]
    except OSError as error:
        sys.stderr.write(f"kvrelay replay: {error}\n")
        return 2
    found = replay_lines(lines)
    for difference in found.differences:
        print(difference)
    if parsed.request is not None and not found.differences:
        for text in story(lines, parsed.request):
            print(text)
    if found.num_without_birth:
        print(f"left out: {found.num_without_birth} events of machines that began before the log")
    print(f"{found.num_events} events of {found.num_machines} machines: {len(found.differences)} differences")
    return 1 if found.differences else 0


def _shortened(text: str, at_most: int = 160) -> str:
    return text if len(text) <= at_most else text[: at_most - 3] + "..."


def _class_of(kind: str) -> Any:
    where = KINDS[kind]
    return getattr(importlib.import_module(where.module), where.name)


def _born(line: Line) -> Any:
    made = _class_of(line.machine)
    return made(**_arguments(made.__init__, line))


def _answer(machine: Any, line: Line) -> tuple[bytes, str]:
    if line.event not in KINDS[line.machine].events:
        raise KeyError(line.event)
    arguments = _event(machine, line) if line.event == "handle" else _arguments(getattr(machine, line.event), line)
    try:
        return encoder.encode(encode_named(getattr(machine, line.event)(**arguments) or [])), ""
    except msgspec.ValidationError:
        raise
    except Exception as error:
        return b"[]", type(error).__name__


def _event(machine: Any, line: Line) -> dict[str, Any]:
    """A router's event goes by its class's name."""
    ((name, content),) = msgspec.json.decode(line.args)[0].items()
    module = importlib.import_module(type(machine).__module__)
    (parameter,) = inspect.signature(machine.handle).parameters
    return {parameter: msgspec.convert(content, getattr(module, name))}


def _arguments(call: Callable[..., Any], line: Line) -> dict[str, Any]:
    """As the method's annotations say, which are what the machine was called with."""
    hints = typing.get_type_hints(call)
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    values = msgspec.json.decode(line.args, type=list[msgspec.Raw])
    if len(values) != len(names):
        raise TypeError(f"{line.event} takes {len(names)} arguments, not {len(values)}")
    return {
        name: msgspec.json.decode(value, type=_concrete(hints[name])) for name, value in zip(names, values, strict=True)
    }


def _concrete(hint: Any) -> Any:
    """Lists for what is annotated as any iterable."""
    return list[typing.get_args(hint)[0]] if typing.get_origin(hint) is Iterable else hint  # type: ignore[misc]
