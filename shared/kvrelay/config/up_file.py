"""What the configuration file and the environment may set for the services of `kvrelay up`, which sets some fields
itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

UP_FIELDS_OF_ROUTER = ("host", "port")
"""Fields of the router that `kvrelay up` takes from `[router]` as its own."""

_NAMES = "kvrelay up names its services itself"
_PORTS = "kvrelay up chooses the ports between its services, on the loopback"
_RANKS = "kvrelay up starts all ranks itself"
DECIDED = {
    "worker_id": _NAMES,
    "router_id": _NAMES,
    "num_workers": "set workers_per_process in [up]",
    "advertise_host": _PORTS,
    "message_host": _PORTS,
    "message_port": _PORTS,
    "transfer_port": _PORTS,
    "rank_host": _RANKS,
    "rank_port": _RANKS,
    "data_parallel_rank": _RANKS,
    "engine": _RANKS,
    "rank": _RANKS,
}
"""Fields of services that `kvrelay up` sets itself wherever they stand, and why or what to set instead."""

_OF_WORKERS = {"host": _PORTS, "port": _PORTS, "redis_url": "set it at the top level or in [up]"}
_DECIDED_IN = {
    "worker": _OF_WORKERS,
    "prefill": _OF_WORKERS,
    "decode": _OF_WORKERS,
    "router": {"redis_url": _OF_WORKERS["redis_url"]},
}


def refused_fields(content: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields a message for each field of the file that `kvrelay up` would not use. `content`: tables by name, with the
    top level as ""."""
    for table, fields in content.items():
        for name in fields:
            if table == "rank":
                reason: str | None = f"{_RANKS}, with the settings of the workers"
            elif table == "up":
                reason = None
            elif table == "router" and name == "metrics_port" and name in content["up"]:
                reason = "[up] metrics_port counts from the router's on"
            else:
                reason = DECIDED.get(name) or _DECIDED_IN.get(table, {}).get(name)
            if reason is not None:
                where = f"[{table}] {name}" if table else name
                yield f"{where} has no effect with kvrelay up: {reason}"


def ignored_variables(environ: Mapping[str, str], prefix: str) -> Iterator[str]:
    """Yields a message for each variable of a field that `kvrelay up` sets itself."""
    for name, reason in DECIDED.items():
        if environ.get(variable := f"{prefix}{name.upper()}"):
            yield f"{variable} has no effect with kvrelay up: {reason}"
