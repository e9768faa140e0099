"""The record that a worker publishes about itself."""

from __future__ import annotations

from typing import Literal

import msgspec

RECORD_PAGE = "/worker"
"""Path of the record as JSON on a worker's page server."""

NO_SLOT = -1
"""`slot` of a record that has not joined."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One incarnation of a worker. `block_size` and `max_model_len` are in tokens.

    Change it with `msgspec.structs.replace`.
    """

    worker_id: str
    role: Literal["prefill", "decode"]
    incarnation: str
    address: str
    """Address for control messages, `tcp://host:port`."""
    transfer: dict[str, str] = {}
    """Address of each transport that can receive KV blocks."""
    model: str
    """Model name for clients."""
    fingerprint: str
    """Hash of weights, types, KV layout, block size and tokenizer. Only workers with equal fingerprints are paired."""
    protocol_version: int
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_running: int = 0
    """Maximum running sequences."""
    jump_forward: bool = False
    """Whether tokens that a grammar forces join without being sampled."""
    slot: int = NO_SLOT
    draining: bool = False
    load: dict[str, float] = {}
    block_bytes: int = 0
    """Bytes of a block with all layers."""
    group: str = ""
    """Id of rank 0 of its group with data-parallel attention; empty: it is in none."""
    token_budget: int = 0
    """Maximum tokens of a step."""
    device: str = ""
    """For display: cpu, or the GPU's name and UUID; empty: simulated."""
    kv_dtype: str = ""
    """For display: element type of KV; empty: simulated."""
    tokenizer: str = ""
    """See `kvrelay.tokenizer_identity`; empty: unknown."""
    process: str = ""
    """The worker's process, see `kvrelay.process_identity`."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerRecord)


def encode_record(record: WorkerRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> WorkerRecord:
    """Raises msgspec.DecodeError or ValidationError for an invalid record."""
    return _decoder.decode(data)


def record_as_json(record: WorkerRecord) -> bytes:
    return msgspec.json.encode(record)


def record_from_json(data: bytes) -> WorkerRecord:
    """Raises msgspec.DecodeError or ValidationError for an invalid record."""
    return msgspec.json.decode(data, type=WorkerRecord)
