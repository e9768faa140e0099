"""The flags of `kvrelay up`: its own and those of the services, the common ones first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.config.common import CommonConfig
from kvrelay.config.loader import add_config_flag, add_flags
from kvrelay.config.router import RouterConfig
from kvrelay.config.up_config import UpConfig
from kvrelay.config.without_effect import ADVICE, DECIDED
from kvrelay.config.worker import WorkerConfig
from kvrelay.flag_parser import FlagParser

_SOURCES = (UpConfig, CommonConfig, WorkerConfig, RouterConfig)
COMMON_GROUPS: dict[str, tuple[str, ...]] = {
    "model": ("model", "served_model_name", "dtype", "max_model_len"),
    "workers": ("prefill", "decode", "tensor_parallel_size", "gpus", "device"),
    "memory and batches": ("kv_memory_bytes", "memory_utilization", "token_budget", "max_running"),
    "endpoint": ("host", "port", "api_keys_file", "redis_url", "metrics_port"),
    "logs and configuration": ("detach", "state_dir", "log_level"),
}
"""Fields that `kvrelay up --help` shows."""
OWN_FIELDS = frozenset(
    {*DECIDED, "static_workers", "port", "host", "redis_url", "http_port", "local_ranks", "metrics_port"}
)
"""Fields of services that `up` sets itself, or that would be the same for all its services."""


def parse_up_flags(argv: Sequence[str] | None) -> dict[str, Any]:
    """The given values by field. Exits the process for `--help` and for invalid flags."""
    parser = up_parser()
    flags = vars(parser.parse(argv))
    model = flags.pop("MODEL", None)
    if model is not None and flags.setdefault("model", model) != model:
        parser.error(f"two models: {model} and --model {flags['model']}")
    return flags


def up_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay up",
        "Starts Redis, prefill and decode workers and the router on this machine, and stops them together.",
        usage="kvrelay up [MODEL] [flags]",
        advice=ADVICE,
        with_version=True,
    )
    parser.add_argument("MODEL", nargs="?", help="the same as --model")
    common: set[str] = set()
    for title, names in COMMON_GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            owner = next(each for each in _SOURCES if name in each.model_fields)
            add_flags(group, owner, frozenset(owner.model_fields) - {name})
        common |= set(names)
    add_config_flag(group)
    add_flags(parser.add_further_group("services"), UpConfig, frozenset(common))
    add_flags(parser.add_further_group("all services"), CommonConfig, OWN_FIELDS | common)
    common |= set(CommonConfig.model_fields)
    add_flags(parser.add_further_group("every worker"), WorkerConfig, OWN_FIELDS | common)
    skip = OWN_FIELDS | common | set(WorkerConfig.model_fields)
    add_flags(parser.add_further_group("the router"), RouterConfig, skip)
    return parser
