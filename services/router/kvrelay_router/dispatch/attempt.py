"""The attempts of one sequence, as a state machine: events in, instructions out, no I/O and no clock.

States of the current attempt:

1. WAITING     The attempt has a number but no workers. The driver may have to wait until workers are ready.
2. PREFILLING  The prompt was sent to its workers. The first token may have come, but decode has not committed.
3. STREAMING   Decode has committed, or works alone. A failure of prefill no longer matters.
4. DONE        All tokens came, a stop string matched, or the client left.
5. FAILED      The retry budget is exhausted, or the failure would only repeat.

A failed attempt is cancelled on both workers. The next attempt starts in state 1 and computes the tokens delivered so
far as a part of its prompt. `RetryBudget` says which attempts count.

The machine sees no tokens. For each entry of a worker, three calls follow each other: `accepts_tokens` checks the
sender, `TokenIntake.handle` returns the delta to deliver, and `TokensArrived` reports it here, unless it is one of many
between the first and the last tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import (
    AnyBody,
    Cancel,
    Failed,
    Generate,
    NeedDecode,
    PeerRef,
    Prefill,
    Reassign,
)
from kvrelay.protocol.sampling import FinishReason
from kvrelay.state_machine import IllegalEvent, Transition, TransitionTable, find_transition, transition_table
from kvrelay_router.dispatch.events import (
    AwaitLostWorkers,
    Cancelled,
    DecodeChosen,
    Ended,
    Event,
    FindDecode,
    FindPlacement,
    FromWorker,
    Instruction,
    PlacementFailed,
    Send,
    SequenceSpec,
    StopMatched,
    TokensArrived,
    WorkerBack,
    WorkerLost,
    WorkersAssigned,
)
from kvrelay_router.dispatch.retry_budget import RetryBudget
from kvrelay_router.fleet.load import WorkerKey, worker_key


@dataclass(slots=True)
class AssignedWorkers:
    """Decode can change during an attempt, while prefill keeps the KV. A new prefill worker means a new attempt."""

    prefill: PeerRef | None = None
    decode: PeerRef | None = None
    replaced: list[PeerRef] = field(default_factory=list)  # earlier decode workers of this attempt
    excluded: set[WorkerKey] = field(default_factory=set)  # incarnations that cannot decode this attempt
    awaits_decode: bool = False  # FindDecode was returned and DecodeChosen has not come yet
    has_no_decode: bool = False  # prefill was sent Reassign(None) and will answer with Failed
    decode_returned: bool = False  # only with `has_no_decode`: the unreachable decode workers are ready again

    def is_prefill(self, worker: PeerRef) -> bool:
        return is_same(worker, self.prefill)

    def is_decode(self, worker: PeerRef) -> bool:
        return is_same(worker, self.decode)

    def was_decode(self, worker: PeerRef) -> bool:
        """Returns whether this worker decoded the attempt before another one replaced it."""
        return any(is_same(worker, replaced) for replaced in self.replaced)

    def lacks_decode(self, need: NeedDecode) -> bool:
        """Returns whether prefill cannot hand over to the present decode worker, or only to an earlier one."""
        if self.decode is None:
            return False
        return self.decode.peer_id in need.excluded if need.unable is None else self.is_decode(need.unable)

    def exclude_decode(self, decode: PeerRef) -> None:
        """Marks the present decode worker as replaced. `choose_decode` must follow."""
        self.excluded.add(worker_key(decode))
        self.replaced.append(decode)
        self.decode = None  # it gets a Cancel: its late messages must not count while another worker is awaited
        self.awaits_decode = True

    def choose_decode(self, decode: PeerRef | None, *, returned: bool) -> None:
        """Sets the new decode worker, or None if there is none."""
        self.awaits_decode = False
        self.decode = decode
        self.has_no_decode = decode is None
        self.decode_returned = returned


def is_same(worker: PeerRef, assigned: PeerRef | None) -> bool:
    """Compares id and incarnation."""
    return assigned is not None and worker.peer_id == assigned.peer_id and worker.incarnation == assigned.incarnation


class AttemptState(StrEnum):
    """The states in the order of a request that succeeds. FAILED replaces DONE if it does not."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"


_WITH_WORKERS = AttemptState.STREAMING, AttemptState.PREFILLING


