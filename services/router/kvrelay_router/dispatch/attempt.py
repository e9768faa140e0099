"""One sequence of a request over all its attempts: events in, instructions out, no I/O, no clock.

States of the current attempt:

1. WAITING     numbered, but not placed: the shell is asked for workers, and may have to wait until there are some.
2. PREFILLING  its messages are out. P computes (or D does, alone); the first token may have come, D has not committed.
3. STREAMING   D's own tokens came, so D has committed, or works alone: P's fate does not matter any more.
4. DONE        all tokens came, or a stop string matched, or the client left.
5. FAILED      no attempt is left, or the failure would only repeat itself.

An attempt that fails is cancelled on both its workers, and the next one starts at 1 with the tokens already delivered.
`max_attempts` bounds the attempts; `RetryBudget` says which ones do not count. Among those that do not count
are the ones that were refused before anything was computed, that a worker gave up because we were silent, or that
lacked a decode worker until those that it had lost came back. A router that stood still hears the second from all its
workers, one after the other.

Which of the tokens that come are delivered, and when, is `TokenIntake`'s.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvrelay.protocol.messages import (
    AnyBody,
    Cancel,
    Generate,
    PeerRef,
    Prefill,
    Prompt,
    Reassign,
    Stop,
    TokenEntry,
    pack_tokens,
)
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.state_machine import IllegalEvent, Transition, TransitionTable, find_transition, transition_table
from kvrelay_router.dispatch.assigned_workers import AssignedWorkers
from kvrelay_router.dispatch.events import (
    AttemptFailed,
    AwaitLost,
    Cancelled,
    DecodeChosen,
    DecodeNeeded,
    Deliver,
    Ended,
    Event,
    FindDecode,
    FindPlacement,
    FirstTokenReceived,
    Instruction,
    PlacementFailed,
    Send,
    StopMatched,
    TokensReceived,
    WorkerBack,
    WorkerLost,
    WorkersAssigned,
)
from kvrelay_router.dispatch.intake import Arrival, TokenIntake
from kvrelay_router.dispatch.interface import SequenceDelta
from kvrelay_router.dispatch.load import worker_key
from kvrelay_router.dispatch.retry_budget import RetryBudget


class AttemptState(StrEnum):
    """See the module's text."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change over the attempts. `prompt` is packed once for all sequences of a request."""

    sequence: int
    prompt: bytes
    num_prompt_tokens: int
    sampling: Sampling
    cache_salt: str = ""
    priority: int = 0
    num_samples: int = 1  # of the request
    max_attempts: int = 3  # that were tries of workers


