"""Names that would have no effect: `KVRELAY_*` variables that nothing reads, fields of services that `kvrelay up` sets
itself, and flags of vLLM and SGLang that kvrelay does not have. Other servers' flags that mean the same as one of
kvrelay's are further names of that flag and are listed with its field.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvrelay.flag_parser import closest

ENV_PREFIX = "KVRELAY_"

_OTHERS = frozenset(
    {
        *("CONFIG", "CACHE_DIR", "API_KEY", "URL"),
        "RANK_PARENT",  # a worker sets it for its ranks
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


_SWITCHED_PARSERS = "tools and reasoning are parsed without it; --tool-parser and --reasoning-parser choose the format"
_NO_GRAPHS = "use --no-cuda-graphs"
_TWO_ROLES = "kvrelay up starts workers of both roles (--prefill N --decode N), which find each other"
_NO_LORA = "adapters are not supported; merge them into the weights"
_ROUTERS = "further routers are processes of their own, on other ports or with --reuse-port"
_OF_REQUESTS = "it is a field of requests"
_TLS = "put a proxy that ends TLS in front of the router"
_CODE = "models run in code that is installed; none is loaded from their repositories"
_TOKENIZER = "the tokenizer is that of the model's directory"
_HUB = "name a directory; the Hugging Face cache is where HF_HOME says"
_DRAFT_MODEL = "drafts come from repeated text (--speculation), not from a second model"

ADVICE = {
    "--workers": "workers are --prefill and --decode; " + _ROUTERS,
    "--api-server-count": _ROUTERS,
    "--api-key": "process lists show flags; put keys into a file (--api-keys-file) or into KVRELAY_API_KEYS",
    "--enable-auto-tool-choice": _SWITCHED_PARSERS,
    "--enable-reasoning": _SWITCHED_PARSERS,
    "--chat-template": "the template is that of the model's directory (chat_template.jinja)",
    "--generation-config": "sampling defaults are those of generation_config.json in the model's directory",
    "--enable-chunked-prefill": "prompts are cut by --scheduler sarathi, the default; --token-budget sets the size",
    "--no-enable-chunked-prefill": "use --scheduler vllm, which computes prompts whole",
    "--enforce-eager": _NO_GRAPHS,
    "--disable-cuda-graph": _NO_GRAPHS,
    "--disable-radix-cache": "use --no-prefix-cache",
    "--disable-overlap-schedule": "use --overlap off",
    "--no-async-scheduling": "use --overlap off",
    "--async-scheduling": "use --overlap on",
    "--schedule-policy": "use --queue-order",
    "--scheduling-policy": "use --queue-order",
    "--speculative-config": _DRAFT_MODEL,
    "--speculative-algorithm": _DRAFT_MODEL,
    "--speculative-draft-model-path": _DRAFT_MODEL,
    "--kv-transfer-config": _TWO_ROLES,
    "--disaggregation-mode": _TWO_ROLES,
    "--disaggregation-transfer-backend": "use --transfer",
    "--disaggregation-bootstrap-port": "workers find each other through Redis (--redis)",
    "--kv-cache-memory-bytes": "use --kv-memory-bytes",
    "--cuda-graph-sizes": "sizes are chosen by --max-running; --no-cuda-graphs turns graphs off",
    "--cuda-graph-bs": "sizes are chosen by --max-running; --no-cuda-graphs turns graphs off",
    "--num-speculative-tokens": "the number of drafts adapts to how many are accepted",
    "--schedule-conservativeness": "use --new-token-ratio",
    "--enable-dp-attention": "use --data-parallel-size, with which attention is whole in each rank",
    "--enable-cache-report": "usage has the cached tokens of every answer",
    "--enable-hierarchical-cache": "prefixes are cached in the pool alone; raise --kv-memory-bytes",
    "--otlp-traces-endpoint": "set OTEL_EXPORTER_OTLP_ENDPOINT",
    "--tokenizer": _TOKENIZER,
    "--tokenizer-path": _TOKENIZER,
    "--tokenizer-mode": _TOKENIZER,
    "--trust-remote-code": _CODE,
    "--revision": _HUB,
    "--download-dir": _HUB,
    "--hf-token": "set HF_TOKEN",
    "--seed": _OF_REQUESTS,
    "--random-seed": _OF_REQUESTS,
    "--guided-decoding-backend": "grammars are compiled by one library",
    "--grammar-backend": "grammars are compiled by one library",
    "--enable-lora": _NO_LORA,
    "--lora-modules": _NO_LORA,
    "--lora-paths": _NO_LORA,
    "--enable-metrics": "use --metrics-port; with the port of the API, /metrics is on that",
    "--disable-log-requests": "requests are not logged",
    "--disable-log-stats": "there are no such lines in the log; see kvrelay top",
    "--uvicorn-log-level": "use --log-level",
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
}
"""Advice on flags of other servers that kvrelay does not have."""
