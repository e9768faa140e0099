"""Router, prefill and decode workers around the real machines, small enough to visit every state.

What is real: `SequenceAttempts`, `SenderHandoff`, `ReceiverHandoff`, `Quarantine`. What is modelled: pools and queues
of workers, links (each direction in order and once, until one end takes the other for lost), and a transport whose
writes land in any order, at any time until they were drained.

A state is never changed: `after` copies what a step touches. Names of workers begin with their role's letter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.engine.batch import SequenceKey
from kvrelay.protocol.messages import FirstToken, Granted, Handoff, PeerRef, Prefill, Reassign, TokenEntry
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay_decode import handoff as decode
from kvrelay_decode.quarantine import SETTLE_TICKS, Quarantine
from kvrelay_prefill import handoff as prefill
from kvrelay_router.dispatch import events as router
from kvrelay_router.dispatch.attempt import SequenceAttempts, SequenceSpec
from kvrelay_router.dispatch.load import worker_key
from tests.unit.handoff.check.search import Violation
from tests.unit.handoff.check.values import clone, freeze

R = "r"
MAX_TOKENS = 2
P, D = prefill.SenderState, decode.ReceiverState
DISTURBANCES = frozenset({"cancel", "deadline", "die", "cut", "drain", "fail", "lose", "resend"})
Step = tuple[Any, ...]
Write = tuple[str, str, str, int, int]  # prefill, decode, reservation, block, slot


@dataclass(frozen=True)
class Size:
    """An instance. `budget`: how often each disturbance may happen. `samples`: its requests are samples of one, which
    decode workers are sent one prompt for.
    """

    num_requests: int = 1
    prefills: tuple[str, ...] = ("p",)
    decodes: tuple[str, ...] = ("d",)
    num_blocks: int = 2
    prefill_pool: int = 2
    decode_pool: int = 2
    max_attempts: int = 2
    one_sided: bool = True
    samples: bool = False
    budget: tuple[tuple[str, int], ...] = ()


@dataclass
class Sending:
    """A sequence on a prefill worker. `own`: its blocks, none before it was admitted."""

    machine: prefill.SenderHandoff
    num_output: int
    own: tuple[int, ...] = ()
    num_computed: int = 0
    aborting: frozenset[str] = frozenset()


@dataclass
class Receiving:
    """A sequence on a decode worker. `machine` is None for a local prompt."""

    machine: decode.ReceiverHandoff | None
    prefill: str
    num_output: int
    slots: tuple[int, ...] = ()
    landed: frozenset[int] = frozenset()
    running: bool = False


def peer(name: str) -> PeerRef:
    """Every worker's only start."""
    return PeerRef(name, "1", name)


