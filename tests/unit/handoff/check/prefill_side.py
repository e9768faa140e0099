"""The prefill workers of a world: their real machines, and what messages and instructions do."""

from __future__ import annotations

from typing import Any

from kvrelay.protocol.messages import FirstToken, Granted, PeerRef
from kvrelay.protocol.sampling import FinishReason
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.transfer.base import SenderDrained, SenderEvent, TransferFailed
from kvrelay_prefill import sender_events as prefill
from kvrelay_prefill.sender_handoff import SenderHandoff
from tests.unit.handoff.check.search import Violation
from tests.unit.handoff.check.state import MAX_TOKENS, R, Sending, State, peer


def take(state: State, who: str, source: str, kind: str, key: SequenceKey, *more: Any) -> None:
    if kind == "prefill":
        if key in state.buried.get(who, ()) or key in state.senders[who]:
            return
        if who in state.draining:
            state.post(who, source, "failed", key, True)
            return
        for other in [k for k in state.senders[who] if k[0] == key[0] and k[1] < key[1]]:
            cancel(state, who, other)
        to, num_output = more
        machine = SenderHandoff(peer(to) if to is not None else None)
        state.senders[who][key] = Sending(machine, num_output)
    elif kind == "cancel":
        cancel(state, who, key)
        state.buried[who] = state.buried.get(who, frozenset()) | {key}
    elif key not in state.senders[who]:
        if kind == "granted":
            state.post(who, source, "abort", key, more[0])
            state.post(who, source, "drained", key, more[0])
        elif kind == "released":
            state.post(who, source, "drained", key, more[0])
        elif kind == "reassign":
            state.post(who, source, "failed", key, True)
    else:
        machine = state.sending(who, key).machine
        run(state, who, key, machine.handle(to_event(state, peer(source), kind, more)))


def to_event(state: State, source: PeerRef, kind: str, more: tuple[Any, ...]) -> prefill.SenderHandoffEvent:
    match kind, more:
        case "granted", (reservation, slots):
            granted = Granted(
                reservation=reservation,
                first_block=state.size.num_blocks - len(slots),
                slots=list(slots),
                transport="t",
                endpoint={"d": source.peer_id},
            )
            return prefill.ReservationGranted(source, granted)
        case "deferred", _:
            return prefill.ReservationDeferred(source)
        case "refused", _:
            return prefill.ReservationRefused(source, "refused")
        case "released", (reservation,):
            return prefill.ReservationReleased(source, reservation, "released")
        case "committed", (reservation,):
            return prefill.HandoffCommitted(reservation)
        case "resend", (reservation, blocks, number):
            return prefill.ResendRequested(reservation, blocks, number)
        case "reassign", (to,):
            return prefill.DecodeReassigned(peer(to) if to is not None else None)
    raise AssertionError(kind)


def admit(state: State, who: str, key: SequenceKey) -> None:
    sending = state.sending(who, key)
    sending.own = tuple(state.free(who)[: state.size.num_blocks])
    run(state, who, key, sending.machine.handle(prefill.PrefillScheduled(sending.own)))


def compute(state: State, who: str, key: SequenceKey) -> None:
    sending = state.sending(who, key)
    sending.num_computed += 1
    if sending.num_computed < state.size.num_blocks:
        run(state, who, key, sending.machine.handle(prefill.BlocksComputed(sending.num_computed)))
        return
    index = sending.num_output
    finish = FinishReason.LENGTH if index + 1 >= MAX_TOKENS else None
    state.post(who, R, "first", key, index, index, finish)
    first = FirstToken(index=index, token_id=index, finish=finish)
    run(state, who, key, sending.machine.handle(prefill.PrefillFinished(first)))


def run(state: State, who: str, key: SequenceKey, instructions: list[prefill.SenderInstruction]) -> None:
    sending = state.senders[who][key]
    for instruction in instructions:
        match instruction:
            case prefill.SendReserve(to):
                state.post(who, to.peer_id, "reserve", key, sending.num_output)
                if to.peer_id in state.dead:
                    state.unaware |= {(who, to.peer_id)}
            case prefill.SendNeedDecode(_, excluded, lacks):
                state.post(who, R, "need", key, excluded, lacks)
            case prefill.PushBlocks(reservation, _, endpoint, copies):
                push(state, who, sending, reservation, endpoint["d"], [(c.index, c.source, c.slot) for c in copies])
            case prefill.SendHandoff(to, reservation, _, resend):
                assert sending.machine.first_token is not None
                index = sending.machine.first_token.index
                state.post(who, to.peer_id, "handoff", key, reservation, index, resend)
            case prefill.AbortTransfer(reservation, _):
                abort(state, who, sending, reservation)
            case prefill.SendAbort(to, reservation, _):
                state.post(who, to.peer_id, "abort", key, reservation)
            case prefill.SendDrained(to, reservation):
                state.post(who, to.peer_id, "drained", key, reservation)
            case prefill.SendFailed():
                state.post(who, R, "failed", key, True)
            case prefill.ReleaseBlocks():
                release(state, who, key)


def push(
    state: State, who: str, sending: Sending, reservation: str, d: str, copies: list[tuple[int, int, int]]
) -> None:
    for index, source, slot in copies:
        if index >= sending.num_computed:
            raise Violation(f"block {index} is pushed before it is computed")
        if source not in sending.own:
            raise Violation(f"block {source} is pushed and not held")
        if d not in state.dead:
            state.writes |= {(who, d, reservation, index, slot, part) for part in range(len(state.size.routes))}
    if state.size.has_ranks and d not in state.dead:
        state.pushing(who).started(reservation, [index for index, _, _ in copies], len(state.size.routes))


def abort(state: State, who: str, sending: Sending, reservation: str) -> None:
    if not state.size.has_ranks or state.pushing(who).aborted(reservation):
        sending.aborting |= {(reservation, rank) for rank in range(state.size.ranks[0])}


def report(state: State, who: str, key: SequenceKey, event: SenderEvent) -> None:
    """The transport of a rank reports to the handoff of the worker."""
    joined = state.pushing(who).handle(event) if state.size.has_ranks else event
    if joined is not None:
        run(state, who, key, state.sending(who, key).machine.handle(joined))


def release(state: State, who: str, key: SequenceKey) -> None:
    del state.senders[who][key]


def drained(state: State, who: str, key: SequenceKey, reservation: str, rank: int) -> None:
    state.sending(who, key).aborting -= {(reservation, rank)}
    report(state, who, key, SenderDrained(reservation))


def fail(state: State, who: str, key: SequenceKey, rank: int) -> None:
    """With several ranks, what the rank had not written is lost; the writes of the others go on."""
    grant = state.senders[who][key].machine._grant
    assert grant is not None
    if state.size.has_ranks:
        lost = {w for w in state.writes if w[2] == grant.reservation and state.size.source_rank(w) == rank}
        state.writes -= lost
    report(state, who, key, TransferFailed(grant.reservation, "broken"))


def cancel(state: State, who: str, key: SequenceKey) -> None:
    if key in state.senders[who]:
        sending = state.sending(who, key)
        run(state, who, key, sending.machine.handle(prefill.SendCancelled("cancelled")))
