"""Router, prefill and decode workers around the real machines, small enough to visit every state.

What is real: `DrivenSequence`, `SenderHandoff`, `ReceiverHandoff`, `Quarantine`, and for workers of several ranks the
map of their parts, `PushProgress` and `LandingProgress`. What is modelled: pools and queues of workers, links (each
direction in order and once, until one end takes the other for lost), and a transport whose writes land in any order, at
any time until they were drained.

A state is never changed: `after` copies what a step touches. Names of workers begin with their role's letter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Self

from kvrelay.handoff.quarantine import Quarantine, QuarantineState
from kvrelay.handoff.receiver import PrefillLost
from kvrelay.handoff.receiver import ReceiverState as D
from kvrelay.handoff.sender import DecodeLost
from kvrelay.handoff.sender import SenderState as P
from kvrelay.handoff.transports.base import Pushed
from kvrelay.handoff.transports.sharded import LandingProgress, PushProgress
from kvrelay.protocol.messages import Prompt
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay_router.dispatch import events as router
from kvrelay_router.dispatch.events import SequenceSpec
from kvrelay_router.fleet.load import worker_key
from tests.unit.dispatch.driven_sequence import DrivenSequence
from tests.unit.handoff.check import decode_side, prefill_side, router_side
from tests.unit.handoff.check.search import Violation
from tests.unit.handoff.check.state import MAX_TOKENS, R, Receiving, Sending, Size, State, Write, peer
from tests.unit.handoff.check.values import freeze

DISTURBANCES = frozenset({"cancel", "deadline", "die", "cut", "drain", "fail", "lose", "late", "corrupt"})
Step = tuple[Any, ...]


class World(State):
    # -- the search's side --------------------------------------------------------------------------------------------

    def key(self) -> Hashable:
        """All that matters for what comes."""
        return (
            tuple(freeze(machine) for machine in self.attempts.values()),
            _frozen_all(self.senders),
            _frozen_all(self.receivers),
            tuple(
                freeze(each) for each in (*self.quarantines.values(), *self.pushes.values(), *self.landings.values())
            ),
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
        whole = self.size.parts_of(range(self.size.num_blocks))
        for who, all_ in self.senders.items():
            self._check_pool(who, [s.own for s in all_.values()], self.size.prefill_pool)
        for who, receivings in self.receivers.items():
            held = [r.slots for r in receivings.values()]
            self._check_pool(who, list(dict.fromkeys(held)) if self.size.samples else held, self.size.decode_pool)
            for key, receiving in receivings.items():
                is_whole = receiving.machine is None or receiving.landed == whole
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
        p, d, reservation, _, slot, _ = write
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
            elif self.budget.get("corrupt"):
                yield ("corrupt", write)
        yield from self._disturbances()

    def _placements(self, r: str) -> Iterator[Step]:
        wish = self.wishes[r]
        decodes = [d for d in self.size.decodes if d not in self.lost]
        if isinstance(wish, router.FindDecode):
            left: list[str | None] = [d for d in decodes if worker_key(peer(d)) not in wish.excluded]
            yield from (("reassign", r, d) for d in left or [None])
            return
        prefills: list[str | None] = [p for p in self.size.prefills if p not in self.lost]
        if isinstance(wish, router.AwaitLostWorkers):
            yield ("place", r, None, None)
            return
        if not decodes:
            yield ("place", r, None, None)
        yield from (("place", r, p, d) for p in prefills or [None] for d in decodes)

    def _prefill_steps(self, who: str, sendings: dict[SequenceKey, Sending]) -> Iterator[Step]:
        for key, sending in sendings.items():
            state = sending.machine.state
            if state is P.QUEUED and len(self.free(who)) >= self.size.num_blocks:
                yield ("admit", who, key)
            if state is P.COMPUTING:
                yield ("compute", who, key)
            for reservation, rank in sorted(sending.aborting):
                if not any(write[2] == reservation and self.size.source_rank(write) == rank for write in self.writes):
                    yield ("drained", who, key, reservation, rank)
            if state in (P.COMPUTING, P.SENDING, P.HANDED) and self.budget.get("fail") and sending.machine._granted:
                yield from (("fail", who, key, rank) for rank in range(self.size.ranks[0]))
            if self.budget.get("deadline"):
                yield ("deadline", who, key)

    def _decode_steps(self, who: str, receivings: dict[SequenceKey, Receiving]) -> Iterator[Step]:
        for key, receiving in receivings.items():
            machine = receiving.machine
            if receiving.running:
                yield ("decode", who, key)
            elif machine is None and len(self.free(who)) >= self.size.num_blocks:
                yield ("local", who, key)
            if machine is not None and machine.awaits_blocks:
                if decode_side.is_lost(self, receiving):
                    yield ("overdue", who, key)
                elif self.budget.get("late"):
                    yield ("late", who, key)
            if machine is not None and machine.state is D.QUARANTINED:
                if receiving.prefill in self.dead and not any(w[2] == machine.reservation for w in self.writes):
                    yield ("ended", who, key)  # the process is seen to be no more
                elif self._may_ask(who, key, receiving.prefill):
                    yield ("ask", who, key)
            if self.budget.get("deadline"):
                yield ("deadline", who, key)

    def _may_ask(self, who: str, key: SequenceKey, p: str) -> bool:
        entry = self.quarantines[who]._entries.get(key)
        return (
            entry is not None
            and entry.state is QuarantineState.LOST
            and p not in self.dead
            and not self.links.get((who, p))
        )

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

    def after(self, step: Step) -> Self:
        """The next state; this one stays."""
        world = self.copy()
        name = step[0]
        if name in DISTURBANCES:
            world.budget[name] -= 1
        _STEPS[name](world, *step[1:])
        for d in world.size.decodes:
            if d not in world.dead:
                decode_side.admit_pending(world, d)
        return world

    # -- links --------------------------------------------------------------------------------------------------------

    def _deliver(self, source: str, to: str) -> None:
        message, *rest = self.links[source, to]
        self.links[source, to] = tuple(rest)
        if message[0] == "lost":
            self.void -= {(to, source)}
            self._lose_peer(to, source)
        elif message[0] == "query":
            self.post(to, source, "hello")
        elif message[0] == "hello":
            self.lost -= {source} - self.draining
        elif to == R:
            router_side.take(self, source, *message)
        elif to in self.senders:
            prefill_side.take(self, to, source, *message)
        else:
            decode_side.take(self, to, source, *message)

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
            self.post(R, of, "query")
            for r, attempts in list(self.attempts.items()):
                if attempts.involves(peer(of)) and not attempts.is_over:
                    router_side.feed(self, r, router.WorkerLost(peer(of), 0, "silent"))
        elif who in self.senders:
            for key in list(self.senders[who]):
                if of == R:
                    prefill_side.cancel(self, who, key)
                else:
                    sending = self.sending(who, key)
                    if sending.machine.decode == peer(of):
                        prefill_side.run(self, who, key, sending.machine.handle(DecodeLost(peer(of), "silent")))
        else:
            for key, receiving in list(self.receivers[who].items()):
                if of == R:
                    decode_side.cancel(self, who, key)
                elif receiving.prefill == of and receiving.machine is not None:
                    changed = self.receiving(who, key)
                    assert changed.machine is not None
                    decode_side.run(self, who, key, changed.machine.handle(PrefillLost()))
            quarantine = decode_side.quarantine(self, who)
            quarantine.lost(peer(of), 0.0, replaced=False)

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
                self.post(who, R, "failed", key, retriable)
                prefill_side.cancel(self, who, key)
            return
        receiving = self.receivers[who][key]
        machine = receiving.machine
        if machine is None or machine.state is D.RUNNING:
            self.post(who, R, "failed", key, retriable)
        if machine is None or machine.state is not D.QUARANTINED:
            decode_side.cancel(self, who, key)

    # -- the transport ------------------------------------------------------------------------------------------------

    def _is_aborting(self, write: Write) -> bool:
        p, _, reservation, *_ = write
        aborted = (reservation, self.size.source_rank(write))
        return p in self.dead or any(aborted in sending.aborting for sending in self.senders[p].values())

    def _land(self, write: Write, *, whole: bool = True) -> None:
        self.writes -= {write}
        _, d, reservation, *_ = write
        self._tell_pushed(write)
        for key, found in list(self.receivers[d].items()):
            if found.machine is not None and found.machine.reservation == reservation:
                (decode_side.land if whole else decode_side.corrupt)(self, d, key, write)

    def _corrupt(self, write: Write) -> None:
        self._land(write, whole=False)

    def _vanish(self, write: Write) -> None:
        self.writes -= {write}

    def _lose(self, write: Write) -> None:
        self.writes -= {write}
        self._tell_pushed(write)

    def _tell_pushed(self, write: Write) -> None:
        """The machine need not know; what joins the ranks must."""
        p, _, reservation, index, *_ = write
        if self.size.has_ranks:
            self.pushing(p).handle(Pushed(reservation, (index,), 1))


def _frozen_all(workers: Mapping[str, Mapping[SequenceKey, Sending | Receiving]]) -> Hashable:
    """Of all workers of a kind. In the order of arrival, which counts."""
    return tuple(
        (who, key, *map(freeze, vars(each).values())) for who, all_ in workers.items() for key, each in all_.items()
    )


_STEPS: dict[str, Callable[..., None]] = {
    "deliver": World._deliver,
    "learn": World._learn,
    "place": router_side.place,
    "reassign": router_side.reassign,
    "cancel": router_side.cancel,
    "admit": prefill_side.admit,
    "compute": prefill_side.compute,
    "drained": prefill_side.drained,
    "fail": prefill_side.fail,
    "decode": decode_side.step,
    "local": decode_side.local,
    "overdue": decode_side.overdue,
    "late": decode_side.overdue,
    "ask": decode_side.ask,
    "ended": decode_side.ended,
    "land": World._land,
    "vanish": World._vanish,
    "lose": World._lose,
    "corrupt": World._corrupt,
    "deadline": World._deadline,
    "die": World._die,
    "drain": World._drain,
    "cut": World._cut,
}
"""What a step does, by its name."""


def start(size: Size) -> World:
    """The state in which every request waits for its workers."""
    spec = SequenceSpec(
        sequence=0,
        prompt=Prompt(tokens=b"\1\0\0\0", sampling=Sampling(max_tokens=MAX_TOKENS)),
        max_attempts=size.max_attempts,
    )
    names = [f"q{number}" for number in range(size.num_requests)]
    return World(
        size=size,
        attempts={name: DrivenSequence(spec) for name in names},
        senders={p: {} for p in size.prefills},
        receivers={d: {} for d in size.decodes},
        quarantines={d: Quarantine(bool, bool) for d in size.decodes},
        pushes={p: PushProgress(size.ranks[0]) for p in size.prefills},
        landings={d: LandingProgress(size.ranks[1]) for d in size.decodes},
        budget=dict(size.budget),
        wishes={name: router.FindPlacement(1, "", frozenset()) for name in names},
    )
