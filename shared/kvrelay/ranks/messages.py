"""Messages between the engine (rank 0) and the other ranks, and their encoding.

The engine publishes to all ranks: `Announce` until every rank has joined, `Start`, steps, `Beat`, `End`. Published
messages are numbered without gaps, so a rank notices if one is lost. Ranks push to the engine: `Hello`, `Progress`,
`Ready`, `Done`, `RankFailed`, `RankAlive`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.ranks.transfer_messages import TransferReport, TransferSettings
from kvrelay.step.batch import WorkerBatch

RANK_PROTOCOL = 6
"""Changes with every change of these messages."""
MAX_RANKS = 64


class Software(msgspec.Struct, array_like=True, frozen=True):
    """The versions of a rank's software. They must be equal on all ranks."""

    protocol: int
    kvrelay: str
    torch: str

    def __str__(self) -> str:
        return f"kvrelay {self.kvrelay} (rank protocol {self.protocol}) with torch {self.torch}"


class RankSettings(msgspec.Struct, array_like=True, frozen=True):
    """What a rank loads. All ranks load the same, each its part."""

    model: str
    size: int
    init_address: str  # tcp://HOST:PORT of the rendezvous for the ranks' tensors
    timeout_s: float  # seconds to wait for the other ranks at that address
    dtype: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int | None
    kv_memory_bytes: int
    pool_sizing: tuple[float, int, int, bool] | None  # the fields of PoolSizing, for a share of the memory
    swap_bytes: int | None
    max_model_len: int | None
    fused_layers: bool
    quantization: Literal["none", "int8", "int4"]
    load_format: Literal["auto", "dummy"]
    transfers: TransferSettings | None = None  # None: KV stays in the worker
    num_stages: int = 1  # of a pipeline, among which the ranks are divided


class PoolFacts(msgspec.Struct, array_like=True, frozen=True):
    """The facts of a rank's model and pool that must be equal on all ranks."""

    model: str  # digest over config, weights and tokenizer
    dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    num_swap_slots: int
    max_model_len: int


# -- published by the engine ------------------------------------------------------------------------------------------


class Announce(msgspec.Struct, array_like=True, frozen=True, tag="announce"):
    """Ranks may join the group `group`: they connect to `results_port` of the engine's host."""

    group: str
    size: int
    results_port: int
    software: Software
    silence_s: float


class Start(msgspec.Struct, array_like=True, frozen=True, tag="start"):
    """All ranks have joined and load their part."""

    settings: RankSettings


class Step(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """All ranks compute these rows. No row has a placeholder."""

    batch: WorkerBatch


class End(msgspec.Struct, array_like=True, frozen=True, tag="end"):
    """The group ends. `reason` is empty if nothing failed."""

    reason: str = ""


class Beat(msgspec.Struct, array_like=True, frozen=True, tag="beat"):
    """The engine lives, and has published `num_published` numbered messages. Has no number of its own."""

    group: str
    num_published: int


Published = Announce | Start | Step | End


# -- pushed by the ranks ----------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """A rank joins. `process` names the process, because two processes may have the same rank number."""

    group: str
    rank: int
    process: str
    where: str  # host and process id, for messages
    software: Software


class Progress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    """Reports the progress of a rank's load."""

    process: str
    rank: int
    text: str


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    process: str
    rank: int
    facts: PoolFacts
    load_s: float
    endpoints: dict[str, dict[str, str]] = {}  # of the rank's transports by name; that of a sender is empty
    identity: str = ""  # of the process, see `kvrelay.process_identity`


class Done(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """A rank has ended the step that was published as `number`, in `seconds` without the wait for the stage before.
    `error` is one that leaves the ranks in step: rank 0 has the same, or the group ends."""

    process: str
    rank: int
    number: int
    seconds: float
    error: str = ""


class RankFailed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    process: str
    rank: int
    reason: str


class RankAlive(msgspec.Struct, array_like=True, frozen=True, tag="alive"):
    process: str
    rank: int


Pushed = Hello | Progress | Ready | Done | RankFailed | RankAlive | TransferReport

STEP_TOPIC, BEAT_TOPIC = b"s", b"b"
"""First frames of published messages. The second one of a numbered message is its number, 8 bytes. The fourth one, of
steps, has the number of transfer calls that were published before it for each rank, 4 bytes each."""


def _array_bytes(array: object) -> bytes:
    if isinstance(array, np.ndarray):
        return array.tobytes()
    raise NotImplementedError(f"{type(array).__name__} is no part of a message")


def _array(_: type, raw: bytes) -> NDArray[np.int32]:
    """Arrays in messages are int32 in the machine's byte order. A copy, because torch warns of arrays that it cannot
    write."""
    return np.frombuffer(raw, np.int32).copy()


encode = msgspec.msgpack.Encoder(enc_hook=_array_bytes).encode


def published_decoder() -> msgspec.msgpack.Decoder[Published]:
    return msgspec.msgpack.Decoder(Published, dec_hook=_array)