class SequenceAttempts:
    """The machine. It begins WAITING for its first `WorkersAssigned`.

    Feed every event to `handle`, and do what it returns, in order.
    """

    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.state = AttemptState.WAITING
        self.attempt = 1
        self._tries = RetryBudget(spec.max_attempts)
        self._held_back = ""  # why, while all tries are spent and a lost worker is awaited
        self._legs = AssignedWorkers()
        self._avoid: set[str] = set()  # workers on which earlier attempts failed
        self._intake = TokenIntake(
            spec.sequence,
            is_beam_search=spec.sampling.beams is not None,
            prompt_logprobs_due=spec.sampling.prompt_logprobs is not None and spec.num_prompt_tokens > 1,
        )

    # -- for the shell ------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Raises IllegalEvent, and changes nothing, if the table has no entry or the event contradicts earlier ones."""
        return find_transition(TRANSITIONS, self.state, event)(self, event)

    def next_delta(self, worker: PeerRef, entry: TokenEntry) -> SequenceDelta | None:
        """A short cut for the next tokens of a stream, and nothing else. What `handle`
        would deliver, where it would do nothing but that; else None, and nothing done: the event is for `handle`."""
        is_ours = self.state is AttemptState.STREAMING and entry.attempt == self.attempt
        return self._intake.next_delta(entry) if is_ours and self._legs.is_decode(worker) else None

    @property
    def output(self) -> list[int]:
        """Tokens delivered, over all attempts."""
        return self._intake.output

    @property
    def num_resumed(self) -> int:
        """Of the output, what earlier attempts delivered."""
        return self._intake.num_resumed

    @property
    def prefill(self) -> PeerRef | None:
        """P of the current attempt."""
        return self._legs.prefill

    @property
    def decode(self) -> PeerRef | None:
        """D of the current attempt."""
        return self._legs.decode

    @property
    def is_over(self) -> bool:
        """No event changes anything any more."""
        return self.state in (AttemptState.DONE, AttemptState.FAILED)

    @property
    def computes(self) -> PeerRef | None:
        """Who still has the prompt, or a part of it, to compute."""
        waits = self.state is AttemptState.PREFILLING and len(self.output) == self.num_resumed
        return (self._legs.prefill or self._legs.decode) if waits else None

    @property
    def handoff_is_to_come(self) -> bool:
        """D has not committed yet."""
        return self.state is AttemptState.PREFILLING and self._legs.prefill is not None

    @property
    def lacks_decode(self) -> bool:
        """P was told that there is no decode worker for what it has: it fails the attempt, which is not its fault."""
        return self._legs.gave_up

    @property
    def needs_decode(self) -> bool:
        """More than one token is to come, so prefill alone is not enough."""
        return self.spec.sampling.max_tokens - len(self.output) > 1

    def involves(self, worker: PeerRef) -> bool:
        """Whether the current attempt rests on this incarnation of a worker."""
        return self._legs.is_prefill(worker) or self._legs.is_decode(worker)

    # -- placement ----------------------------------------------------------------------------------------------------

    def _placed(self, event: WorkersAssigned) -> list[Instruction]:
        if event.prefill is None and event.decode is None:
            raise IllegalEvent("a placement names at least one worker")
        if event.decode is None and self.needs_decode:
            raise IllegalEvent("a placement without decode can give one token only")
        self._legs = AssignedWorkers(event.prefill, event.decode)
        self.state = AttemptState.PREFILLING
        prompt = Prompt(
            tokens=self.spec.prompt + pack_tokens(self.output) if self.output else self.spec.prompt,
            num_output=len(self.output),
            sampling=self.spec.sampling,
            cache_salt=self.spec.cache_salt,
            priority=self.spec.priority,
            num_samples=self.spec.num_samples,
            timeout_s=event.timeout_s,
        )
        if event.prefill is not None:
            return [self._send(event.prefill, Prefill(prompt=prompt, decode=event.decode))]
        assert event.decode is not None
        return [self._send(event.decode, Generate(prompt=prompt))]

    def _not_placed(self, event: PlacementFailed) -> list[Instruction]:
        self.state = AttemptState.FAILED
        return [Ended(event.reason)]

    def _decode_needed(self, event: DecodeNeeded) -> list[Instruction]:
        if self._is_stale(event.attempt):
            return []
        legs = self._legs
        if not legs.is_prefill(event.worker):
            raise IllegalEvent(f"{event.worker.peer_id} does not prefill this attempt")
        if legs.gave_up or legs.decode_wanted:
            return []
        if legs.decode is None:
            raise IllegalEvent("no decode worker was named for this attempt")
        if not legs.lacks_decode(event):
            return [self._send(event.worker, Reassign(decode=legs.decode))]
        return self._leave_decode(legs.decode, event.reason)

    def _decode_needed_late(self, event: DecodeNeeded) -> list[Instruction]:
        """P does not know that D has committed: it may let go."""
        if self._is_stale(event.attempt) or not self._legs.is_prefill(event.worker):
            return []
        if not self._legs.lacks_decode(event):
            return []
        return [self._send(event.worker, Reassign(decode=None))]

    def _leave_decode(self, decode: PeerRef, cause: str) -> list[Instruction]:
        """P keeps the K/V; only the decode worker changes. The old one is told, in case it lives."""
        self._legs.leave(decode)
        return [
            self._send(decode, Cancel(reason=f"reassigned: {cause}")),
            FindDecode(cause, frozenset(self._legs.excluded)),
        ]

    def _decode_chosen(self, event: DecodeChosen) -> list[Instruction]:
        legs = self._legs
        if not legs.decode_wanted or legs.prefill is None:
            raise IllegalEvent("no decode worker was asked for")
        if event.decode is not None and worker_key(event.decode) in legs.excluded:
            raise IllegalEvent(f"{event.decode.peer_id} is excluded")
        legs.choose(event.decode, came_back=event.came_back)
        return [self._send(legs.prefill, Reassign(decode=event.decode))]

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _first_token(self, event: FirstTokenReceived) -> list[Instruction]:
        if self._is_stale(event.attempt):
            return []
        if not self._legs.is_prefill(event.worker):
            raise IllegalEvent(f"{event.worker.peer_id} does not prefill this attempt")
        self._intake.check(event.body, has_prompt=True)
        return self._take(event.body)

    def _tokens(self, event: TokensReceived) -> list[Instruction]:
        entry = event.entry
        if self._is_stale(entry.attempt):
            return []
        if not self._legs.is_decode(event.worker):
            if self._legs.is_former(event.worker):
                return []
            raise IllegalEvent(f"{event.worker.peer_id} does not decode this attempt")
        self._intake.check(entry, has_prompt=self._legs.prefill is None)
        self.state = AttemptState.STREAMING
        if entry.usage is not None:
            self._intake.usage = entry.usage
        instructions = self._take(entry)
        if entry.finish is FinishReason.ABORT and not self.is_over:
            instructions += self._retry(f"{event.worker.peer_id} gave the sequence up", event.worker)
        return instructions

    def _take(self, arrival: Arrival) -> list[Instruction]:
        deltas = self._intake.take(arrival)
        instructions: list[Instruction] = [Deliver(delta) for delta in deltas]
        if deltas and deltas[-1].finish is not None:
            self.state = AttemptState.DONE
            instructions.append(Ended(None))
        return instructions

    # -- ends and new beginnings --------------------------------------------------------------------------------------

    def _worker_lost(self, event: WorkerLost) -> list[Instruction]:
        legs = self._legs
        cause = f"{event.worker.peer_id} is lost: {event.reason}"
        if legs.is_prefill(event.worker):
            return self._retry(cause, event.worker, is_void=event.gave_us_up, is_silent=True)
        if legs.decode is None or legs.decode_wanted or not legs.is_decode(event.worker):
            return []
        if legs.prefill is None:
            return self._retry(cause, event.worker, is_void=event.gave_us_up, is_silent=True)
        return self._leave_decode(legs.decode, cause)

    def _worker_lost_late(self, event: WorkerLost) -> list[Instruction]:
        is_prefill = self._legs.is_prefill(event.worker)
        if self._legs.is_decode(event.worker) or (is_prefill and self._intake.prompt_logprobs_due):
            cause = f"{event.worker.peer_id} is lost: {event.reason}"
            return self._retry(cause, event.worker, is_void=event.gave_us_up, is_silent=True)
        return []

    def _attempt_failed(self, event: AttemptFailed) -> list[Instruction]:
        if self._is_stale(event.attempt) or self._legs.is_former(event.worker):
            return []
        if not self.involves(event.worker):
            raise IllegalEvent(f"{event.worker.peer_id} has no part in this attempt")
        if event.retriable or self._legs.gave_up:
            return self._retry(event.cause, event.worker, is_void=event.refused or self._legs.came_back)
        return self._fail(event.cause)

    def _attempt_failed_late(self, event: AttemptFailed) -> list[Instruction]:
        is_prefill = self._legs.is_prefill(event.worker)
        if is_prefill and not self._is_stale(event.attempt) and not self._intake.prompt_logprobs_due:
            return []
        return self._attempt_failed(event)

    def _retry(
        self, cause: str, worker: PeerRef, *, is_void: bool = False, is_silent: bool = False
    ) -> list[Instruction]:
        if 0 < self.spec.sampling.max_tokens <= len(self.output):
            self.state = AttemptState.DONE
            delta = SequenceDelta(self.spec.sequence, [], finish=FinishReason.LENGTH)
            return [*self._tell_legs(Cancel(reason=cause)), Deliver(delta), Ended(None)]
        silent = worker_key(worker) if is_silent else None
        self._tries.ended(is_void=is_void, num_tokens=len(self.output) - self.num_resumed, silent=silent)
        if self._tries.are_spent:
            cause = f"{cause} (attempt {self.attempt}, the last)"
            if not self._tries.may_recover:
                return self._fail(cause)
        instructions = self._tell_legs(Cancel(reason=cause))
        self._avoid |= {worker.peer_id}
        if self._legs.gave_up:  # of P and those that it could not reach, which belong together, any may be to blame
            self._avoid |= {worker_id for worker_id, _ in self._legs.excluded}
        self._legs = AssignedWorkers()
        self._intake.begin_attempt()
        self.attempt += 1
        self.state = AttemptState.WAITING
        if self._tries.are_spent:
            self._held_back = cause
            return [*instructions, AwaitLost(cause)]
        delay_s = self._tries.pause_s if is_void else 0.0
        return [*instructions, FindPlacement(self.attempt, cause, frozenset(self._avoid), delay_s)]

    def _worker_back(self, event: WorkerBack) -> list[Instruction]:
        self._tries.heard_again(worker_key(event.worker))
        if not self._held_back or self._tries.are_spent:
            return []
        cause, self._held_back = self._held_back, ""
        return [FindPlacement(self.attempt, cause, frozenset(self._avoid))]

    def _fail(self, cause: str) -> list[Instruction]:
        self.state = AttemptState.FAILED
        return [*self._tell_legs(Cancel(reason=cause)), Ended(cause)]

    def _stop_matched(self, event: StopMatched) -> list[Instruction]:
        self.state = AttemptState.DONE
        return [*self._tell_legs(Stop()), Ended(None)]

    def _cancelled(self, event: Cancelled) -> list[Instruction]:
        self.state = AttemptState.DONE
        return [*self._tell_legs(Cancel(reason=event.reason)), Ended(None)]

    def _ignore(self, event: Event) -> list[Instruction]:
        return []

    def _ignore_stale(
        self, event: FirstTokenReceived | TokensReceived | DecodeNeeded | AttemptFailed
    ) -> list[Instruction]:
        attempt = event.entry.attempt if isinstance(event, TokensReceived) else event.attempt
        if not self._is_stale(attempt):
            raise IllegalEvent(f"{type(event).__name__} for attempt {attempt}, which is not placed yet")
        return []

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_stale(self, attempt: int) -> bool:
        if attempt > self.attempt:
            raise IllegalEvent(f"attempt {attempt} has not begun, this is attempt {self.attempt}")
        return attempt < self.attempt

    def _send(self, worker: PeerRef, body: AnyBody) -> Send:
        return Send(worker, self.attempt, body)

    def _tell_legs(self, body: AnyBody) -> list[Instruction]:
        """To both, always: a worker that does not know the request yet remembers it."""
        return [self._send(leg, body) for leg in self._legs.present()]


