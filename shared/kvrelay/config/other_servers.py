"""Flags of vLLM and SGLang that kvrelay does not have, with what to use in their place.

Flags that mean the same as one of kvrelay's are further names of that flag and stand with its field.
"""

from __future__ import annotations

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
    "--cuda-graph-bs": "use --cuda-graph-sizes",
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
    "--enable-metrics": "use --metrics-port, or --metrics-on-api-port for /metrics on the port of the API",
    "--disable-log-requests": "requests are not logged",
    "--disable-log-stats": "there are no such lines in the log; see kvrelay top",
    "--uvicorn-log-level": "use --log-level",
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
}
"""Advice on flags of other servers that kvrelay does not have."""
