"""What a worker tells the fleet about itself."""

from __future__ import annotations

from typing import Literal

import msgspec

RECORD_PAGE = "/worker"
"""Where a worker's page server has its record, as JSON."""

NO_SLOT = -1
"""The slot of a record that has not joined."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One start of one worker. `block_size` and `max_model_len` in tokens.

    Derive a changed one with `msgspec.structs.replace`. Unknown fields of a newer version are ignored.
    """

    worker_id: str
    role: Literal["prefill", "decode"]
    incarnation: str
    address: str
    """The inbox for control messages, `tcp://host:port`."""
    transfer: dict[str, str] = {}
    """Address of each transport on which KV blocks can be taken in."""
    model: str
    """The name that clients use."""
    fingerprint: str
    """Of weights, dtypes, KV layout, block size and tokenizer: only workers with equal ones hand over to each other."""
    protocol_version: int
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_running: int = 0
    """Sequences that run at a time; 0 from a version that does not tell, which knows no beam search either."""
    group_samples: bool = False
    """Whether it runs the samples of a request at once; false from a version that does not tell."""
    slot: int = NO_SLOT
    draining: bool = False
    load: dict[str, float] = {}
    block_bytes: int = 0
    """Of one block of all layers; 0: a worker of an older version."""
    delayer_group: str = ""
    """Of decode workers that time their prompts together; empty: none."""
    token_budget: int = 0
    """Tokens that one of its steps holds; 0: a worker of an older version."""
    device: str = ""
    """What computes, for people: cpu, or a GPU's name and UUID; empty: simulated, or of an older version."""
    kv_dtype: str = ""
    """Of keys and values in its blocks, for people; empty: simulated, or of an older version."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerRecord)


def encode_record(record: WorkerRecord) -> bytes:
    """As msgpack."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> WorkerRecord:
    """Raises msgspec.DecodeError or ValidationError for what is no record."""
    return _decoder.decode(data)


def record_as_json(record: WorkerRecord) -> bytes:
    """For a page."""
    return msgspec.json.encode(record)


def record_from_json(data: bytes) -> WorkerRecord:
    """Raises msgspec.DecodeError or ValidationError for what is no record."""
    return msgspec.json.decode(data, type=WorkerRecord)
