"""Events of an attempt as its workers send them, and what the machine answers, for tests of one rule at a time."""

from __future__ import annotations

from typing import Any

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import (
    Failed,
    FirstToken,
    NeedDecode,
    PeerRef,
    TokenEntry,
)
from kvrelay.protocol.sampling import FinishReason
from kvrelay_router.dispatch.events import (
    FromWorker,
    Send,
    WorkerLost,
    WorkersAssigned,
)
from tests.unit.dispatch.driven_sequence import Deliver, Done, DrivenSequence, FirstTokenReceived, TokensReceived
from tests.unit.dispatch.world import peer, spec

P, P2, D, D2, D3 = peer("p"), peer("p2"), peer("d"), peer("d2"), peer("d3")
LENGTH = FinishReason.LENGTH


def placed(prefill: PeerRef | None = P, decode: PeerRef | None = D, **options: Any) -> DrivenSequence:
    machine = DrivenSequence(spec(**options))
    machine.handle(WorkersAssigned(prefill, decode, 60.0))
    return machine


def first(token: int, index: int = 0, attempt: int = 1, worker: PeerRef = P, **options: Any) -> FirstTokenReceived:
    return FirstTokenReceived(worker, attempt, FirstToken(index=index, token_id=token, **options))


def tokens(index: int, *ids: int, attempt: int = 1, worker: PeerRef = D, **options: Any) -> TokensReceived:
    entry = TokenEntry(request="r", attempt=attempt, sequence=0, index=index, token_ids=list(ids), **options)
    return TokensReceived(worker, entry)


def need(*excluded: str, attempt: int = 1, worker: PeerRef = P, unable: PeerRef | None = None) -> FromWorker:
    return FromWorker(worker, attempt, 0, NeedDecode(reason="refused", excluded=list(excluded), unable=unable))


def failed(
    worker: PeerRef,
    attempt: int = 1,
    failure: FailureKind = FailureKind.ENGINE_ERROR,
    *,
    retriable: bool = True,
    refused: bool = False,
) -> FromWorker:
    body = Failed(failure=failure, cause="broken", retriable=retriable, refused=refused)
    return FromWorker(worker, attempt, 0, body)


def lost(
    worker: PeerRef,
    reason: str = "silent",
    *,
    is_alive: bool = False,
    was_silent: bool = False,
    in_company: bool = False,
) -> WorkerLost:
    return WorkerLost(worker, 0, reason, is_alive, was_silent, in_company)


def delivered(instructions: list[Done]) -> list[int]:
    return [token for i in instructions if isinstance(i, Deliver) for token in i.delta.token_ids]


def sent(instructions: list[Done]) -> list[tuple[str, type]]:
    return [(i.worker.peer_id, type(i.body)) for i in instructions if isinstance(i, Send)]
