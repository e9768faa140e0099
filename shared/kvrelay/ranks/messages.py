"""Messages between rank 0 and the other ranks of a worker, once these have loaded their parts.

Each rank has a connection from rank 0, which carries steps, calls to its transports and the end in the order in which
they were sent, and a connection to rank 0. A connection that ends is a rank that is lost, so no message is.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.handoff.transports.base import BlockPush, ReceiverEvent, SenderCounters, SenderEvent
from kvrelay.handoff.transports.pool_memory import BlockPart, PartCopy
from kvrelay.step.batch import WorkerBatch


class Meeting(msgspec.Struct, frozen=True):
    """Where rank 0 meets the others: ports at its `rank_host`."""

    steps_port: int
    reports_port: int
    silence_s: float  # after which a connection counts as ended
    key: str = ""  # that guards them, as it ends an address; empty: none does


# -- from rank 0 ------------------------------------------------------------------------------------------------------


class Step(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """All ranks compute these rows. No row has a placeholder."""

    batch: WorkerBatch


class Push(msgspec.Struct, array_like=True, frozen=True, tag="push"):
    """See `TransferSender.push` and, with a part, `TransferSender.push_part`."""

    transport: str
    reservation: str
    endpoint: dict[str, str]
    copies: list[BlockPush]
    part: PartCopy | None


class Abort(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """See `TransferSender.abort`."""

    transport: str
    reservation: str


class Admit(msgspec.Struct, array_like=True, frozen=True, tag="admit"):
    """See `TransferReceiver.admit` and, with parts, `TransferReceiver.admit_parts`."""

    transport: str
    reservation: str
    first_block: int
    slots: list[int]
    parts: list[BlockPart]


class Release(msgspec.Struct, array_like=True, frozen=True, tag="release"):
    """See `TransferReceiver.release`."""

    transport: str
    reservation: str


class End(msgspec.Struct, array_like=True, frozen=True, tag="end"):
    """The group ends. `reason` is empty if nothing failed."""

    reason: str = ""


TransferCall = Push | Abort | Admit | Release
FromLeader = Step | TransferCall | End


# -- to rank 0 --------------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """A rank has loaded its part."""

    rank: int
    where: str  # host and process, for messages
    fingerprint: str  # the model's, equal on all ranks
    identity: str  # the process's, see `kvrelay.process_identity`
    endpoints: dict[str, dict[str, str]]  # key: name of the transport; a sender's endpoint is empty


class Done(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """A rank has ended its oldest step, in `seconds` without the wait for hidden states. `error` is one that leaves
    the ranks in step: rank 0 has the same, or the group ends."""

    rank: int
    seconds: float
    error: str


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    rank: int
    reason: str


class TransferReport(msgspec.Struct, array_like=True, frozen=True, tag="transfer"):
    """An event of a rank's transport. `counters`: those of a sender."""

    rank: int
    transport: str
    event: SenderEvent | ReceiverEvent
    counters: SenderCounters | None


ToLeader = Ready | Done | Failed | TransferReport


def _array_bytes(array: object) -> bytes:
    if isinstance(array, np.ndarray):
        return array.tobytes()
    raise NotImplementedError(f"{type(array).__name__} is no part of a message")


def _array(_: type, raw: bytes) -> NDArray[np.int32]:
    """Arrays in messages are int32 in the machine's byte order. A copy, because torch warns of arrays that it cannot
    write."""
    return np.frombuffer(raw, np.int32).copy()


encode = msgspec.msgpack.Encoder(enc_hook=_array_bytes).encode


def decoder_of_members() -> msgspec.msgpack.Decoder[FromLeader]:
    return msgspec.msgpack.Decoder(FromLeader, dec_hook=_array)
