"""`kvrelay keys FILE`: creates a key for a fleet."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvrelay.curve import CurveKey
from kvrelay.flag_parser import FlagParser


def keys(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 if the file cannot be created."""
    path = keys_parser().parse(argv).file
    text = CurveKey.new().text()
    if path == "-":
        sys.stdout.write(text)
        return 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        print(f"kvrelay keys: cannot make {path}: {error.strerror}", file=sys.stderr)
        return 1
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    print(f"A new key is in {path}. All processes of the fleet need it: --curve-key-file {path}")
    return 0


def keys_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay keys",
        "Makes a fleet's secret key, for --curve-key-file of all its processes. Never writes over a file.",
        usage="kvrelay keys FILE",
    )
    parser.add_argument("file", metavar="FILE", help="where to, readable for its owner alone; -: standard output")
    return parser
