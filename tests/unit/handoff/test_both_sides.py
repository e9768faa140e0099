"""Sender and receiver machines joined by ordered links and a transport that lands blocks in any order.

Random walks over everything that may happen; at the end of each, nobody waits and nobody holds anything.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.messages import FirstToken, Granted, Handoff, PeerRef
from kvrelay.protocol.sampling import FinishReason
from kvrelay.worker.transitions import IllegalTransition
from kvrelay_decode import handoff as decode
from kvrelay_prefill import handoff as prefill

NUM_BLOCKS = 5


@dataclass
class Receiver:
    """A decode worker's part for one request: at most one machine at a time, replies in order."""

    name: str
    one_sided: bool
    inbox: deque[tuple[str, object]] = field(default_factory=deque)
    machine: decode.ReceiverHandoff | None = None
    wish_deferred: bool = False
    alive: bool = True
    committed: int = 0
    slots_held: bool = False
    landed: dict[str, set[int]] = field(default_factory=dict)

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.name, "1", f"tcp://{self.name}")


class World:
    """One request between a prefill worker, two decode workers and the router."""

    def __init__(self, rng: random.Random, one_sided: bool) -> None:
        self.rng = rng
        self.receivers = {name: Receiver(name, one_sided) for name in ("d1", "d2")}
        self.sender = prefill.SenderHandoff(self.receivers["d1"].peer)
        self.to_prefill: deque[tuple[str, str, object]] = deque()
        self.writes: set[tuple[str, str, int]] = set()  # (receiver, reservation, block) that may still land
        self.aborting: set[str] = set()
        self.where: dict[str, str] = {}
        self.computed = -1
        self.blocks_released = False
        self.cancelled = False
        self.router_owes_decode: list[str] | None = None
        self.failed = False
        self.numbers = iter(range(1000))

    # -- instructions -------------------------------------------------------------------------------------------------

    def run_sender(self, instructions: list[prefill.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case prefill.AskDecode(to):
                    self.receivers[to.peer_id].inbox.append(("reserve", None))
                case prefill.AskRouter(_, excluded):
                    self.router_owes_decode = list(excluded)
                case prefill.PushBlocks(reservation, _, _, copies):
                    assert not self.blocks_released
                    for copy in copies:
                        assert copy.index <= self.computed, "a block was pushed before it was computed"
                        self.writes.add((self.where[reservation], reservation, copy.index))
                case prefill.SendHandoff(to, reservation, num_blocks):
                    message = Handoff(reservation=reservation, index=0, token_id=1, num_tokens=1, num_blocks=num_blocks)
                    self.receivers[to.peer_id].inbox.append(("handoff", message))
                case prefill.AbortTransfer(reservation, _):
                    self.aborting.add(reservation)
                case prefill.SendAbort(to, reservation, _):
                    self.receivers[to.peer_id].inbox.append(("abort", reservation))
                case prefill.SendDrained(to, reservation):
                    assert not any(w[1] == reservation for w in self.writes), "drained with a write in flight"
                    self.receivers[to.peer_id].inbox.append(("drained", reservation))
                case prefill.FailRequest():
                    self.failed = True
                case prefill.ReleaseBlocks():
                    assert not self.writes or not any(
                        self.receivers[w[0]].alive and not self.receivers[w[0]].committed for w in self.writes
                    )
                    assert not self.blocks_released
                    self.blocks_released = True

    def run_receiver(self, receiver: Receiver, instructions: list[decode.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case decode.Commit(message):
                    assert receiver.landed[message.reservation] == set(range(1, NUM_BLOCKS))
                    receiver.committed += 1
                    self.to_prefill.append((receiver.name, "committed", message.reservation))
                case decode.FreeBlocks():
                    if receiver.one_sided:
                        reservation = receiver.machine.reservation if receiver.machine else ""
                        assert not any(w[:2] == (receiver.name, reservation) for w in self.writes)
                    receiver.slots_held = False
                case decode.TellReleased(reservation, _):
                    self.to_prefill.append((receiver.name, "released", reservation))
                case _:
                    pass
        if receiver.machine is not None and receiver.machine.state is decode.ReceiverState.FREED:
            receiver.machine = None

    # -- events -------------------------------------------------------------------------------------------------------

    def grant(self, receiver: Receiver) -> None:
        assert receiver.machine is not None
        reservation = f"{receiver.name}-{next(self.numbers)}"
        self.where[reservation] = receiver.name
        receiver.machine.granted(reservation, 1, NUM_BLOCKS, needs_quarantine=receiver.one_sided)
        receiver.slots_held = True
        receiver.landed[reservation] = set()
        receiver.wish_deferred = False
        message = Granted(
            reservation=reservation, first_block=1, slots=list(range(1, NUM_BLOCKS)), transport="t", endpoint={}
        )
        self.to_prefill.append((receiver.name, "granted", message))

    def deliver_to_receiver(self, receiver: Receiver) -> None:
        kind, content = receiver.inbox.popleft()
        machine = receiver.machine
        if kind == "reserve" and machine is None and not receiver.committed:
            choice = self.rng.choice(["grant", "grant", "defer", "refuse"])
            if self.cancelled or choice == "refuse":
                self.to_prefill.append((receiver.name, "refused", None))
                return
            receiver.machine = decode.ReceiverHandoff()
            receiver.wish_deferred = True
            if choice == "grant":
                self.grant(receiver)
            else:
                self.to_prefill.append((receiver.name, "deferred", None))
        elif kind == "reserve":
            self.to_prefill.append((receiver.name, "refused", None))
        elif machine is not None:
            if kind == "abort" and content in ("", machine.reservation):
                receiver.wish_deferred = False
                if machine.state is decode.ReceiverState.RUNNING:
                    receiver.committed = 0
                    receiver.machine = None
                    receiver.slots_held = False
                else:
                    self.run_receiver(receiver, machine.aborted())
            elif kind == "drained" and content == machine.reservation:
                self.run_receiver(receiver, machine.drained())
            elif kind == "handoff" and isinstance(content, Handoff):
                self.run_receiver(receiver, machine.handed(content))

    def deliver_to_prefill(self) -> None:
        name, kind, content = self.to_prefill.popleft()
        peer, sender = self.receivers[name].peer, self.sender
        if not self.receivers[name].alive:
            return
        match kind:
            case "granted" if isinstance(content, Granted):
                self.run_sender(sender.granted(peer, content))
            case "deferred":
                self.run_sender(sender.deferred(peer))
            case "refused":
                self.run_sender(sender.refused(peer, "refused"))
            case "released" if isinstance(content, str):
                self.run_sender(sender.released(peer, content, "released"))
            case "committed" if isinstance(content, str):
                self.run_sender(sender.committed(content))

    def land(self, write: tuple[str, str, int]) -> None:
        self.writes.discard(write)
        name, reservation, index = write
        receiver = self.receivers[name]
        if receiver.alive and receiver.machine is not None and receiver.machine.reservation == reservation:
            receiver.landed[reservation].add(index)
            self.run_receiver(receiver, receiver.machine.landed(reservation, [index]))

    def drain(self, reservation: str) -> None:
        """The transport stops: what was queued vanishes, what was on the wire landed before."""
        self.aborting.discard(reservation)
        for write in [w for w in self.writes if w[1] == reservation]:
            if self.rng.random() < 0.5:
                self.land(write)
            self.writes.discard(write)
        self.run_sender(self.sender.drained(reservation))

    def compute(self) -> None:
        if self.computed < 0:
            self.computed = 0  # block 0 is decode's already, or not pushed before it is computed
            self.run_sender(self.sender.scheduled(list(range(100, 100 + NUM_BLOCKS))))
        elif self.computed < NUM_BLOCKS - 1:
            self.computed += 1
            self.run_sender(self.sender.computed(self.computed))
        else:
            self.computed = NUM_BLOCKS
            finish = FinishReason.STOP_TOKEN if self.rng.random() < 0.1 else None
            self.run_sender(self.sender.prefilled(FirstToken(index=0, token_id=1, finish=finish)))
            self.first_ended = finish is not None

    first_ended = False

    def cancel(self) -> None:
        """To both legs; the links deliver at once here, the interesting orders come from when it happens."""
        self.cancelled = True
        self.run_sender(self.sender.cancel("client gone"))
        for receiver in self.receivers.values():
            machine = receiver.machine
            if not receiver.alive or machine is None:
                continue
            if machine.state is decode.ReceiverState.RUNNING:
                receiver.committed, receiver.machine, receiver.slots_held = 0, None, False
            else:
                self.run_receiver(receiver, machine.cancel("client gone"))

    def kill(self, receiver: Receiver) -> None:
        receiver.alive = False
        receiver.inbox.clear()
        receiver.machine, receiver.committed, receiver.slots_held = None, 0, False
        self.run_sender(self.sender.decode_lost(receiver.peer, "silent"))

    def answer_router(self) -> None:
        excluded, self.router_owes_decode = self.router_owes_decode or [], None
        left = [r for r in self.receivers.values() if r.alive and r.name not in excluded]
        self.run_sender(self.sender.reassigned(left[0].peer if left else None))

    # -- the walk -----------------------------------------------------------------------------------------------------

    def choices(self, calm: bool) -> list[tuple[str, object]]:
        events: list[tuple[str, object]] = [("land", write) for write in sorted(self.writes)]
        events += [("drain", reservation) for reservation in sorted(self.aborting)]
        events += [("receiver", r) for r in self.receivers.values() if r.alive and r.inbox]
        events += [("grant", r) for r in self.receivers.values() if r.alive and r.machine and r.wish_deferred]
        events += [("prefill", None)] * bool(self.to_prefill)
        active = self.sender.state in (prefill.SenderState.QUEUED, prefill.SenderState.COMPUTING)
        events += [("compute", None)] * (active and not self.cancelled)
        events += [("router", None)] * (self.router_owes_decode is not None and not self.cancelled)
        if not calm and not self.cancelled and self.rng.random() < 0.03:
            events = [("cancel", None)]
        if not calm and self.rng.random() < 0.02 and self.receivers["d1"].alive:
            events = [("kill", self.receivers["d1"])]
        return events

    def walk(self, calm: bool) -> None:
        for _ in range(500):
            events = self.choices(calm)
            if not events:
                return
            kind, what = self.rng.choice(events)
            match kind, what:
                case "land", tuple() as write:
                    self.land(write)
                case "drain", str() as reservation:
                    self.drain(reservation)
                case "receiver", Receiver() as receiver:
                    self.deliver_to_receiver(receiver)
                case "grant", Receiver() as receiver:
                    self.grant(receiver)
                case "prefill", _:
                    self.deliver_to_prefill()
                case "compute", _:
                    self.compute()
                case "router", _:
                    self.answer_router()
                case "cancel", _:
                    self.cancel()
                case "kill", Receiver() as receiver:
                    self.kill(receiver)
        raise AssertionError("no end in sight")


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_every_walk_ends_with_one_owner_or_none_and_nothing_held(seed: int, one_sided: bool, calm: bool) -> None:
    world = World(random.Random(seed), one_sided)
    world.walk(calm)
    assert world.sender.state is prefill.SenderState.RELEASED
    assert world.blocks_released
    running = [r for r in world.receivers.values() if r.committed]
    for receiver in world.receivers.values():
        assert receiver.machine is None or receiver.machine.state is decode.ReceiverState.RUNNING
        assert receiver.slots_held == bool(receiver.committed)
    ended_without_decode = world.cancelled or world.first_ended or world.failed
    lost = not all(r.alive for r in world.receivers.values())
    assert len(running) == (0 if ended_without_decode else 1) or (lost and not running)


@pytest.mark.parametrize("state", list(prefill.SenderState))
def test_every_sender_state_but_the_last_has_an_exit(state: prefill.SenderState) -> None:
    assert bool(prefill.TRANSITIONS[state]) == (state is not prefill.SenderState.RELEASED)


def test_an_illegal_event_changes_nothing() -> None:
    sender = prefill.SenderHandoff(PeerRef("d", "1", "tcp://d"))
    with pytest.raises(IllegalTransition):
        sender.computed(1)
    with pytest.raises(IllegalTransition):
        sender.prefilled(FirstToken(index=0, token_id=1))
    assert (sender.state, sender.reservation) == (prefill.SenderState.QUEUED, prefill.Reservation.NONE)
    receiver = decode.ReceiverHandoff()
    receiver.granted("r", 0, 2, needs_quarantine=False)
    with pytest.raises(IllegalTransition):
        receiver.granted("s", 0, 2, needs_quarantine=False)
    assert (receiver.reservation, receiver.num_missing) == ("r", 2)


def test_blocks_that_an_earlier_grant_still_reads_outlive_the_commit_of_the_next() -> None:
    first, second = PeerRef("d1", "1", "tcp://d1"), PeerRef("d2", "1", "tcp://d2")
    sender = prefill.SenderHandoff(first)
    sender.scheduled([10])
    sender.granted(first, granted("r1"))
    sender.prefilled(FirstToken(index=0, token_id=1))
    assert prefill.AbortTransfer("r1", "t") in sender.released(first, "r1", "full")
    sender.reassigned(second)
    sender.granted(second, granted("r2"))
    assert sender.committed("r2") == []
    assert sender.state is prefill.SenderState.DRAINING
    assert sender.drained("r1") == [prefill.SendDrained(first, "r1"), prefill.ReleaseBlocks()]


def test_decode_that_lost_us_and_asks_again_is_told_when_its_reservation_has_drained() -> None:
    first = PeerRef("d1", "1", "tcp://d1")
    sender = prefill.SenderHandoff(first)
    sender.scheduled([10])
    sender.granted(first, granted("r1"))
    sender.computed(1)
    sender.decode_lost(first, "silent")
    assert sender.released(first, "r1", "asks again") == []
    assert sender.drained("r1") == [prefill.SendDrained(first, "r1")]
    assert sender.released(first, "r1", "asks again") == [prefill.SendDrained(first, "r1")]


def granted(reservation: str) -> Granted:
    return Granted(reservation=reservation, first_block=0, slots=[5], transport="t", endpoint={})


@pytest.mark.parametrize("one_sided", [True, False])
def test_a_missing_block_is_asked_for_again_only_where_a_double_can_be_refused(one_sided: bool) -> None:
    """A late write over a one-sided transport would land after its double, when the slot may have another owner."""
    receiver = decode.ReceiverHandoff()
    receiver.granted("r", 0, 2, needs_quarantine=one_sided)
    receiver.landed("r", [0])
    receiver.handed(Handoff(reservation="r", index=0, token_id=1, num_tokens=5, num_blocks=2))
    assert receiver.overdue() == ([] if one_sided else [decode.AskForMissing("r", (1,))])
