"""The two pure classes of a sequence, driven as `AttemptDriver` drives them, with all that they return in one list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import msgspec

from kvrelay.protocol.messages import FirstToken, Header, PeerRef, TokenEntry
from kvrelay.text.choice import SequenceDelta
from kvrelay_router.dispatch.attempt import AttemptState, SequenceAttempts
from kvrelay_router.dispatch.events import (
    Ended,
    Event,
    FromWorker,
    Instruction,
    SequenceSpec,
    TokensArrived,
    WorkerLost,
    WorkersAssigned,
)
from kvrelay_router.dispatch.inbox import _entry_of
from kvrelay_router.dispatch.running_request import ScoresReceived, TokenIntake
from tests.unit.handoff.check.values import clone


class FirstTokenReceived(msgspec.Struct, frozen=True):
    worker: PeerRef
    attempt: int
    body: FirstToken

    @property
    def entry(self) -> TokenEntry:
        header = Header(
            sender=self.worker.peer_id, incarnation="", reply_to="", to_incarnation="", link=1, request="r",
            attempt=self.attempt,
        )  # fmt: skip
        return _entry_of(header, self.body)


class TokensReceived(msgspec.Struct, frozen=True):
    worker: PeerRef
    entry: TokenEntry

    @property
    def attempt(self) -> int:
        return self.entry.attempt


class ScoresFrom(msgspec.Struct, frozen=True):
    worker: PeerRef
    scores: ScoresReceived


class Deliver(msgspec.Struct, frozen=True):
    """These tokens go to the client."""

    delta: SequenceDelta


Received = FirstTokenReceived | TokensReceived | ScoresFrom
AnyEvent = Event | Received
Done = Instruction | Deliver


class DrivenSequence:
    """Events of workers get the number of tokens that were delivered so far, as the inbox does it."""

    def __init__(self, spec: SequenceSpec) -> None:
        self.attempts = SequenceAttempts(spec)
        self.intake = TokenIntake(spec.sequence, spec.num_scores, spec.opening)
        self.handle_event: Callable[[Event], list[Instruction]] = self.attempts.handle
        self.handle_entry: Callable[[TokenEntry | ScoresReceived], SequenceDelta | None] = self.intake.handle

    def handle(self, event: AnyEvent) -> list[Done]:
        """Raises IllegalEvent."""
        if isinstance(event, Received):
            return self._receive(event)
        if isinstance(event, FromWorker | WorkerLost):
            event = msgspec.structs.replace(event, num_output=len(self.output))
        if isinstance(event, WorkersAssigned):
            event = msgspec.structs.replace(event, output=list(self.output))
        return self._carried_out(self.handle_event(event))

    def _receive(self, event: Received) -> list[Done]:
        if isinstance(event, ScoresFrom):
            return self._receive_scores(event)
        from_prefill = isinstance(event, FirstTokenReceived)
        worker, entry = event.worker, event.entry
        if not self.attempts.accepts_tokens(worker, entry.attempt, from_prefill):
            return []
        return self._deliver(self.handle_entry(entry), from_prefill)

    def _receive_scores(self, event: ScoresFrom) -> list[Done]:
        if not self.attempts.accepts_scores(event.worker, event.scores.attempt):
            return []
        delta = self.handle_entry(event.scores)
        return [] if delta is None else self._deliver(delta, True)

    def _deliver(self, delta: SequenceDelta | None, from_prefill: bool) -> list[Done]:
        done: list[Done] = [] if delta is None else [Deliver(delta)]
        is_last = delta is not None and delta.finish is not None
        if not self.attempts.is_streaming or is_last:
            event = TokensArrived(from_prefill, delta is not None, is_last)
            done += self._carried_out(self.handle_event(event))
        return done

    def _carried_out(self, instructions: list[Instruction]) -> list[Done]:
        done: list[Done] = []
        for each in instructions:
            if isinstance(each, Ended) and each.finish is not None:
                done.append(Deliver(SequenceDelta(self.spec.sequence, [], finish=each.finish)))
                each = Ended(each.error)
            done.append(each)
        return done

    def copy(self) -> Self:
        """Shares nothing that either may change."""
        made = object.__new__(type(self))
        made.attempts, made.intake = clone(self.attempts), clone(self.intake)
        made.handle_event, made.handle_entry = made.attempts.handle, made.intake.handle
        return made

    @property
    def spec(self) -> SequenceSpec:
        return self.attempts.spec

    @property
    def state(self) -> AttemptState:
        return self.attempts.state

    @property
    def attempt(self) -> int:
        return self.attempts.attempt

    @property
    def is_over(self) -> bool:
        return self.attempts.is_over

    @property
    def output(self) -> list[int]:
        return self.intake.output

    @property
    def needs_decode(self) -> bool:
        return self.attempts.needs_decode(len(self.output))

    @property
    def prefill(self) -> PeerRef | None:
        return self.attempts.prefill

    @property
    def decode(self) -> PeerRef | None:
        return self.attempts.decode

    def involves(self, worker: PeerRef) -> bool:
        return self.attempts.involves(worker)

    def values(self) -> dict[str, Any]:
        """All that an event may change."""
        return {**vars(self.attempts), **vars(self.intake)}
