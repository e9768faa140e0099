"""Values that would have no effect: `KVRELAY_*` variables that nothing reads, and fields of services that `kvrelay up`
sets itself."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvrelay.flag_parser import closest

ENV_PREFIX = "KVRELAY_"

_OTHERS = frozenset(
    {
        *("CONFIG", "CACHE_DIR", "API_KEY", "URL"),
        "RANK_PARENT",  # of a rank, set by its worker
        # read by the files in deploy/ and by scripts/
        "GRAFANA_PASSWORD_DIR",
        *(
            "PUBLISH",
            "MODELS_DIR",
            "API_KEYS_DIR",
            "REDIS_PASSWORD_DIR",
            "TORCH_INDEX",
            "PREFILL_GPU",
            "DECODE_GPU",
            "OTLP_ENDPOINT",
        ),
    }
)
_OTHER_PATTERNS = re.compile(
    r"(TEST|INHERITED)_.+"
    r"|.+_(IMAGE|PUBLISH)"
    r"|(.+_)?SERVICE_(HOST|PORT(_.+)?)|(.+_)?PORT_\d+_(TCP|UDP)(_.+)?"  # Kubernetes sets these for each Service
)

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


def unknown_variables(environ: Mapping[str, str], fields: Collection[str]) -> Iterator[str]:
    """Yields a message for each `KVRELAY_*` variable that is neither of a field nor one of the others. An empty one
    counts as unset."""
    known = {f"{ENV_PREFIX}{field.upper()}" for field in fields}
    for name, value in environ.items():
        rest = name.removeprefix(ENV_PREFIX)
        if rest == name or not value or name in known or rest in _OTHERS or _OTHER_PATTERNS.fullmatch(rest):
            continue
        if rest.endswith("_PORT") and value.startswith(("tcp://", "udp://")):  # also of a Service of Kubernetes
            continue
        yield f"{name} is not a known variable and has no effect{closest(name, known)}"


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
