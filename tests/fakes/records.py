"""Registered workers that nobody runs."""

from __future__ import annotations

from typing import Any

from kvrelay.fleet import WorkerRecord


def worker_record(**values: Any) -> WorkerRecord:
    """With these values, and others that fit together."""
    known: dict[str, Any] = {
        "worker_id": "w",
        "role": "prefill",
        "incarnation": "0000000000000001",
        "address": "tcp://127.0.0.1:5000",
        "model": "m",
        "fingerprint": "f",
        "protocol_version": 1,
        "block_size": 16,
        "num_blocks": 100,
        "max_model_len": 100,
        "vocab_size": 100,
    }
    return WorkerRecord(**known | values)
