"""The services' parsers, which take all fields of one configuration class, and `kvrelay rank`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvrelay.config.loader import DESCRIPTIONS, ConfigError, config_parser, load_config
from kvrelay.config.ranks import RankConfig
from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig
from kvrelay.flag_parser import FlagParser


def router_parser() -> FlagParser:
    return config_parser(RouterConfig, "kvrelay router", DESCRIPTIONS["router"])


def prefill_parser() -> FlagParser:
    return config_parser(WorkerConfig, "kvrelay prefill", DESCRIPTIONS["prefill"])


def decode_parser() -> FlagParser:
    return config_parser(WorkerConfig, "kvrelay decode", DESCRIPTIONS["decode"])


def rank_parser() -> FlagParser:
    return config_parser(RankConfig, "kvrelay rank", DESCRIPTIONS["rank"])


def rank(argv: Sequence[str]) -> int:
    """Runs until the worker ends. Returns the exit status: 1 if the rank could not go on, 2 for invalid flags."""
    try:
        config = load_config(RankConfig, argv, prog="kvrelay rank", description=DESCRIPTIONS["rank"])
    except ConfigError as error:
        print(f"kvrelay rank: {error}", file=sys.stderr)
        return 2
    from kvrelay.ranks.launch import run_rank  # slow to import

    return run_rank(config)
