"""What can happen to a sequence, and what the router then does: plain data between machine and shell.

Structs and not dataclasses, because several are made for every token: one costs a tenth of a frozen dataclass.
"""

from __future__ import annotations

import msgspec

from kvrelay.protocol.messages import AnyBody, FirstToken, PeerRef, TokenEntry
from kvrelay_router.dispatch.interface import SequenceDelta
from kvrelay_router.dispatch.load import WorkerKey

# -- events -----------------------------------------------------------------------------------------------------------


class WorkersAssigned(msgspec.Struct, frozen=True):
    """The shell found workers. At least one is named; without `prefill`, `decode` computes the prompt itself."""

    prefill: PeerRef | None
    decode: PeerRef | None
    timeout_s: float  # what is left of the request's deadline


class PlacementFailed(msgspec.Struct, frozen=True):
    """No workers came in time."""

    reason: str


class DecodeChosen(msgspec.Struct, frozen=True):
    """The answer to `FindDecode`; None: there is no other.

    `came_back`, with None: those that were lost are there again, but have forgotten this attempt.
    """

    decode: PeerRef | None
    came_back: bool = False


class FirstTokenReceived(msgspec.Struct, frozen=True):
    """FirstToken from P."""

    worker: PeerRef
    attempt: int
    body: FirstToken


class TokensReceived(msgspec.Struct, frozen=True):
    """One entry of a TokenBatch from D."""

    worker: PeerRef
    entry: TokenEntry


class DecodeNeeded(msgspec.Struct, frozen=True):
    """NeedDecode from P."""

    worker: PeerRef
    attempt: int
    reason: str
    excluded: frozenset[str]
    lacks: PeerRef | None = None  # who cannot take it, where P tells


class AttemptFailed(msgspec.Struct, frozen=True):
    """Failed from P or D. `refused`: the worker took no part of it, so nothing was computed."""

    worker: PeerRef
    attempt: int
    cause: str
    retriable: bool
    refused: bool = False


class WorkerLost(msgspec.Struct, frozen=True):
    """The link to this incarnation of a worker is gone, and with it all that the worker knew of us.

    `gave_us_up`: the worker lives, and it is we who were silent to it: stopped, or cut off.
    """

    worker: PeerRef
    reason: str
    gave_us_up: bool = False


class WorkerBack(msgspec.Struct, frozen=True):
    """A worker that was lost is heard again: this very start of it."""

    worker: PeerRef


class StopMatched(msgspec.Struct, frozen=True):
    """A stop string matched in the text."""


class Cancelled(msgspec.Struct, frozen=True):
    """The client is gone, the deadline passed, or a sibling failed."""

    reason: str


Event = (
    WorkersAssigned
    | PlacementFailed
    | DecodeChosen
    | FirstTokenReceived
    | TokensReceived
    | DecodeNeeded
    | AttemptFailed
    | WorkerLost
    | WorkerBack
    | StopMatched
    | Cancelled
)

# -- instructions -----------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send this message about this attempt of the sequence."""

    worker: PeerRef
    attempt: int
    body: AnyBody


class FindPlacement(msgspec.Struct, frozen=True):
    """Choose workers for a new attempt, after `delay_s`, then tell `WorkersAssigned` or `PlacementFailed`.

    `avoid`: only where no others are.
    """

    attempt: int
    cause: str
    avoid: frozenset[str]
    delay_s: float = 0.0


class AwaitLost(msgspec.Struct, frozen=True):
    """All tries are spent, but some were lost with workers that may only stand still.

    Tell `WorkerBack` when one is heard again; after a while, `PlacementFailed`.
    """

    cause: str


class FindDecode(msgspec.Struct, frozen=True):
    """Choose another decode worker that goes with the present prefill worker, then tell `DecodeChosen`.

    `excluded`: starts of workers, by id and incarnation.
    """

    cause: str
    excluded: frozenset[WorkerKey]


class Deliver(msgspec.Struct, frozen=True):
    """New tokens for the client."""

    delta: SequenceDelta


class Ended(msgspec.Struct, frozen=True):
    """Nothing more will come. `error` is None unless the sequence failed."""

    error: str | None


Instruction = Send | FindPlacement | AwaitLost | FindDecode | Deliver | Ended
