"""Types of flags: numbers within bounds, lists, times with a unit, service-level objectives, files to write. Each
raises argparse.ArgumentTypeError with the text and what is allowed."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"([0-9]*\.?[0-9]+)(us|ms|s|min|h)")

ValueT = TypeVar("ValueT")


def result_file(text: str) -> Path:
    """A file that a command writes at its end: found to be impossible before it begins."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file, and is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be in a directory that exists: there is no {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} must be a file that can be written: permission denied")
    return path


def number(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number from {least:g} to {most:g}")
        return value

    return read


def whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} to {most}")
        return int(text)

    return read


def list_of(read_one: Callable[[str], ValueT]) -> Callable[[str], list[ValueT]]:
    return lambda text: [read_one(each.strip()) for each in text.split(",")]


def seconds(text: str) -> float:
    """A time with its unit, in seconds: `500ms`, `2s`, `1.5min`."""
    match = _TIME.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a time with its unit ({', '.join(UNITS_S)}), above 0, as in 500ms or 2s"
        )
    return float(match[1]) * UNITS_S[match[2]]


def objective(*names: str) -> Callable[[str], tuple[str, float]]:
    """`NAME=TIME` for one of these names, as the name and seconds."""

    def read(text: str) -> tuple[str, float]:
        name, _, time = text.strip().partition("=")
        forms = ", ".join(f"{each}=TIME" for each in names)
        if name not in names:
            raise argparse.ArgumentTypeError(f"{text!r} must be one of {forms}, as in {names[0]}=500ms")
        return name, seconds(time)

    return read