class SequenceAttempts:
    """Starts WAITING for `WorkersAssigned`. Carry out the instructions of each event in order."""

    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.state = AttemptState.WAITING
        self.attempt = 1
        self.num_resumed = len(spec.opening)  # output tokens that the attempt got with the prompt
        self.is_streaming = False  # STREAMING, and a token of this attempt was delivered
        self._has_tokens = False  # a token of this attempt was delivered
        self._budget = RetryBudget(spec.max_attempts)
        self._awaits_lost = ""  # the cause to retry for, while AwaitLostWorkers is in effect
        self._workers = AssignedWorkers()
        self._avoid: set[str] = set()  # workers on which earlier attempts failed
        self._hands_over = True  # False: no decode worker could take the KV of the attempt before

    def handle(self, event: Event) -> list[Instruction]:
        """Raises IllegalEvent, and changes nothing, if the event has no entry in the table or contradicts the past."""
        if isinstance(event, FromWorker):
            return find_transition(TRANSITIONS, self.state, event.body)(self, event.body, event)
        return find_transition(TRANSITIONS, self.state, event)(self, event)

    # -- what the driver reads ----------------------------------------------------------------------------------------

    @property
    def prefill(self) -> PeerRef | None:
        """The prefill worker of the current attempt."""
        return self._workers.prefill

    @property
    def decode(self) -> PeerRef | None:
        """The decode worker of the current attempt."""
        return self._workers.decode

    @property
    def is_over(self) -> bool:
        return self.state in (AttemptState.DONE, AttemptState.FAILED)

    @property
    def computes_prompt(self) -> PeerRef | None:
        """The worker that still has the prompt, or a part of it, to compute."""
        if self.state is not AttemptState.PREFILLING or self._has_tokens:
            return None
        return self._workers.prefill or self._workers.decode

    @property
    def awaits_handoff(self) -> bool:
        """True if decode has not committed yet."""
        return self.state is AttemptState.PREFILLING and self._workers.prefill is not None

    @property
    def lacks_decode(self) -> bool:
        """True if prefill was told that there is no decode worker. It fails the attempt, and is not at fault."""
        return self._workers.has_no_decode

    def needs_decode(self, num_output: int) -> bool:
        """Returns whether more than one token has to come after these, so that prefill alone is not enough."""
        return self.spec.sampling.max_tokens - num_output > 1

    def involves(self, worker: PeerRef) -> bool:
        """Returns whether this incarnation is a worker of the current attempt."""
        return self._workers.is_prefill(worker) or self._workers.is_decode(worker)

    def accepts_tokens(self, worker: PeerRef, attempt: int, from_prefill: bool) -> bool:
        """Returns False for tokens of the past: of an earlier attempt, or of a decode worker that was replaced."""
        sender = self._workers.prefill if from_prefill else self._workers.decode
        return self._is_current(attempt) and is_same(worker, sender)

    def accepts_scores(self, worker: PeerRef, attempt: int) -> bool:
        """As `accepts_tokens`, for log-probabilities of the prompt: they come from the worker that computes it."""
        return self._is_current(attempt) and is_same(worker, self._workers.prefill or self._workers.decode)

    def _is_current(self, attempt: int) -> bool:
        return attempt == self.attempt and self.state in _WITH_WORKERS

    # -- placement ----------------------------------------------------------------------------------------------------

    def _workers_assigned(self, event: WorkersAssigned) -> list[Instruction]:
        if event.prefill is None and event.decode is None:
            raise IllegalEvent("a placement names at least one worker")
        num_output = len(event.output)
        if event.decode is None and self.needs_decode(num_output):
            raise IllegalEvent("a placement without decode can give one token only")
        self._workers = AssignedWorkers(event.prefill, event.decode)
        self.num_resumed = num_output
        self.state = AttemptState.PREFILLING
        prompt = self.spec.prompt_after(event.output, event.timeout_s)
        if event.prefill is not None:
            return [self._send(event.prefill, Prefill(prompt=prompt, decode=event.decode))]
        assert event.decode is not None
        return [self._send(event.decode, Generate(prompt=prompt))]

    def _placement_failed(self, event: PlacementFailed) -> list[Instruction]:
        self.state = AttemptState.FAILED
        return [Ended(event.reason, kind=event.kind)]

    def _decode_needed(self, body: NeedDecode, event: FromWorker) -> list[Instruction]:
        if self._is_stale(event.attempt):
            return []
        workers = self._workers
        if not workers.is_prefill(event.worker):
            raise IllegalEvent(f"{event.worker.peer_id} does not prefill this attempt")
        if workers.has_no_decode or workers.awaits_decode:
            return []
        if workers.decode is None:
            raise IllegalEvent("no decode worker was named for this attempt")
        if not workers.lacks_decode(body):
            return [self._send(event.worker, Reassign(decode=workers.decode))]
        return self._replace_decode(workers.decode, body.reason)

    def _decode_needed_late(self, body: NeedDecode, event: FromWorker) -> list[Instruction]:
        """Prefill does not know that decode has committed. Reassign(None) lets it free the KV."""
        if self._is_stale(event.attempt) or not self._workers.is_prefill(event.worker):
            return []
        if not self._workers.lacks_decode(body):
            return []
        return [self._send(event.worker, Reassign(decode=None))]

    def _replace_decode(self, decode: PeerRef, cause: str) -> list[Instruction]:
        """Prefill keeps the KV, only the decode worker changes. The old one gets a Cancel in case it is alive."""
        self._workers.exclude_decode(decode)
        return [
            self._send(decode, Cancel(reason=f"reassigned: {cause}")),
            FindDecode(cause, frozenset(self._workers.excluded)),
        ]

    def _decode_chosen(self, event: DecodeChosen) -> list[Instruction]:
        workers = self._workers
        if not workers.awaits_decode or workers.prefill is None:
            raise IllegalEvent("no decode worker was asked for")
        if event.decode is not None and worker_key(event.decode) in workers.excluded:
            raise IllegalEvent(f"{event.decode.peer_id} is excluded")
        workers.choose_decode(event.decode, returned=event.returned)
        return [self._send(workers.prefill, Reassign(decode=event.decode))]

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _tokens_arrived(self, event: TokensArrived) -> list[Instruction]:
        if not event.from_prefill:  # decode has committed the handoff, or works alone
            self.state = AttemptState.STREAMING
        self._has_tokens = self._has_tokens or event.are_delivered
        self.is_streaming = self._has_tokens and self.state is AttemptState.STREAMING
        if not event.is_last:
            return []
        self.state = AttemptState.DONE
        return [Ended(None)]

    @property
    def _needs_prefill_output(self) -> bool:
        """Prompt log-probabilities come from prefill alone, and are delivered with the first token of the sequence."""
        return self.spec.num_scores > 0 and not self._has_tokens and not self.num_resumed

    # -- failures and retries -----------------------------------------------------------------------------------------

    def _worker_lost(self, event: WorkerLost) -> list[Instruction]:
        workers = self._workers
        if workers.is_prefill(event.worker):
            return self._retry_after_loss(event)
        if workers.decode is None or workers.awaits_decode or not workers.is_decode(event.worker):
            return []
        if workers.prefill is None:
            return self._retry_after_loss(event)
        return self._replace_decode(workers.decode, _cause_of(event))

    def _worker_lost_late(self, event: WorkerLost) -> list[Instruction]:
        is_prefill = self._workers.is_prefill(event.worker)
        if self._workers.is_decode(event.worker) or (is_prefill and self._needs_prefill_output):
            return self._retry_after_loss(event)
        return []

    def _retry_after_loss(self, event: WorkerLost) -> list[Instruction]:
        kind, cause, worker, num_output = FailureKind.WORKER_LOST, _cause_of(event), event.worker, event.num_output
        counts = not (event.is_alive or event.was_silent)
        return self._retry(kind, cause, worker, num_output, counts=counts, is_lost=True, in_company=event.in_company)

    def _attempt_failed(self, body: Failed, event: FromWorker) -> list[Instruction]:
        workers = self._workers
        if self._is_stale(event.attempt) or workers.was_decode(event.worker):
            return []
        if not self.involves(event.worker):
            raise IllegalEvent(f"{event.worker.peer_id} is not a worker of this attempt")
        if body.retriable or workers.has_no_decode:
            counts = not (body.refused or workers.decode_returned)
            return self._retry(body.failure, body.cause, event.worker, event.num_output, counts=counts)
        return self._fail(body.failure, body.cause)

    def _attempt_failed_late(self, body: Failed, event: FromWorker) -> list[Instruction]:
        is_prefill = self._workers.is_prefill(event.worker)
        if is_prefill and not self._is_stale(event.attempt) and not self._needs_prefill_output:
            return []
        return self._attempt_failed(body, event)

    def _retry(
        self,
        kind: FailureKind,
        cause: str,
        worker: PeerRef,
        num_output: int,
        *,
        counts: bool,
        is_lost: bool = False,
        in_company: bool = False,
    ) -> list[Instruction]:
        if 0 < self.spec.sampling.max_tokens <= num_output:
            self.state = AttemptState.DONE
            return [*self._send_to_all(Cancel(reason=cause)), Ended(None, FinishReason.LENGTH)]
        lost_worker = worker_key(worker) if is_lost else None
        num_tokens = num_output - self.num_resumed
        self._budget.attempt_failed(
            counts=counts, num_tokens=num_tokens, lost_worker=lost_worker, in_company=in_company
        )
        if self._budget.is_exhausted:
            cause = f"{cause} (attempt {self.attempt}, the last)"
            if not self._budget.may_recover:
                return self._fail(kind, cause)
        instructions = self._send_to_all(Cancel(reason=cause))
        self._avoid.add(worker.peer_id)
        if self._workers.has_no_decode:  # the fault may be prefill's, or that of any worker it could not reach
            self._avoid |= {worker_id for worker_id, _ in self._workers.excluded}
        self._hands_over = not self._workers.has_no_decode or self._workers.decode_returned
        self._workers = AssignedWorkers()
        self._has_tokens = self.is_streaming = False
        self.num_resumed = num_output
        self.attempt += 1
        self.state = AttemptState.WAITING
        if self._budget.is_exhausted:
            self._awaits_lost = cause
            return [*instructions, AwaitLostWorkers(cause)]
        return [*instructions, self._search(cause, 0.0 if counts else self._budget.pause_s)]

    def _search(self, cause: str, delay_s: float = 0.0) -> FindPlacement:
        avoid = frozenset(self._avoid)
        return FindPlacement(self.attempt, cause, avoid, delay_s, self._budget.is_suspect, self._hands_over)

    def _worker_back(self, event: WorkerBack) -> list[Instruction]:
        self._budget.worker_returned(worker_key(event.worker))
        if not self._awaits_lost or self._budget.is_exhausted:
            return []
        cause, self._awaits_lost = self._awaits_lost, ""
        return [self._search(cause)]

    def _fail(self, kind: FailureKind, cause: str) -> list[Instruction]:
        self.state = AttemptState.FAILED
        return [*self._send_to_all(Cancel(reason=cause)), Ended(cause, kind=kind)]

    # -- the client ---------------------------------------------------------------------------------------------------

    def _stop_matched(self, event: StopMatched) -> list[Instruction]:
        self.state = AttemptState.DONE
        return [*self._send_to_all(Cancel(reason="a stop string matched")), Ended(None)]

    def _cancelled(self, event: Cancelled) -> list[Instruction]:
        self.state = AttemptState.DONE
        return [*self._send_to_all(Cancel(reason=event.reason)), Ended(None)]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _ignore(self, *event: object) -> list[Instruction]:
        return []

    def _ignore_stale(self, body: NeedDecode | Failed, event: FromWorker) -> list[Instruction]:
        if not self._is_stale(event.attempt):
            raise IllegalEvent(f"{type(body).__name__} for attempt {event.attempt}, which is not placed yet")
        return []

    def _is_stale(self, attempt: int) -> bool:
        if attempt > self.attempt:
            raise IllegalEvent(f"attempt {attempt} has not begun, this is attempt {self.attempt}")
        return attempt < self.attempt

    def _send(self, worker: PeerRef, body: AnyBody) -> Send:
        return Send(worker, self.attempt, body)

    def _send_to_all(self, body: AnyBody) -> list[Instruction]:
        """A worker that does not know the request yet remembers a Cancel, so both always get it."""
        workers = self._workers.prefill, self._workers.decode
        return [self._send(worker, body) for worker in workers if worker is not None]


