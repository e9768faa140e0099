"""The parsers of commands that take all fields of one configuration class."""

from __future__ import annotations

from kvrelay.config.loader import DESCRIPTIONS, config_parser
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
