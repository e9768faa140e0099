"""The prefill workers of a world: their real machines, and what messages and instructions do."""

from __future__ import annotations

from typing import Any

from kvrelay.handoff import sender
from kvrelay.handoff.sender import SenderHandoff
from kvrelay.handoff.transports.base import SenderDrained, SenderEvent, TransferFailed
from kvrelay.protocol.messages import Cancel, Failed, Handoff, NeedDecode, Reassign
from kvrelay.protocol.sampling import FinishReason
from kvrelay.protocol.sequence_key import SequenceKey
from tests.unit.handoff.check.search import Violation
from tests.unit.handoff.check.state import MAX_TOKENS, R, Sending, State, peer


def take(state: State, who: str, source: str, kind: str, key: SequenceKey, *more: Any) -> None:
    match kind:
        case "prefill":
            start(state, who, source, key, *more)
        case "cancel":
            cancel(state, who, key)
            state.buried[who] = state.buried.get(who, frozenset()) | {key}
        case "reassign":
            (to,) = more
            feed(state, who, source, key, Reassign(decode=peer(to) if to is not None else None))
        case "message":
            feed(state, who, source, key, sender.FromDecode(peer(source), more[0]))


def start(state: State, who: str, source: str, key: SequenceKey, to: str | None, num_output: int) -> None:
    if key in state.buried.get(who, ()) or key in state.senders[who]:
        return
    if who in state.draining:
        state.post(who, source, "failed", key, True)
        return
    for other in [k for k in state.senders[who] if k[0] == key[0] and k[1] < key[1]]:
        cancel(state, who, other)
    machine = SenderHandoff(peer(R), peer(to) if to is not None else None)
    state.senders[who][key] = Sending(machine, num_output)


def feed(state: State, who: str, source: str, key: SequenceKey, event: sender.SenderHandoffEvent) -> None:
    known = key in state.senders[who]
    machine = state.sending(who, key).machine if known else SenderHandoff.released(peer(source))
    run(state, who, key, machine.handle(event))


def admit(state: State, who: str, key: SequenceKey) -> None:
    sending = state.sending(who, key)
    sending.own = tuple(state.free(who)[: state.size.num_blocks])
    run(state, who, key, sending.machine.handle(sender.PrefillScheduled(sending.own)))


def compute(state: State, who: str, key: SequenceKey) -> None:
    sending = state.sending(who, key)
    sending.num_computed += 1
    if sending.num_computed < state.size.num_blocks:
        run(state, who, key, sending.machine.handle(sender.BlocksComputed(sending.num_computed)))
        return
    index = sending.num_output
    finish = FinishReason.LENGTH if index + 1 >= MAX_TOKENS else None
    state.post(who, R, "first", key, index, index, finish)
    handoff = Handoff(reservation="", index=index, token_id=index, num_tokens=1, num_blocks=0)
    run(state, who, key, sending.machine.handle(sender.PrefillFinished(handoff if finish is None else None)))


def run(state: State, who: str, key: SequenceKey, instructions: list[sender.SenderInstruction]) -> None:
    for instruction in instructions:
        match instruction:
            case sender.AskDecode(to):
                state.post(who, to.peer_id, "reserve", key, state.senders[who][key].num_output)
                if to.peer_id in state.dead:
                    state.unaware |= {(who, to.peer_id)}
            case sender.PushBlocks(granted, copies):
                blocks = [(copy.index, copy.source, copy.slot) for copy in copies]
                push(state, who, state.senders[who][key], granted.reservation, granted.endpoints[0]["d"], blocks)
            case sender.StopPushing(reservation):
                abort(state, who, state.senders[who][key], reservation)
            case sender.ReleaseBlocks():
                release(state, who, key)
            case sender.SendTo(_, NeedDecode() as body):
                state.post(who, R, "need", key, tuple(body.excluded), body.unable)
            case sender.SendTo(_, Failed()):
                state.post(who, R, "failed", key, True)
            case sender.SendTo(to, body):
                state.post(who, to.peer_id, "message", key, body)


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


def report(state: State, who: str, key: SequenceKey, event: SenderDrained | TransferFailed) -> None:
    """The transport of a rank reports to the handoff of the worker."""
    joined: SenderEvent | None = state.pushing(who).handle(event) if state.size.has_ranks else event
    if isinstance(joined, SenderDrained | TransferFailed):
        run(state, who, key, state.sending(who, key).machine.handle(joined))


def release(state: State, who: str, key: SequenceKey) -> None:
    del state.senders[who][key]


def drained(state: State, who: str, key: SequenceKey, reservation: str, rank: int) -> None:
    state.sending(who, key).aborting -= {(reservation, rank)}
    report(state, who, key, SenderDrained(reservation))


def fail(state: State, who: str, key: SequenceKey, rank: int) -> None:
    """With several ranks, what the rank had not written is lost; the writes of the others go on."""
    granted = state.senders[who][key].machine._granted
    assert granted is not None
    if state.size.has_ranks:
        lost = {w for w in state.writes if w[2] == granted.reservation and state.size.source_rank(w) == rank}
        state.writes -= lost
    report(state, who, key, TransferFailed(granted.reservation, "broken"))


def cancel(state: State, who: str, key: SequenceKey) -> None:
    if key in state.senders[who]:
        run(state, who, key, state.sending(who, key).machine.handle(Cancel(reason="cancelled")))