def _cause_of(event: WorkerLost) -> str:
    return f"{event.worker.peer_id} is lost: {event.reason}"


_M = SequenceAttempts
_Row = dict[type[object], Transition[Instruction]]

_WAITING: _Row = {
    WorkersAssigned: _M._workers_assigned,
    PlacementFailed: _M._placement_failed,
    NeedDecode: _M._ignore_stale,
    Failed: _M._ignore_stale,
    WorkerLost: _M._ignore,
    WorkerBack: _M._worker_back,
    StopMatched: _M._stop_matched,
    Cancelled: _M._cancelled,
}
_PREFILLING: _Row = {
    DecodeChosen: _M._decode_chosen,
    TokensArrived: _M._tokens_arrived,
    NeedDecode: _M._decode_needed,
    Failed: _M._attempt_failed,
    WorkerLost: _M._worker_lost,
    WorkerBack: _M._worker_back,
    StopMatched: _M._stop_matched,
    Cancelled: _M._cancelled,
}
_STREAMING: _Row = {
    TokensArrived: _M._tokens_arrived,
    NeedDecode: _M._decode_needed_late,
    Failed: _M._attempt_failed_late,
    WorkerLost: _M._worker_lost_late,
    WorkerBack: _M._worker_back,
    StopMatched: _M._stop_matched,
    Cancelled: _M._cancelled,
}
_OVER: _Row = dict.fromkeys((NeedDecode, Failed, WorkerLost, WorkerBack, StopMatched, Cancelled), _M._ignore)
TRANSITIONS: TransitionTable[Instruction] = transition_table(
    {
        AttemptState.WAITING: _WAITING,
        AttemptState.PREFILLING: _PREFILLING,
        AttemptState.STREAMING: _STREAMING,
        AttemptState.DONE: _OVER,
        AttemptState.FAILED: _OVER,
    }
)
