"""Sender and receiver machines joined by ordered links and a transport that lands blocks in any order, loses some and
corrupts some.

What a write does to the memory, what the receiver hears of it, and what the sender hears of it are events of their own.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from kvrelay.protocol.messages import FirstToken, Granted, Handoff, PeerRef
from kvrelay.protocol.sampling import FinishReason
from kvrelay.transfer.base import Corrupted, Landed, Pushed, ReceiverEvent, SenderDrained, SenderEvent
from kvrelay.transfer.shard_progress import LandingProgress, PushProgress
from kvrelay_decode import receiver_events as decode
from kvrelay_decode.receiver_handoff import ReceiverHandoff, ReceiverState
from kvrelay_prefill import sender_events as prefill
from kvrelay_prefill.sender_handoff import SenderHandoff, SenderState

NUM_BLOCKS = 5
Write = tuple[str, str, int, int]
"""Receiver, reservation, block, rank."""


@dataclass
class Receiver:
    """A decode worker's part for one request: at most one machine at a time, replies in order."""

    name: str
    one_sided: bool
    inbox: deque[tuple[str, object]] = field(default_factory=deque)
    machine: ReceiverHandoff | None = None
    is_deferred: bool = False
    alive: bool = True
    committed: int = 0
    slots_held: bool = False
    landed: dict[str, set[tuple[int, int]]] = field(default_factory=dict)  # blocks on ranks

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.name, "1", f"tcp://{self.name}")


