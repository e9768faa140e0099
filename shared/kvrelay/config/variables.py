"""Finds `KVRELAY_*` variables that nothing reads, which are misspelled or of another version."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

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
