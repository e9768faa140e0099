"""Events of an attempt as its workers send them, and what the machine answers, for tests of one rule at a time."""

from __future__ import annotations

from typing import Any

from kvrelay.protocol.messages import (
    FirstToken,
    PeerRef,
    TokenEntry,
)
from kvrelay.protocol.sampling import FinishReason
from kvrelay_router.dispatch.attempt import SequenceAttempts
from kvrelay_router.dispatch.events import (
    AttemptFailed,
    DecodeNeeded,
    Deliver,
    FirstTokenReceived,
    Instruction,
    Send,
    TokensReceived,
    WorkersAssigned,
)
from tests.unit.dispatch.world import peer, spec

P, P2, D, D2, D3 = peer("p"), peer("p2"), peer("d"), peer("d2"), peer("d3")
LENGTH = FinishReason.LENGTH


def placed(prefill: PeerRef | None = P, decode: PeerRef | None = D, **options: Any) -> SequenceAttempts:
    machine = SequenceAttempts(spec(**options))
    machine.handle(WorkersAssigned(prefill, decode, 60.0))
    return machine


def first(token: int, index: int = 0, attempt: int = 1, worker: PeerRef = P, **options: Any) -> FirstTokenReceived:
    return FirstTokenReceived(worker, attempt, FirstToken(index=index, token_id=token, **options))


def tokens(index: int, *ids: int, attempt: int = 1, worker: PeerRef = D, **options: Any) -> TokensReceived:
    entry = TokenEntry(request="r", attempt=attempt, sequence=0, index=index, token_ids=list(ids), **options)
    return TokensReceived(worker, entry)


def need(*excluded: str, attempt: int = 1) -> DecodeNeeded:
    return DecodeNeeded(P, attempt, "refused", frozenset(excluded))


def failed(worker: PeerRef, attempt: int = 1, *, retriable: bool = True) -> AttemptFailed:
    return AttemptFailed(worker, attempt, "broken", retriable)


def delivered(instructions: list[Instruction]) -> list[int]:
    return [token for i in instructions if isinstance(i, Deliver) for token in i.delta.token_ids]


def sent(instructions: list[Instruction]) -> list[tuple[str, type]]:
    return [(i.worker.peer_id, type(i.body)) for i in instructions if isinstance(i, Send)]
