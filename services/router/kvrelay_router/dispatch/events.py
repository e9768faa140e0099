"""What can happen to a sequence, and what the router then does: plain data between machine and shell."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.protocol.messages import AnyBody, FirstToken, PeerRef, TokenEntry
from kvrelay_router.dispatch.interface import SequenceDelta

# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """The shell found workers. At least one is named; without `prefill`, `decode` computes the prompt itself."""

    prefill: PeerRef | None
    decode: PeerRef | None
    timeout_s: float  # what is left of the request's deadline


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """No workers came in time."""

    reason: str


@dataclass(frozen=True, slots=True)
class DecodeChosen:
    """The answer to `FindDecode`; None: there is no other."""

    decode: PeerRef | None


@dataclass(frozen=True, slots=True)
class FirstTokenCame:
    """FirstToken from P."""

    worker: PeerRef
    attempt: int
    body: FirstToken


@dataclass(frozen=True, slots=True)
class TokensCame:
    """One entry of a TokenBatch from D."""

    worker: PeerRef
    entry: TokenEntry


@dataclass(frozen=True, slots=True)
class DecodeNeeded:
    """NeedDecode from P."""

    worker: PeerRef
    attempt: int
    reason: str
    excluded: frozenset[str]


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Failed from P or D. `refused`: the worker took no part of it, so nothing was computed."""

    worker: PeerRef
    attempt: int
    cause: str
    retriable: bool
    refused: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The link to this incarnation of a worker is gone, and with it all that the worker knew of us.

    `gave_us_up`: the worker lives, and it is we who were silent to it: stopped, or cut off.
    """

    worker: PeerRef
    reason: str
    gave_us_up: bool = False


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string matched in the text."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client is gone, the deadline passed, or a sibling failed."""

    reason: str


Event = (
    Placed
    | NotPlaced
    | DecodeChosen
    | FirstTokenCame
    | TokensCame
    | DecodeNeeded
    | AttemptFailed
    | WorkerLost
    | StopMatched
    | Cancelled
)

# -- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message about this attempt of the sequence."""

    worker: PeerRef
    attempt: int
    body: AnyBody


@dataclass(frozen=True, slots=True)
class FindPlacement:
    """Choose workers for a new attempt, after `delay_s`, then tell `Placed` or `NotPlaced`.

    `avoid`: only where no others are.
    """

    attempt: int
    cause: str
    avoid: frozenset[str]
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FindDecode:
    """Choose another decode worker that goes with the present prefill worker, then tell `DecodeChosen`."""

    cause: str
    excluded: frozenset[str]


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for the client."""

    delta: SequenceDelta


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more will come. `error` is None unless the sequence failed."""

    error: str | None


Instruction = Send | FindPlacement | FindDecode | Deliver | Ended