@dataclass
class World:
    """See the module's text. `rules` are what a test may break to see that it is noticed."""

    size: Size
    attempts: dict[str, SequenceAttempts]
    senders: dict[str, dict[SequenceKey, Sending]]
    receivers: dict[str, dict[SequenceKey, Receiving]]
    quarantines: dict[str, Quarantine]
    budget: dict[str, int]
    wishes: dict[str, Any] = field(default_factory=dict)  # of the router: placements to be found
    ended: dict[str, int] = field(default_factory=dict)
    buried: dict[str, frozenset[SequenceKey]] = field(default_factory=dict)
    links: dict[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    void: frozenset[tuple[str, str]] = frozenset()  # directions whose link the other end has dropped
    unaware: frozenset[tuple[str, str]] = frozenset()  # (who, of whose death) has not been told
    lost: frozenset[str] = frozenset()  # workers that the router does not use
    dead: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    writes: frozenset[Write] = frozenset()
    granted: int = 0

    # -- the search's side --------------------------------------------------------------------------------------------

    def key(self) -> Hashable:
        """All that matters for what comes."""
        return (
            tuple(freeze(machine) for machine in self.attempts.values()),
            _frozen_all(self.senders),
            _frozen_all(self.receivers),
            tuple(freeze(machine) for machine in self.quarantines.values()),
            tuple(self.budget.values()),
            freeze(self.wishes),
            tuple(sorted(self.ended.items())),
            tuple(sorted(self.buried.items())),
            tuple(sorted((pair, freeze(queue)) for pair, queue in self.links.items() if queue)).__repr__(),
            (self.void, self.unaware, self.lost, self.dead, self.draining, self.writes, self.granted),
        )

    @property
    def is_good_end(self) -> bool:
        """Every request has ended, nobody alive holds anything."""
        if any(not machine.is_over for machine in self.attempts.values()):
            return False
        return not any(all_ for who, all_ in (*self.senders.items(), *self.receivers.items()) if who not in self.dead)

    def check(self) -> None:
        """What holds in every state."""
        for r, count in self.ended.items():
            if count > 1:
                raise Violation(f"request {r} ended {count} times")
        for r, machine in self.attempts.items():
            if machine.is_over != bool(self.ended.get(r)):
                raise Violation(f"request {r} is over without an end, or ended without being over")
            if machine.output != list(range(len(machine.output))):
                raise Violation(f"tokens {machine.output}")
        for who, all_ in self.senders.items():
            self._check_pool(who, [s.own for s in all_.values()], self.size.prefill_pool)
        for who, receivings in self.receivers.items():
            held = [r.slots for r in receivings.values()]
            self._check_pool(who, list(dict.fromkeys(held)) if self.size.samples else held, self.size.decode_pool)
            for key, receiving in receivings.items():
                is_whole = receiving.machine is None or len(receiving.landed) == self.size.num_blocks
                if receiving.running and not is_whole:
                    raise Violation(f"{key} runs on {who} with blocks {sorted(receiving.landed)} alone")
        if self.size.one_sided:
            for write in self.writes:
                self._check_write(write)

    def _check_pool(self, who: str, held: list[tuple[int, ...]], size: int) -> None:
        blocks = [block for one in held for block in one]
        if len(set(blocks)) != len(blocks) or any(not 0 <= block < size for block in blocks):
            raise Violation(f"blocks of {who} do not add up: {held}")

    def _check_write(self, write: Write) -> None:
        p, d, reservation, _, slot = write
        if d in self.dead:
            return
        holders = [receiving for receiving in self.receivers[d].values() if slot in receiving.slots]
        for receiving in holders:
            machine = receiving.machine
            if receiving.running:
                raise Violation(f"a write of {p} may land in slot {slot} of {d}, which a running sequence reads")
            if len(holders) == 1 and machine is not None and machine.reservation == reservation:
                return
        raise Violation(f"a write of {p} may land in slot {slot} of {d}, which is free or another's")

    # -- what may happen ----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Names of steps. The router answers its machine's wish for a decode worker before anything else happens."""
        asked = [r for r, wish in self.wishes.items() if isinstance(wish, router.FindDecode)]
        if asked:
            yield from self._placements(asked[0])
            return
        for pair, queue in self.links.items():
            if queue and pair[1] not in self.dead:
                yield ("deliver", *pair)
        for who, of in sorted(self.unaware):
            if who not in self.dead:
                yield ("learn", who, of)
        for r in self.wishes:
            yield from self._placements(r)
        for who, sendings in self.senders.items():
            if who not in self.dead:
                yield from self._prefill_steps(who, sendings)
        for who, receivings in self.receivers.items():
            if who not in self.dead:
                yield from self._decode_steps(who, receivings)
        for write in sorted(self.writes):
            yield ("land", write)
            if self._is_aborting(write):
                yield ("vanish", write)
            elif self.budget.get("lose") and not self.size.one_sided:
                yield ("lose", write)
        yield from self._disturbances()

    def _placements(self, r: str) -> Iterator[Step]:
        wish = self.wishes[r]
        decodes = [d for d in self.size.decodes if d not in self.lost]
        if isinstance(wish, router.FindDecode):
            left: list[str | None] = [d for d in decodes if worker_key(peer(d)) not in wish.excluded]
            yield from (("reassign", r, d) for d in left or [None])
            return
        prefills: list[str | None] = [p for p in self.size.prefills if p not in self.lost]
        if isinstance(wish, router.AwaitLost):
            yield ("place", r, None, None)
            return
        if not decodes:
            yield ("place", r, None, None)
        yield from (("place", r, p, d) for p in prefills or [None] for d in decodes)

    def _prefill_steps(self, who: str, sendings: dict[SequenceKey, Sending]) -> Iterator[Step]:
        for key, sending in sendings.items():
            state = sending.machine.state
            if state is P.QUEUED and len(self._free(who)) >= self.size.num_blocks:
                yield ("admit", who, key)
            if state is P.COMPUTING:
                yield ("compute", who, key)
            for reservation in sorted(sending.aborting):
                if not any(write[2] == reservation for write in self.writes):
                    yield ("drained", who, key, reservation)
            if state in (P.COMPUTING, P.SENDING, P.HANDED) and self.budget.get("fail") and sending.machine._grant:
                yield ("fail", who, key)
            if self.budget.get("deadline"):
                yield ("deadline", who, key)

    def _decode_steps(self, who: str, receivings: dict[SequenceKey, Receiving]) -> Iterator[Step]:
        for key, receiving in receivings.items():
            machine = receiving.machine
            if receiving.running:
                yield ("decode", who, key)
            elif machine is None and len(self._free(who)) >= self.size.num_blocks:
                yield ("local", who, key)
            if machine is not None and machine.awaits_blocks:
                if self._is_lost(machine) and not self.links.get((who, receiving.prefill)):
                    yield ("repeat", who, key)
                elif self.budget.get("resend"):
                    yield ("resend", who, key)
            if machine is not None and machine.state is D.QUARANTINED:
                if receiving.prefill in self.dead and not any(w[2] == machine.reservation for w in self.writes):
                    yield ("ended", who, key)  # the process is seen to be no more
                elif self._may_ask(who, key, receiving.prefill):
                    yield ("ask", who, key)
            if self.budget.get("deadline"):
                yield ("deadline", who, key)

    def _may_ask(self, who: str, key: SequenceKey, p: str) -> bool:
        entry = self.quarantines[who]._entries.get(key)
        return entry is not None and entry.lost and p not in self.dead and not self.links.get((who, p))

    def _disturbances(self) -> Iterator[Step]:
        if self.budget.get("cancel"):
            yield from (("cancel", r) for r, machine in self.attempts.items() if not machine.is_over)
        workers = [who for who in (*self.size.prefills, *self.size.decodes) if who not in self.dead]
        if self.budget.get("die"):
            yield from (("die", who) for who in workers)
        if self.budget.get("drain"):
            yield from (("drain", who) for who in workers if who not in self.draining)
        if self.budget.get("cut"):
            yield from (("cut", a, b) for a in self.size.prefills for b in self.size.decodes if not {a, b} & self.dead)
            yield from (("cut", b, a) for a in self.size.prefills for b in self.size.decodes if not {a, b} & self.dead)
            yield from (("cut", R, who) for who in workers)
            yield from (("cut", who, R) for who in workers)

    # -- steps --------------------------------------------------------------------------------------------------------

    def after(self, step: Step) -> World:
        """The next state; this one stays."""
        world = self._copy()
        name = step[0]
        if name in DISTURBANCES:
            world.budget[name] -= 1
        getattr(world, f"_{name}")(*step[1:])
        for d in world.size.decodes:
            if d not in world.dead:
                world._grant_wishes(d)
        return world

    def _copy(self) -> World:
        return replace(
            self,
            attempts=dict(self.attempts),
            senders={who: dict(all_) for who, all_ in self.senders.items()},
            receivers={who: dict(all_) for who, all_ in self.receivers.items()},
            quarantines=dict(self.quarantines),
            budget=dict(self.budget),
            wishes=dict(self.wishes),
            ended=dict(self.ended),
            buried=dict(self.buried),
            links=dict(self.links),
        )

    def _sending(self, who: str, key: SequenceKey) -> Sending:
        """To be changed."""
        old = self.senders[who][key]
        made = self.senders[who][key] = replace(old, machine=clone(old.machine))
        return made

    def _receiving(self, who: str, key: SequenceKey) -> Receiving:
        """To be changed."""
        old = self.receivers[who][key]
        made = replace(old, machine=clone(old.machine) if old.machine is not None else None)
        self.receivers[who][key] = made
        return made

    def _free(self, who: str) -> list[int]:
        if who in self.senders:
            held = {block for s in self.senders[who].values() for block in s.own}
            return [block for block in range(self.size.prefill_pool) if block not in held]
        held = {block for r in self.receivers[who].values() for block in r.slots}
        return [block for block in range(self.size.decode_pool) if block not in held]

    # -- links --------------------------------------------------------------------------------------------------------

    def _post(self, source: str, to: str, *message: Any) -> None:
        if (source, to) in self.void or to in self.dead:
            return
        self.links[source, to] = (*self.links.get((source, to), ()), message)

    def _deliver(self, source: str, to: str) -> None:
        message, *rest = self.links[source, to]
        self.links[source, to] = tuple(rest)
        if message[0] == "lost":
            self.void -= {(to, source)}
            self._lose_peer(to, source)
        elif message[0] == "query":
            self._post(to, source, "hello")
        elif message[0] == "hello":
            self.lost -= {source} - self.draining
        elif to == R:
            self._at_router(source, *message)
        elif to in self.senders:
            self._at_prefill(to, source, *message)
        else:
            self._at_decode(to, source, *message)

    def _cut(self, first: str, second: str) -> None:
        """`first` takes `second` for lost, which hears of it by whatever `first` sends next, or by the silence."""
        self.links[first, second] = (("lost",),)
        self.links[second, first] = ()
        self.void |= {(second, first)}
        self._lose_peer(first, second)

    def _die(self, who: str) -> None:
        self.dead |= {who}
        for other in (R, *self.size.prefills, *self.size.decodes):
            self.links[other, who] = ()
            if other != who and other not in self.dead and (other[0] != who[0] or other == R):
                self.unaware |= {(other, who)}
        if who in self.receivers:
            self.writes = frozenset(write for write in self.writes if write[1] != who)

    def _learn(self, who: str, of: str) -> None:
        """What the dead one had sent and nobody took is void then."""
        self.unaware -= {(who, of)}
        self.links[of, who] = ()
        self._lose_peer(who, of)

    def _lose_peer(self, who: str, of: str) -> None:
        if who == R:
            self.lost |= {of}  # until it answers
            self._post(R, of, "query")
            for r, attempts in list(self.attempts.items()):
                if attempts.involves(peer(of)) and not attempts.is_over:
                    self._feed(r, router.WorkerLost(peer(of), "silent"))
        elif who in self.senders:
            for key in list(self.senders[who]):
                if of == R:
                    self._cancel_sending(who, key)
                else:
                    sending = self._sending(who, key)
                    if sending.machine.decode == peer(of):
                        self._run_sender(who, key, sending.machine.decode_lost(peer(of), "silent"))
        else:
            for key, receiving in list(self.receivers[who].items()):
                if of == R:
                    self._cancel_receiving(who, key)
                elif receiving.prefill == of and receiving.machine is not None:
                    changed = self._receiving(who, key)
                    assert changed.machine is not None
                    self._run_receiver(who, key, changed.machine.sender_lost())
            quarantine = self._quarantine(who)
            quarantine.lost(peer(of), 0.0, replaced=False)

    # -- the router ---------------------------------------------------------------------------------------------------

    def _feed(self, r: str, event: router.Event) -> None:
        machine = self.attempts[r] = clone(self.attempts[r])
        for instruction in machine.handle(event):
            match instruction:
                case router.Send(worker, attempt, body):
                    key = (r, attempt, 0)
                    match body:
                        case Prefill():
                            to = body.decode.peer_id if body.decode else None
                            self._post(R, worker.peer_id, "prefill", key, to, body.prompt.num_output)
                        case Reassign():
                            self._post(R, worker.peer_id, "reassign", key, body.decode.peer_id if body.decode else None)
                        case _ if type(body).__name__ == "Generate":
                            self._post(R, worker.peer_id, "generate", key, body.prompt.num_output)  # type: ignore[union-attr]
                        case _:
                            self._post(R, worker.peer_id, "cancel", key)
                    if worker.peer_id in self.dead:
                        self.unaware |= {(R, worker.peer_id)}
                case router.FindPlacement() | router.AwaitLost() | router.FindDecode():
                    self.wishes[r] = instruction
                case router.Ended():
                    self.wishes.pop(r, None)
                    self.ended[r] = self.ended.get(r, 0) + 1

    def _place(self, r: str, p: str | None, d: str | None) -> None:
        del self.wishes[r]
        if d is None:
            self._feed(r, router.NotPlaced("no worker"))
            return
        self._feed(r, router.Placed(peer(p) if p is not None else None, peer(d), 60.0))

    def _reassign(self, r: str, d: str | None) -> None:
        del self.wishes[r]
        self._feed(r, router.DecodeChosen(peer(d) if d is not None else None))

    def _at_router(self, source: str, kind: str, key: SequenceKey, *more: Any) -> None:
        r, attempt, _ = key
        if self.attempts[r].is_over:  # the dispatcher has forgotten it
            if kind == "need":
                self._post(R, source, "cancel", key)
            return
        match kind, more:
            case "first", (index, token, finish):
                body = FirstToken(index=index, token_id=token, finish=finish)
                self._feed(r, router.FirstTokenCame(peer(source), attempt, body))
            case "tokens", (index, tokens, finish):
                entry = TokenEntry(
                    request=r, attempt=attempt, sequence=0, index=index, token_ids=list(tokens), finish=finish
                )
                self._feed(r, router.TokensCame(peer(source), entry))
            case "need", (excluded, lacks):
                self._feed(r, router.DecodeNeeded(peer(source), attempt, "needed", frozenset(excluded), lacks))
            case "failed", (retriable,):
                self._feed(r, router.AttemptFailed(peer(source), attempt, "failed", retriable))

    def _cancel(self, r: str) -> None:
        self._feed(r, router.Cancelled("the client is gone"))

    # -- prefill workers ----------------------------------------------------------------------------------------------

    def _at_prefill(self, who: str, source: str, kind: str, key: SequenceKey, *more: Any) -> None:
        if kind == "prefill":
            if key in self.buried.get(who, ()) or key in self.senders[who]:
                return
            if who in self.draining:
                self._post(who, source, "failed", key, True)
                return
            for other in [k for k in self.senders[who] if k[0] == key[0] and k[1] < key[1]]:
                self._cancel_sending(who, other)
            to, num_output = more
            machine = prefill.SenderHandoff(peer(to) if to is not None else None)
            self.senders[who][key] = Sending(machine, num_output)
        elif kind == "cancel":
            self._cancel_sending(who, key)
            self.buried[who] = self.buried.get(who, frozenset()) | {key}
        elif key not in self.senders[who]:
            if kind == "granted":
                self._post(who, source, "abort", key, more[0])
                self._post(who, source, "drained", key, more[0])
            elif kind == "released":
                self._post(who, source, "drained", key, more[0])
            elif kind == "reassign":
                self._post(who, source, "failed", key, True)
        else:
            machine = self._sending(who, key).machine
            self._run_sender(who, key, self._to_sender(machine, peer(source), kind, more))

    def _to_sender(
        self, machine: prefill.SenderHandoff, source: PeerRef, kind: str, more: tuple[Any, ...]
    ) -> list[prefill.Instruction]:
        match kind, more:
            case "granted", (reservation, slots):
                granted = Granted(
                    reservation=reservation,
                    first_block=self.size.num_blocks - len(slots),
                    slots=list(slots),
                    transport="t",
                    endpoint={"d": source.peer_id},
                )
                return machine.granted(source, granted)
            case "deferred", _:
                return machine.deferred(source)
            case "refused", _:
                return machine.refused(source, "refused")
            case "released", (reservation,):
                return machine.released(source, reservation, "released")
            case "committed", (reservation,):
                return machine.committed(reservation)
            case "resend", (reservation, blocks, number):
                return machine.resend(reservation, blocks, number)
            case "reassign", (to,):
                return machine.reassigned(peer(to) if to is not None else None)
        raise AssertionError(kind)

    def _admit(self, who: str, key: SequenceKey) -> None:
        sending = self._sending(who, key)
        sending.own = tuple(self._free(who)[: self.size.num_blocks])
        self._run_sender(who, key, sending.machine.scheduled(list(sending.own)))

    def _compute(self, who: str, key: SequenceKey) -> None:
        sending = self._sending(who, key)
        sending.num_computed += 1
        if sending.num_computed < self.size.num_blocks:
            self._run_sender(who, key, sending.machine.computed(sending.num_computed))
            return
        index = sending.num_output
        finish = FinishReason.LENGTH if index + 1 >= MAX_TOKENS else None
        self._post(who, R, "first", key, index, index, finish)
        self._run_sender(who, key, sending.machine.prefilled(FirstToken(index=index, token_id=index, finish=finish)))

    def _run_sender(self, who: str, key: SequenceKey, instructions: list[prefill.Instruction]) -> None:
        sending = self.senders[who][key]
        for instruction in instructions:
            match instruction:
                case prefill.AskDecode(to):
                    self._post(who, to.peer_id, "reserve", key, sending.num_output)
                    if to.peer_id in self.dead:
                        self.unaware |= {(who, to.peer_id)}
                case prefill.AskRouter(_, excluded, lacks):
                    self._post(who, R, "need", key, excluded, lacks)
                case prefill.PushBlocks(reservation, _, endpoint, copies):
                    self._push(who, sending, reservation, endpoint["d"], [(c.index, c.source, c.slot) for c in copies])
                case prefill.SendHandoff(to, reservation, _, resend):
                    assert sending.machine.first_token is not None
                    index = sending.machine.first_token.index
                    self._post(who, to.peer_id, "handoff", key, reservation, index, resend)
                case prefill.AbortTransfer(reservation, _):
                    sending.aborting |= {reservation}
                case prefill.SendAbort(to, reservation, _):
                    self._post(who, to.peer_id, "abort", key, reservation)
                case prefill.SendDrained(to, reservation):
                    self._post(who, to.peer_id, "drained", key, reservation)
                case prefill.FailRequest():
                    self._post(who, R, "failed", key, True)
                case prefill.ReleaseBlocks():
                    self._release(who, key)

    def _push(self, who: str, sending: Sending, reservation: str, d: str, copies: list[tuple[int, int, int]]) -> None:
        for index, source, slot in copies:
            if index >= sending.num_computed:
                raise Violation(f"block {index} is pushed before it is computed")
            if source not in sending.own:
                raise Violation(f"block {source} is pushed and not held")
            if d not in self.dead:
                self.writes |= {(who, d, reservation, index, slot)}

    def _release(self, who: str, key: SequenceKey) -> None:
        del self.senders[who][key]

    def _drained(self, who: str, key: SequenceKey, reservation: str) -> None:
        sending = self._sending(who, key)
        sending.aborting -= {reservation}
        self._run_sender(who, key, sending.machine.drained(reservation))

    def _fail(self, who: str, key: SequenceKey) -> None:
        sending = self._sending(who, key)
        assert sending.machine._grant is not None
        self._run_sender(who, key, sending.machine.transfer_failed(sending.machine._grant.reservation, "broken"))

    def _cancel_sending(self, who: str, key: SequenceKey) -> None:
        if key in self.senders[who]:
            sending = self._sending(who, key)
            self._run_sender(who, key, sending.machine.cancel("cancelled"))

    # -- decode workers -----------------------------------------------------------------------------------------------

    def _at_decode(self, who: str, source: str, kind: str, key: SequenceKey, *more: Any) -> None:
        match kind:
            case "reserve":
                self._reserve(who, source, key, more[0])
            case "generate":
                if key in self.buried.get(who, ()) or key in self.receivers[who]:
                    return
                if who in self.draining:
                    self._post(who, source, "failed", key, True)
                    return
                self._supersede(who, key)
                self.receivers[who][key] = Receiving(None, "", more[0])
            case "cancel":
                self._cancel_receiving(who, key)
                self.buried[who] = self.buried.get(who, frozenset()) | {key}
            case _ if key in self.receivers[who]:
                self._from_prefill(who, key, kind, *more)

    def _reserve(self, who: str, source: str, key: SequenceKey, num_output: int) -> None:
        if who in self.draining or key in self.buried.get(who, ()):
            self._post(who, source, "refused", key)
            return
        self._supersede(who, key)
        known = self.receivers[who].get(key)
        if known is not None and known.prefill == source:
            return
        if known is not None:
            self._cancel_receiving(who, key)
        if key in self.receivers[who]:
            self._post(who, source, "refused", key)
            return
        self.receivers[who][key] = Receiving(decode.ReceiverHandoff(), source, num_output)
        self._grant_wishes(who)
        made = self.receivers[who][key].machine
        if made is not None and made.state is D.ASKED:
            self._post(who, source, "deferred", key)

    def _supersede(self, who: str, key: SequenceKey) -> None:
        for other in [k for k in self.receivers[who] if k[0] == key[0] and k[1] < key[1]]:
            self._cancel_receiving(who, other)

    def _grant_wishes(self, who: str) -> None:
        for key, waiting in list(self.receivers[who].items()):
            if waiting.machine is None or waiting.machine.state is not D.ASKED:
                continue
            others = list(self.receivers[who].values()) if self.size.samples else []
            shared = next((each.slots for each in others if each.running), ())
            if not shared and any(each.machine and each.machine.state in (D.RESERVED, D.FILLING) for each in others):
                continue  # what it lacks is on its way
            free = self._free(who)
            if not shared and len(free) < self.size.num_blocks:
                return
            receiving = self._receiving(who, key)
            assert receiving.machine is not None
            receiving.slots = shared or tuple(free[: self.size.num_blocks])
            receiving.landed = frozenset(range(self.size.num_blocks)) if shared else frozenset()
            self.granted += 1
            reservation, sent = f"{who}{self.granted}", () if shared else receiving.slots
            first = self.size.num_blocks - len(sent)
            receiving.machine.granted(reservation, first, self.size.num_blocks, needs_quarantine=self.size.one_sided)
            self._post(who, receiving.prefill, "granted", key, reservation, sent)

    def _from_prefill(self, who: str, key: SequenceKey, kind: str, reservation: str, *more: Any) -> None:
        receiving = self.receivers[who][key]
        if receiving.machine is None or (reservation and reservation != receiving.machine.reservation):
            return
        receiving = self._receiving(who, key)
        assert receiving.machine is not None
        match kind:
            case "handoff":
                index, resend = more
                body = Handoff(
                    reservation=reservation,
                    index=index,
                    token_id=index,
                    num_tokens=1,
                    num_blocks=self.size.num_blocks,
                    resend=resend,
                )
                self._run_receiver(who, key, receiving.machine.handed(body))
            case "abort":
                self._run_receiver(who, key, receiving.machine.aborted())
            case "drained" if receiving.machine.state is D.QUARANTINED:
                self._quarantine(who).drained(key)
                self._settle(who)

    def _run_receiver(self, who: str, key: SequenceKey, instructions: list[decode.Instruction]) -> None:
        receiving = self.receivers[who][key]
        machine = receiving.machine
        assert machine is not None
        for instruction in instructions:
            match instruction:
                case decode.Commit(message):
                    receiving.running = True
                    self._post(who, receiving.prefill, "committed", key, message.reservation)
                    self._post(who, R, "tokens", key, message.index, (message.token_id,), None)
                    receiving.num_output = message.index + 1
                case decode.Quarantine():
                    self._quarantine(who).add(key, peer(receiving.prefill), receiving.prefill)
                case decode.FreeBlocks():
                    receiving.slots = ()
                case decode.AskForMissing(reservation, blocks, number):
                    self._post(who, receiving.prefill, "resend", key, reservation, blocks, number)
                case decode.TellReleased(reservation):
                    self._post(who, receiving.prefill, "released", key, reservation)
        if machine.state is D.FREED:
            del self.receivers[who][key]

    def _quarantine(self, who: str) -> Quarantine:
        made = self.quarantines[who] = clone(self.quarantines[who])
        return made

    def _settle(self, who: str) -> None:
        """The ticks after a proof: no time passes here."""
        for _ in range(SETTLE_TICKS):
            for key in self._quarantine(who).tick(0.0).safe:
                receiving = self._receiving(who, key)
                assert receiving.machine is not None
                self._run_receiver(who, key, receiving.machine.drained())

    def _ended(self, who: str, key: SequenceKey) -> None:
        self._quarantine(who).drained(key)
        self._settle(who)

    def _ask(self, who: str, key: SequenceKey) -> None:
        receiving = self.receivers[who][key]
        assert receiving.machine is not None
        self._post(who, receiving.prefill, "released", key, receiving.machine.reservation)

    def _is_lost(self, machine: decode.ReceiverHandoff) -> bool:
        under_way = {write[3] for write in self.writes if write[2] == machine.reservation}
        return bool(machine._missing - under_way)

    def _repeat(self, who: str, key: SequenceKey) -> None:
        self._resend(who, key)

    def _resend(self, who: str, key: SequenceKey) -> None:
        receiving = self._receiving(who, key)
        assert receiving.machine is not None
        self._run_receiver(who, key, receiving.machine.overdue())

    def _local(self, who: str, key: SequenceKey) -> None:
        receiving = self._receiving(who, key)
        receiving.slots, receiving.running = tuple(self._free(who)[: self.size.num_blocks]), True

    def _decode(self, who: str, key: SequenceKey) -> None:
        receiving = self._receiving(who, key)
        index = receiving.num_output
        receiving.num_output += 1
        finish = FinishReason.LENGTH if receiving.num_output >= MAX_TOKENS else None
        self._post(who, R, "tokens", key, index, (index,), finish)
        if finish is not None:
            del self.receivers[who][key]

    def _cancel_receiving(self, who: str, key: SequenceKey) -> None:
        if key not in self.receivers[who]:
            return
        receiving = self._receiving(who, key)
        if receiving.machine is None or receiving.machine.state is D.RUNNING:
            del self.receivers[who][key]
        elif receiving.machine.state is D.ASKED:
            del self.receivers[who][key]
            self._post(who, receiving.prefill, "refused", key)
        else:
            self._run_receiver(who, key, receiving.machine.cancel("cancelled"))

    # -- both ---------------------------------------------------------------------------------------------------------

    def _deadline(self, who: str, key: SequenceKey) -> None:
        self._give_up(who, key, retriable=False)

    def _drain(self, who: str) -> None:
        """No more requests; what is there is abandoned at once, which is the hardest moment for it."""
        self.draining |= {who}
        self.lost |= {who}
        for key in list(self.senders.get(who, ())) + list(self.receivers.get(who, ())):
            self._give_up(who, key, retriable=True)

    def _give_up(self, who: str, key: SequenceKey, *, retriable: bool) -> None:
        if who in self.senders:
            if self.senders[who][key].machine.state is not P.DRAINING:
                self._post(who, R, "failed", key, retriable)
                self._cancel_sending(who, key)
            return
        receiving = self.receivers[who][key]
        machine = receiving.machine
        if machine is None or machine.state is D.RUNNING:
            self._post(who, R, "failed", key, retriable)
        if machine is None or machine.state is not D.QUARANTINED:
            self._cancel_receiving(who, key)

    # -- the transport ------------------------------------------------------------------------------------------------

    def _is_aborting(self, write: Write) -> bool:
        p, _, reservation, _, _ = write
        return p in self.dead or any(reservation in sending.aborting for sending in self.senders[p].values())

    def _land(self, write: Write) -> None:
        self.writes -= {write}
        p, d, reservation, index, _ = write
        self._tell_pushed(p, reservation, index)
        for key, found in list(self.receivers[d].items()):
            machine = found.machine
            if machine is not None and machine.reservation == reservation:
                receiving = self._receiving(d, key)
                assert receiving.machine is not None
                if receiving.machine.state in (D.RESERVED, D.FILLING):
                    receiving.landed |= {index}
                self._run_receiver(d, key, receiving.machine.landed(reservation, [index]))

    def _vanish(self, write: Write) -> None:
        self.writes -= {write}

    def _lose(self, write: Write) -> None:
        self.writes -= {write}
        self._tell_pushed(write[0], write[2], write[3])

    def _tell_pushed(self, p: str, reservation: str, index: int) -> None:
        for key in list(self.senders[p]):
            self._run_sender(p, key, self._sending(p, key).machine.pushed(reservation, [index]))


def _frozen_all(workers: Mapping[str, Mapping[SequenceKey, Sending | Receiving]]) -> Hashable:
    """Of all workers of a kind. In the order of arrival, which counts."""
    return tuple(
        (who, key, *map(freeze, vars(each).values())) for who, all_ in workers.items() for key, each in all_.items()
    )


def start(size: Size, make: Callable[..., World] = World) -> World:
    """The state in which every request waits for its workers."""
    spec = SequenceSpec(
        sequence=0,
        prompt=b"\1\0\0\0",
        num_prompt_tokens=1,
        sampling=Sampling(max_tokens=MAX_TOKENS),
        max_attempts=size.max_attempts,
    )
    names = [f"q{number}" for number in range(size.num_requests)]
    return make(
        size=size,
        attempts={name: SequenceAttempts(spec) for name in names},
        senders={p: {} for p in size.prefills},
        receivers={d: {} for d in size.decodes},
        quarantines={d: Quarantine(bool, bool) for d in size.decodes},
        budget=dict(size.budget),
        wishes={name: router.FindPlacement(1, "", frozenset()) for name in names},
    )