class World:
    """One request between a prefill worker, two decode workers and the router."""

    def __init__(self, rng: random.Random, one_sided: bool, most_faults: int = 0, num_ranks: int = 1) -> None:
        self.rng = rng
        self.num_ranks = num_ranks  # of each worker: each sends a part of each block to its like
        self.pushes = PushProgress(num_ranks)
        self.landings = {name: LandingProgress(num_ranks) for name in ("d1", "d2")}
        self.most_faults = most_faults
        self.receivers = {name: Receiver(name, one_sided) for name in ("d1", "d2")}
        self.sender = SenderHandoff(self.receivers["d1"].peer)
        self.to_prefill: deque[tuple[str, str, object]] = deque()
        self.writes: Counter[Write] = Counter()  # that may still land
        self.notices: list[tuple[str, Write]] = []  # that the receiver has not heard of
        self.completions: list[Write] = []  # that the sender has not heard of
        self.damaged: set[Write] = set()  # whose slot holds other bytes than were sent
        self.rechecks: list[tuple[Receiver, str, tuple[int, ...], int]] = []
        self.num_faults = 0
        self.aborting: set[tuple[str, int]] = set()
        self.where: dict[str, str] = {}
        self.computed = -1
        self.blocks_released = False
        self.cancelled = False
        self.router_owes_decode: list[str] | None = None
        self.failed = False
        self.numbers = iter(range(1000))

    # -- instructions -------------------------------------------------------------------------------------------------

    def run_sender(self, instructions: list[prefill.SenderInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case prefill.SendReserve(to):
                    self.receivers[to.peer_id].inbox.append(("reserve", None))
                case prefill.SendNeedDecode(_, excluded):
                    self.router_owes_decode = list(excluded)
                case prefill.PushBlocks(reservation, _, _, copies, _):
                    assert not self.blocks_released
                    self.pushes.started(reservation, [copy.index for copy in copies], self.num_ranks)
                    for copy in copies:
                        assert copy.index <= self.computed, "a block was pushed before it was computed"
                        for rank in range(self.num_ranks):
                            self.writes[self.where[reservation], reservation, copy.index, rank] += 1
                case prefill.SendHandoff(to, reservation, num_blocks, resend):
                    message = Handoff(
                        reservation=reservation,
                        index=0,
                        token_id=1,
                        num_tokens=1,
                        num_blocks=num_blocks,
                        resend=resend,
                    )
                    self.receivers[to.peer_id].inbox.append(("handoff", message))
                case prefill.AbortTransfer(reservation, _):
                    if self.pushes.aborted(reservation):
                        self.aborting.update((reservation, rank) for rank in range(self.num_ranks))
                case prefill.SendAbort(to, reservation, _):
                    self.receivers[to.peer_id].inbox.append(("abort", reservation))
                case prefill.SendDrained(to, reservation):
                    assert not any(w[1] == reservation for w in self.writes), "drained with a write in flight"
                    self.receivers[to.peer_id].inbox.append(("drained", reservation))
                case prefill.SendFailed():
                    self.failed = True
                case prefill.ReleaseBlocks():
                    assert not self.writes or not any(
                        self.receivers[w[0]].alive and not self.receivers[w[0]].committed for w in self.writes
                    )
                    assert not self.blocks_released
                    self.blocks_released = True

    def run_receiver(self, receiver: Receiver, instructions: list[decode.ReceiverInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case decode.Commit(message):
                    whole = set(itertools.product(range(1, NUM_BLOCKS), range(self.num_ranks)))
                    assert receiver.landed[message.reservation] == whole
                    assert not receiver.one_sided or not any(w[1] == message.reservation for w in self.writes)
                    assert not receiver.one_sided or not any(w[1] == message.reservation for w in self.damaged)
                    receiver.committed += 1
                    self.to_prefill.append((receiver.name, "committed", message.reservation))
                case decode.FreeBlocks(num_whole):
                    if receiver.one_sided:
                        reservation = receiver.machine.reservation if receiver.machine else ""
                        assert not any(w[1] == reservation and w[2] < num_whole for w in self.damaged)
                        assert not any(w[:2] == (receiver.name, reservation) for w in self.writes)
                    receiver.slots_held = False
                case decode.SendReleased(reservation, _, _):
                    self.to_prefill.append((receiver.name, "released", reservation))
                case decode.RecheckBlocks(reservation, blocks):
                    assert not any(w[1] == reservation for w in self.writes), "a write in flight may still damage one"
                    self.landings[receiver.name].recheck(reservation, blocks)
                    self.rechecks += [(receiver, reservation, blocks, rank) for rank in range(self.num_ranks)]
                case decode.StopReceiving(reservation):
                    self.landings[receiver.name].released(reservation)
                case decode.SendResend():
                    self.to_prefill.append((receiver.name, "resend", instruction))
                case _:
                    pass
        if receiver.machine is not None and receiver.machine.state is ReceiverState.FREED:
            receiver.machine = None

    # -- events -------------------------------------------------------------------------------------------------------

    def grant(self, receiver: Receiver) -> None:
        assert receiver.machine is not None
        reservation = f"{receiver.name}-{next(self.numbers)}"
        self.where[reservation] = receiver.name
        receiver.machine.handle(decode.ReservationOpened(reservation, 1, NUM_BLOCKS, receiver.one_sided))
        receiver.slots_held = True
        receiver.landed[reservation] = set()
        self.landings[receiver.name].admitted(reservation, range(1, NUM_BLOCKS))
        receiver.is_deferred = False
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
            receiver.machine = ReceiverHandoff()
            receiver.is_deferred = True
            if choice == "grant":
                self.grant(receiver)
            else:
                self.to_prefill.append((receiver.name, "deferred", None))
        elif kind == "reserve":
            self.to_prefill.append((receiver.name, "refused", None))
        elif machine is not None:
            if kind == "abort" and content in ("", machine.reservation):
                receiver.is_deferred = False
                if machine.state is ReceiverState.RUNNING:
                    receiver.committed = 0
                    receiver.machine = None
                    receiver.slots_held = False
                else:
                    self.run_receiver(receiver, machine.handle(decode.HandoffAborted()))
            elif kind == "drained" and content == machine.reservation:
                self.run_receiver(receiver, machine.handle(decode.WritesDrained()))
            elif kind == "handoff" and isinstance(content, Handoff):
                self.run_receiver(receiver, machine.handle(decode.HandoffReceived(content)))

    def deliver_to_prefill(self) -> None:
        name, kind, content = self.to_prefill.popleft()
        peer, sender = self.receivers[name].peer, self.sender
        if not self.receivers[name].alive:
            return
        match kind:
            case "granted" if isinstance(content, Granted):
                self.run_sender(sender.handle(prefill.ReservationGranted(peer, content)))
            case "deferred":
                self.run_sender(sender.handle(prefill.ReservationDeferred(peer)))
            case "refused":
                self.run_sender(sender.handle(prefill.ReservationRefused(peer, "refused")))
            case "released" if isinstance(content, str):
                self.run_sender(sender.handle(prefill.ReservationReleased(peer, content, "released")))
            case "committed" if isinstance(content, str):
                self.run_sender(sender.handle(prefill.HandoffCommitted(content)))
            case "resend" if isinstance(content, decode.SendResend):
                self.run_sender(
                    sender.handle(
                        prefill.ResendRequested(content.reservation, content.blocks, content.number, content.corrupted)
                    )
                )

    def take_write(self, write: Write) -> None:
        self.writes -= Counter([write])

    def land(self, write: Write, *, faulty: bool = False) -> None:
        """Its bytes are there. A transport that copies on the receiving side looks at its book only now."""
        self.take_write(write)
        self.completions.append(write)
        self.num_faults += faulty
        fate = self.rng.choice(["lost", "corrupted"]) if faulty else "landed"
        (self.damaged.add if fate == "corrupted" else self.damaged.discard)(write)
        if fate != "lost":
            self.notices.append((fate, write))

    def notify(self, notice: tuple[str, Write]) -> None:
        self.notices.remove(notice)
        fate, (name, reservation, index, rank) = notice
        receiver = self.receivers[name]
        machine = receiver.machine
        if not receiver.alive or machine is None or machine.reservation != reservation:
            return
        if (index, rank) in receiver.landed[reservation]:
            return  # the book drops a repeated block
        if fate == "corrupted":
            self.receive(receiver, rank, Corrupted(reservation, (index,)))
        else:
            receiver.landed[reservation].add((index, rank))
            self.receive(receiver, rank, Landed(reservation, (index,)))

    def receive(self, receiver: Receiver, rank: int, event: ReceiverEvent) -> None:
        """A rank of decode reports a transfer."""
        joined = self.landings[receiver.name].handle(rank, event)
        if joined is not None and receiver.machine is not None:
            self.run_receiver(receiver, receiver.machine.handle(joined))

    def recheck(self, receiver: Receiver, reservation: str, blocks: tuple[int, ...], rank: int) -> None:
        self.rechecks.remove((receiver, reservation, blocks, rank))
        damaged = tuple(block for block in blocks if (receiver.name, reservation, block, rank) in self.damaged)
        for event_class, some in ((Landed, tuple(sorted({*blocks} - {*damaged}))), (Corrupted, damaged)):
            if some and receiver.alive and receiver.machine is not None:
                receiver.landed[reservation].difference_update((block, rank) for block in damaged)
                self.receive(receiver, rank, event_class(reservation, some))

    def complete(self, write: Write) -> None:
        self.completions.remove(write)
        self.send(Pushed(write[1], (write[2],), 1))

    def send(self, event: SenderEvent) -> None:
        """A rank of prefill reports a transfer."""
        if (joined := self.pushes.handle(event)) is not None:
            self.run_sender(self.sender.handle(joined))

    def drain(self, reservation: str, rank: int) -> None:
        """A rank's transport stops: what was queued vanishes, what was on the wire landed before."""
        self.aborting.discard((reservation, rank))
        for write in [w for w in self.writes.elements() if w[1] == reservation and w[3] == rank]:
            if self.rng.random() < 0.5:
                self.land(write)
            else:
                self.take_write(write)
        self.send(SenderDrained(reservation))

    def compute(self) -> None:
        if self.computed < 0:
            self.computed = 0  # block 0 is decode's already, or not pushed before it is computed
            self.run_sender(self.sender.handle(prefill.PrefillScheduled(tuple(range(100, 100 + NUM_BLOCKS)))))
        elif self.computed < NUM_BLOCKS - 1:
            self.computed += 1
            self.run_sender(self.sender.handle(prefill.BlocksComputed(self.computed)))
        else:
            self.computed = NUM_BLOCKS
            finish = FinishReason.STOP_TOKEN if self.rng.random() < 0.1 else None
            first = FirstToken(index=0, token_id=1, finish=finish)
            self.run_sender(self.sender.handle(prefill.PrefillFinished(first)))
            self.first_ended = finish is not None

    first_ended = False

    def cancel(self) -> None:
        """To both legs; the links deliver at once here, the interesting orders come from when it happens."""
        self.cancelled = True
        self.run_sender(self.sender.handle(prefill.SendCancelled("client gone")))
        for receiver in self.receivers.values():
            machine = receiver.machine
            if not receiver.alive or machine is None:
                continue
            if machine.state is ReceiverState.RUNNING:
                receiver.committed, receiver.machine, receiver.slots_held = 0, None, False
            else:
                self.run_receiver(receiver, machine.handle(decode.ReceiveCancelled("client gone")))

    def kill(self, receiver: Receiver) -> None:
        receiver.alive = False
        receiver.inbox.clear()
        receiver.machine, receiver.committed, receiver.slots_held = None, 0, False
        self.run_sender(self.sender.handle(prefill.DecodeLost(receiver.peer, "silent")))

    def answer_router(self) -> None:
        excluded, self.router_owes_decode = self.router_owes_decode or [], None
        left = [r for r in self.receivers.values() if r.alive and r.name not in excluded]
        self.run_sender(self.sender.handle(prefill.DecodeReassigned(left[0].peer if left else None)))

    # -- the walk -----------------------------------------------------------------------------------------------------

    def choices(self, calm: bool) -> list[tuple[str, object]]:
        events: list[tuple[str, object]] = [("land", write) for write in sorted(self.writes)]
        events += [("notice", notice) for notice in self.notices]
        events += [("recheck", each) for each in self.rechecks]
        events += [("complete", write) for write in self.completions]
        if self.writes and self.num_faults < self.most_faults:
            events += [("fault", write) for write in sorted(self.writes)]
        events += [("drain", each) for each in sorted(self.aborting)]
        events += [("receiver", r) for r in self.receivers.values() if r.alive and r.inbox]
        events += [("grant", r) for r in self.receivers.values() if r.alive and r.machine and r.is_deferred]
        events += [("prefill", None)] * bool(self.to_prefill)
        active = self.sender.state in (SenderState.QUEUED, SenderState.COMPUTING)
        events += [("compute", None)] * (active and not self.cancelled)
        if not events or (not calm and self.rng.random() < 0.2):
            events += [("overdue", r) for r in self.receivers.values() if self.is_overdue(r)]
        events += [("router", None)] * (self.router_owes_decode is not None and not self.cancelled)
        if not calm and not self.cancelled and self.rng.random() < 0.03:
            events = [("cancel", None)]
        if not calm and self.rng.random() < 0.02 and self.receivers["d1"].alive:
            events = [("kill", self.receivers["d1"])]
        return events

    @staticmethod
    def is_overdue(receiver: Receiver) -> bool:
        machine = receiver.machine
        return receiver.alive and machine is not None and machine.state is ReceiverState.FILLING

    def walk(self, calm: bool) -> None:
        for _ in range(3000):
            events = self.choices(calm)
            if not events:
                return
            kind, what = self.rng.choice(events)
            match kind, what:
                case "land", tuple() as write:
                    self.land(write)
                case "fault", tuple() as write:
                    self.land(write, faulty=True)
                case "notice", tuple() as notice:
                    self.notify(notice)
                case "complete", tuple() as write:
                    self.complete(write)
                case "recheck", tuple() as each:
                    self.recheck(*each)
                case "overdue", Receiver() as receiver:
                    assert receiver.machine is not None
                    self.run_receiver(receiver, receiver.machine.handle(decode.HandoffOverdue()))
                case "drain", tuple() as each:
                    self.drain(*each)
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
