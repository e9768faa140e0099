"""The services' parsers, which take all fields of one configuration class, `kvrelay rank` and `kvrelay keys`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvrelay.config.loader import DESCRIPTIONS, config_parser, load_config
from kvrelay.config.ranks import RankConfig
from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig
from kvrelay.curve import CurveKey
from kvrelay.flag_parser import CommandFailed, FlagParser


def router_parser() -> FlagParser:
    return config_parser(RouterConfig, "kvrelay router", DESCRIPTIONS["router"])


def prefill_parser() -> FlagParser:
    return config_parser(WorkerConfig, "kvrelay prefill", DESCRIPTIONS["prefill"])


def decode_parser() -> FlagParser:
    return config_parser(WorkerConfig, "kvrelay decode", DESCRIPTIONS["decode"])


def rank_parser() -> FlagParser:
    return config_parser(RankConfig, "kvrelay rank", DESCRIPTIONS["rank"])


def rank(argv: Sequence[str]) -> int:
    """Runs until the worker ends. Returns the exit status: 1 if the rank could not go on."""
    config = load_config(RankConfig, argv, prog="kvrelay rank", description=DESCRIPTIONS["rank"])
    from kvrelay.ranks.launch import run_rank  # slow to import

    return run_rank(config)


def keys(argv: Sequence[str]) -> int:
    """Creates a key for a fleet, in a file or on standard output."""
    path = keys_parser().parse(argv).file
    key = CurveKey.new()
    text = key.text()
    if path == "-":
        sys.stdout.write(text)
        return 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise CommandFailed(f"cannot make {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    print(f"Key {key.fingerprint} is in {path}. All processes of the fleet need it: --curve-key-file {path}")
    return 0


def keys_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay keys",
        "Makes a fleet's secret key, for --curve-key-file of all its processes. Never writes over a file.",
        usage="kvrelay keys FILE",
    )
    parser.add_argument("file", metavar="FILE", help="where to, readable for its owner alone; -: standard output")
    return parser
