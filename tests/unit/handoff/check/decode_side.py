"""The decode workers of a world: their real machines and quarantines, and what messages and instructions do."""

from __future__ import annotations

from typing import Any

from kvrelay.handoff import receiver
from kvrelay.handoff.quarantine import SETTLE_TICKS, Quarantine
from kvrelay.handoff.receiver import ReceiverHandoff
from kvrelay.handoff.receiver import ReceiverState as D
from kvrelay.handoff.transports.base import Corrupted, Landed
from kvrelay.protocol.messages import (
    Abort,
    Cancel,
    Committed,
    Drained,
    Granted,
    Handoff,
    Refused,
    Released,
)
from kvrelay.protocol.sampling import FinishReason
from kvrelay.protocol.sequence_key import SequenceKey
from tests.unit.handoff.check.state import MAX_TOKENS, R, Receiving, State, Write, peer
from tests.unit.handoff.check.values import clone


def take(state: State, who: str, source: str, kind: str, key: SequenceKey, *more: Any) -> None:
    match kind:
        case "reserve":
            reserve(state, who, source, key, more[0])
        case "generate":
            if key in state.buried.get(who, ()) or key in state.receivers[who]:
                return
            if who in state.draining:
                state.post(who, source, "failed", key, True)
                return
            supersede(state, who, key)
            state.receivers[who][key] = Receiving(None, "", more[0])
        case "cancel":
            cancel(state, who, key)
            state.buried[who] = state.buried.get(who, frozenset()) | {key}
        case "message" if key in state.receivers[who]:
            from_prefill(state, who, key, more[0])


def reserve(state: State, who: str, source: str, key: SequenceKey, num_output: int) -> None:
    if who in state.draining or key in state.buried.get(who, ()):
        state.post(who, source, "message", key, Refused(reason="refused"))
        return
    supersede(state, who, key)
    known = state.receivers[who].get(key)
    if known is not None and known.prefill == source:
        return
    if known is not None:
        cancel(state, who, key)
    if key in state.receivers[who]:
        state.post(who, source, "message", key, Refused(reason="refused"))
        return
    state.receivers[who][key] = Receiving(ReceiverHandoff(is_one_sided=state.size.one_sided), source, num_output)
    admit_pending(state, who)


def supersede(state: State, who: str, key: SequenceKey) -> None:
    for other in [k for k in state.receivers[who] if k[0] == key[0] and k[1] < key[1]]:
        cancel(state, who, other)


def admit_pending(state: State, who: str) -> None:
    for key, waiting in list(state.receivers[who].items()):
        if waiting.machine is None or waiting.machine.state is not D.ASKED:
            continue
        others = list(state.receivers[who].values()) if state.size.samples else []
        shared = next((each.slots for each in others if each.running), ())
        if not shared and any(each.machine and each.machine.state in (D.RESERVED, D.FILLING) for each in others):
            continue  # what it lacks is on its way
        free = state.free(who)
        if not shared and len(free) < state.size.num_blocks:
            return
        receiving = state.receiving(who, key)
        assert receiving.machine is not None
        receiving.slots = shared or tuple(free[: state.size.num_blocks])
        receiving.landed = state.size.parts_of(range(state.size.num_blocks)) if shared else frozenset()
        state.granted += 1
        reservation, sent = f"{who}{state.granted}", () if shared else receiving.slots
        first = state.size.num_blocks - len(sent)
        granted = Granted(
            reservation=reservation, first_block=first, slots=list(sent), transport="t", endpoints=[{"d": who}]
        )
        receiving.machine.handle(granted)
        if state.size.has_ranks:
            state.landing(who).admitted(reservation, range(first, state.size.num_blocks))
        state.post(who, receiving.prefill, "message", key, granted)


def from_prefill(state: State, who: str, key: SequenceKey, body: Handoff | Abort | Drained) -> None:
    receiving = state.receivers[who][key]
    if receiving.machine is None or (body.reservation and body.reservation != receiving.machine.reservation):
        return
    machine = state.receiving(who, key).machine
    assert machine is not None
    if not isinstance(body, Drained):
        run(state, who, key, machine.handle(body))
    elif machine.state is D.QUARANTINED:
        quarantine(state, who).drained(key)
        settle(state, who)


