"""The router of a world: its real machines, and what their instructions do."""

from __future__ import annotations

from typing import Any

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import Failed, FirstToken, Generate, NeedDecode, Prefill, Reassign, TokenEntry
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay_router.dispatch import events as router
from tests.unit.dispatch.driven_sequence import AnyEvent, FirstTokenReceived, TokensReceived
from tests.unit.handoff.check.state import R, State, peer


def feed(state: State, r: str, event: AnyEvent) -> None:
    machine = state.attempts[r] = state.attempts[r].copy()
    for instruction in machine.handle(event):
        match instruction:
            case router.Send(worker, attempt, body):
                key = (r, attempt, 0)
                match body:
                    case Prefill():
                        to = body.decode.peer_id if body.decode else None
                        state.post(R, worker.peer_id, "prefill", key, to, body.prompt.num_output)
                    case Reassign():
                        state.post(R, worker.peer_id, "reassign", key, body.decode.peer_id if body.decode else None)
                    case Generate():
                        state.post(R, worker.peer_id, "generate", key, body.prompt.num_output)
                    case _:
                        state.post(R, worker.peer_id, "cancel", key)
                if worker.peer_id in state.dead:
                    state.unaware |= {(R, worker.peer_id)}
            case router.FindPlacement() | router.AwaitLostWorkers() | router.FindDecode():
                state.wishes[r] = instruction
            case router.Ended():
                state.wishes.pop(r, None)
                state.ended[r] = state.ended.get(r, 0) + 1


def place(state: State, r: str, p: str | None, d: str | None) -> None:
    del state.wishes[r]
    if d is None:
        feed(state, r, router.PlacementFailed("no worker"))
        return
    feed(state, r, router.WorkersAssigned(peer(p) if p is not None else None, peer(d), 60.0))


def reassign(state: State, r: str, d: str | None) -> None:
    del state.wishes[r]
    feed(state, r, router.DecodeChosen(peer(d) if d is not None else None))


def take(state: State, source: str, kind: str, key: SequenceKey, *more: Any) -> None:
    r, attempt, _ = key
    if state.attempts[r].is_over:  # the dispatcher has forgotten it
        if kind == "need":
            state.post(R, source, "cancel", key)
        return
    match kind, more:
        case "first", (index, token, finish):
            body = FirstToken(index=index, token_id=token, finish=finish)
            feed(state, r, FirstTokenReceived(peer(source), attempt, body))
        case "tokens", (index, tokens, finish):
            entry = TokenEntry(
                request=r, attempt=attempt, sequence=0, index=index, token_ids=list(tokens), finish=finish
            )
            feed(state, r, TokensReceived(peer(source), entry))
        case "need", (excluded, unable):
            need = NeedDecode(reason="needed", excluded=list(excluded), unable=unable)
            feed(state, r, router.FromWorker(peer(source), attempt, 0, need))
        case "failed", (retriable,):
            failed = Failed(failure=FailureKind.ENGINE_ERROR, cause="failed", retriable=retriable)
            feed(state, r, router.FromWorker(peer(source), attempt, 0, failed))


def cancel(state: State, r: str) -> None:
    feed(state, r, router.Cancelled("the client is gone"))