_M = SequenceAttempts
_Row = dict[type[object], Transition[Instruction]]

_UNPLACED: _Row = {
    WorkersAssigned: _M._placed,
    PlacementFailed: _M._not_placed,
    FirstTokenReceived: _M._ignore_stale,
    TokensReceived: _M._ignore_stale,
    DecodeNeeded: _M._ignore_stale,
    AttemptFailed: _M._ignore_stale,
    WorkerLost: _M._ignore,
    WorkerBack: _M._worker_back,
    StopMatched: _M._stop_matched,
    Cancelled: _M._cancelled,
}
_BEFORE_COMMIT: _Row = {
    DecodeChosen: _M._decode_chosen,
    FirstTokenReceived: _M._first_token,
    TokensReceived: _M._tokens,
    DecodeNeeded: _M._decode_needed,
    AttemptFailed: _M._attempt_failed,
    WorkerLost: _M._worker_lost,
    WorkerBack: _M._worker_back,
    StopMatched: _M._stop_matched,
    Cancelled: _M._cancelled,
}
_AFTER_COMMIT: _Row = {
    FirstTokenReceived: _M._first_token,
    TokensReceived: _M._tokens,
    DecodeNeeded: _M._decode_needed_late,
    AttemptFailed: _M._attempt_failed_late,
    WorkerLost: _M._worker_lost_late,
    WorkerBack: _M._worker_back,
    StopMatched: _M._stop_matched,
    Cancelled: _M._cancelled,
}
_AFTER_END: _Row = dict.fromkeys(
    (FirstTokenReceived, TokensReceived, DecodeNeeded, AttemptFailed, WorkerLost, WorkerBack, StopMatched, Cancelled),
    _M._ignore,
)
TRANSITIONS: TransitionTable[Instruction] = transition_table(
    {
        AttemptState.WAITING: _UNPLACED,
        AttemptState.PREFILLING: _BEFORE_COMMIT,
        AttemptState.STREAMING: _AFTER_COMMIT,
        AttemptState.DONE: _AFTER_END,
        AttemptState.FAILED: _AFTER_END,
    }
)