def run(state: State, who: str, key: SequenceKey, instructions: list[receiver.ReceiverInstruction]) -> None:
    receiving = state.receivers[who][key]
    machine = receiving.machine
    assert machine is not None
    for instruction in instructions:
        match instruction:
            case receiver.Commit(message):
                receiving.running = True
                state.post(who, receiving.prefill, "message", key, Committed(reservation=message.reservation))
                state.post(who, R, "tokens", key, message.index, (message.token_id,), None)
                receiving.num_output = message.index + 1
            case receiver.KeepBlocks():
                quarantine(state, who).add(key, peer(receiving.prefill), [receiving.prefill], 0.0)
            case receiver.FreeBlocks():
                receiving.slots = ()
            case receiver.StopReceiving(reservation):
                state.landing(who).released(reservation)
            case Refused() | Released():
                state.post(who, receiving.prefill, "message", key, instruction)
    if machine.state is D.FREED:
        del state.receivers[who][key]


def land(state: State, who: str, key: SequenceKey, write: Write) -> None:
    """A rank reports a block when it has all parts of it that other ranks send there, and not again."""
    _, _, reservation, index, _, part = write
    receiving = state.receiving(who, key)
    machine = receiving.machine
    assert machine is not None
    is_new = (index, part) not in receiving.landed
    if machine.state in (D.RESERVED, D.FILLING):
        receiving.landed |= {(index, part)}
    event = Landed(reservation, (index,))
    if not state.size.has_ranks:
        run(state, who, key, machine.handle(event))
        return
    rank = state.size.routes[part][1]
    mine = {(index, number) for number, (_, target) in enumerate(state.size.routes) if target == rank}
    if is_new and mine <= receiving.landed:
        report(state, who, key, rank, event)


def corrupt(state: State, who: str, key: SequenceKey, write: Write) -> None:
    """A part comes with other bytes than were sent."""
    _, _, reservation, index, _, part = write
    event = Corrupted(reservation, (index,))
    if state.size.has_ranks:
        report(state, who, key, state.size.routes[part][1], event)
        return
    machine = state.receiving(who, key).machine
    assert machine is not None
    run(state, who, key, machine.handle(event))


def report(state: State, who: str, key: SequenceKey, rank: int, event: Landed | Corrupted) -> None:
    """The transport of a rank reports to the handoff of the worker."""
    joined = state.landing(who).handle(rank, event)
    machine = state.receiving(who, key).machine
    if joined is not None and machine is not None:
        run(state, who, key, machine.handle(joined))


def quarantine(state: State, who: str) -> Quarantine:
    made = state.quarantines[who] = clone(state.quarantines[who])
    return made


def settle(state: State, who: str) -> None:
    """The ticks after a proof: no time passes here."""
    for _ in range(SETTLE_TICKS):
        for key in quarantine(state, who).tick(0.0).safe:
            receiving = state.receiving(who, key)
            assert receiving.machine is not None
            run(state, who, key, receiving.machine.handle(receiver.SlotsSafe()))


def ended(state: State, who: str, key: SequenceKey) -> None:
    quarantine(state, who).drained(key)
    settle(state, who)


def ask(state: State, who: str, key: SequenceKey) -> None:
    receiving = state.receivers[who][key]
    assert receiving.machine is not None
    released = Released(reservation=receiving.machine.reservation, reason="asks again")
    state.post(who, receiving.prefill, "message", key, released)


def is_lost(state: State, receiving: Receiving) -> bool:
    machine = receiving.machine
    assert machine is not None
    under_way = {(write[3], write[5]) for write in state.writes if write[2] == machine.reservation}
    return bool(state.size.parts_of(machine._missing) - receiving.landed - under_way)


def overdue(state: State, who: str, key: SequenceKey) -> None:
    receiving = state.receiving(who, key)
    assert receiving.machine is not None
    run(state, who, key, receiving.machine.handle(receiver.BlocksOverdue("nothing came")))


def local(state: State, who: str, key: SequenceKey) -> None:
    receiving = state.receiving(who, key)
    receiving.slots, receiving.running = tuple(state.free(who)[: state.size.num_blocks]), True


def step(state: State, who: str, key: SequenceKey) -> None:
    receiving = state.receiving(who, key)
    index = receiving.num_output
    receiving.num_output += 1
    finish = FinishReason.LENGTH if receiving.num_output >= MAX_TOKENS else None
    state.post(who, R, "tokens", key, index, (index,), finish)
    if finish is not None:
        del state.receivers[who][key]


def cancel(state: State, who: str, key: SequenceKey) -> None:
    if key not in state.receivers[who]:
        return
    receiving = state.receiving(who, key)
    if receiving.machine is None or receiving.machine.state is D.RUNNING:
        del state.receivers[who][key]
    else:
        run(state, who, key, receiving.machine.handle(Cancel(reason="cancelled")))
