"""A small world around one attempts' machine: prefill and decode workers that follow the protocol, links that keep the
order of their messages but nothing else, and a chance that picks what happens next.

A worker's true output is a function of the position alone, so a repeated, missing or misplaced token shows.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import (
    AnyBody,
    Cancel,
    Failed,
    FirstToken,
    Generate,
    NeedDecode,
    PeerRef,
    Prefill,
    Prompt,
    Reassign,
    SequenceUsage,
    TokenEntry,
    pack_tokens,
    unpack_tokens,
)
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.text.choice import SequenceDelta
from kvrelay_router.dispatch.attempt import AttemptState
from kvrelay_router.dispatch.events import (
    AwaitLostWorkers,
    DecodeChosen,
    Ended,
    FindDecode,
    FindPlacement,
    FromWorker,
    PlacementFailed,
    Send,
    SequenceSpec,
    WorkerLost,
    WorkersAssigned,
)
from kvrelay_router.fleet.load import worker_key
from tests.unit.dispatch.driven_sequence import (
    AnyEvent,
    Deliver,
    Done,
    DrivenSequence,
    FirstTokenReceived,
    TokensReceived,
)

PROMPT = [11, 12, 13]
LOST, BROKEN = FailureKind.WORKER_LOST, FailureKind.ENGINE_ERROR


def true_token(index: int) -> int:
    """The output token at this index, on whatever worker."""
    return 1000 + index * index


def peer(name: str, incarnation: int = 1) -> PeerRef:
    return PeerRef(name, f"{incarnation:016x}", f"tcp://{name}")


def spec(
    max_tokens: int = 8, max_attempts: int = 3, prompt_logprobs: int | None = None, num_forced: int = 0
) -> SequenceSpec:
    """`num_forced`: length of the opening, as far as `max_tokens` leave room for another token."""
    return SequenceSpec(
        sequence=0,
        prompt=Prompt(
            tokens=pack_tokens(PROMPT), sampling=Sampling(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        ),
        opening=tuple(true_token(index) for index in range(min(num_forced, max_tokens - 1))),
        max_attempts=max_attempts,
    )


@dataclass
class Work:
    """One attempt on one worker."""

    attempt: int
    num_output: int
    max_tokens: int
    next_index: int
    decode: PeerRef | None = None
    committed: bool = False
    first_sent: bool = False


@dataclass
class Worker:
    """Follows the protocol as well as a worker does; `inbox` is its link from the router, `outbox` the one back."""

    ref: PeerRef
    role: str
    inbox: deque[tuple[int, AnyBody]] = field(default_factory=deque)
    outbox: deque[AnyEvent] = field(default_factory=deque)
    work: dict[int, Work] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    dead: bool = False


class World:
    """Chance drives it until the machine is over; `history` holds what was delivered."""

    def __init__(self, seed: int, spec: SequenceSpec, num_prefill: int, num_decode: int, mischief: float) -> None:
        self.random = random.Random(seed)
        self.machine = DrivenSequence(spec)
        self.mischief = mischief
        self.prefills = {f"p{i}": Worker(peer(f"p{i}"), "prefill") for i in range(num_prefill)}
        self.decodes = {f"d{i}": Worker(peer(f"d{i}"), "decode") for i in range(num_decode)}
        self.workers = self.prefills | self.decodes
        self.deltas: list[SequenceDelta] = []
        self.ends: list[str | None] = []
        self.sent: list[Send] = []
        self.past: list[AnyEvent] = []
        self.wish: FindPlacement | None = FindPlacement(1, "", frozenset())
        self.held_back = False
        self.log: list[str] = []

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    def run(self, steps: int = 4000) -> None:
        for _ in range(steps):
            if self.machine.is_over:
                return
            self.step()
        raise AssertionError(f"stuck in {self.machine.state}: {self.log[-20:]}")

    def step(self) -> None:
        chance = self.random.random()
        if chance < self.mischief:
            self.random.choice([self.kill, self.forget, self.repeat, self.refuse, self.overtake])()
            return
        moves = [self.place] if self.wish is not None else []
        for worker in self.workers.values():
            if worker.inbox and not worker.dead:
                moves.append(lambda worker=worker: self.receive(worker))  # type: ignore[misc]
            if worker.outbox:
                moves.append(lambda worker=worker: self.deliver(worker))  # type: ignore[misc]
            if worker.work and not worker.dead:
                moves.append(lambda worker=worker: self.compute(worker))  # type: ignore[misc]
        if self.held_back:
            moves.append(self.end_the_wait)
        if moves:
            self.random.choice(moves)()

    # -- the router's shell -------------------------------------------------------------------------------------------

    def feed(self, event: AnyEvent) -> None:
        self.log.append(f"{event}")
        for instruction in self.machine.handle(event):
            self.follow(instruction)

    def follow(self, instruction: Done) -> None:
        match instruction:
            case Deliver(delta=delta):
                self.deltas.append(delta)
            case Send(worker=worker, attempt=attempt, body=body):
                self.sent.append(instruction)
                self.workers[worker.peer_id].inbox.append((attempt, body))
            case FindPlacement():
                self.wish, self.held_back = instruction, False
            case AwaitLostWorkers():
                self.held_back = True
            case FindDecode(excluded=excluded):
                alive = [d.ref for d in self.decodes.values() if not d.dead and worker_key(d.ref) not in excluded]
                self.feed(DecodeChosen(self.random.choice(alive) if alive else None))
            case Ended(error=error):
                self.wish, self.held_back = None, False  # a shell waits for nobody any more
                self.ends.append(error)

    def place(self) -> None:
        prefills = [worker.ref for worker in self.prefills.values() if not worker.dead]
        decodes = [worker.ref for worker in self.decodes.values() if not worker.dead]
        prefill = self.random.choice(prefills) if prefills else None
        decode = self.random.choice(decodes) if decodes and (prefill is None or self.machine.needs_decode) else None
        self.wish = None
        self.feed(WorkersAssigned(prefill, decode, 60.0))

    def end_the_wait(self) -> None:
        """Nobody that was killed comes back."""
        self.held_back = False
        self.feed(PlacementFailed("nobody came back"))

    # -- the workers --------------------------------------------------------------------------------------------------

    def receive(self, worker: Worker) -> None:
        attempt, body = worker.inbox.popleft()
        work = worker.work.get(attempt)
        match body:
            case Prefill(prompt=prompt, decode=decode) if attempt not in worker.cancelled:
                tokens = unpack_tokens(prompt.tokens).tolist()
                assert tokens == PROMPT + [true_token(i) for i in range(prompt.num_output)]
                worker.work[attempt] = Work(
                    attempt, prompt.num_output, prompt.sampling.max_tokens, prompt.num_output, decode
                )
            case Generate(prompt=prompt) if attempt not in worker.cancelled:
                tokens = unpack_tokens(prompt.tokens).tolist()
                assert tokens == PROMPT + [true_token(i) for i in range(prompt.num_output)]
                worker.work[attempt] = Work(
                    attempt, prompt.num_output, prompt.sampling.max_tokens, prompt.num_output, committed=True
                )
            case Cancel():
                worker.cancelled.add(attempt)
                worker.work.pop(attempt, None)
            case Reassign() if work is None or work.committed or body.decode is None:
                worker.work.pop(attempt, None)
                failed = Failed(failure=LOST, cause="not held here", retriable=True)
                worker.outbox.append(FromWorker(worker.ref, attempt, 0, failed))
            case Reassign(decode=decode):
                assert work is not None
                work.decode = decode

    def compute(self, worker: Worker) -> None:
        work = self.random.choice(list(worker.work.values()))
        if worker.role == "decode":
            self.decode_step(worker, work)
        elif not work.first_sent:
            work.first_sent = True
            is_last = work.num_output + 1 >= work.max_tokens
            body = FirstToken(
                index=work.num_output,
                token_id=true_token(work.num_output) if work.max_tokens else None,
                finish=FinishReason.LENGTH if is_last else None,
            )
            worker.outbox.append(FirstTokenReceived(worker.ref, work.attempt, body))
            if is_last:
                del worker.work[work.attempt]
        elif work.decode is not None:
            self.hand_over(worker, work, self.workers[work.decode.peer_id])

    def hand_over(self, worker: Worker, work: Work, decode: Worker) -> None:
        refused = decode.dead or self.random.random() < self.mischief
        if refused or work.attempt in decode.cancelled:
            need = NeedDecode(reason="refused", excluded=[decode.ref.peer_id])
            worker.outbox.append(FromWorker(worker.ref, work.attempt, 0, need))
            work.decode = None
            return
        decode.work[work.attempt] = Work(
            work.attempt, work.num_output, work.max_tokens, work.num_output, committed=True
        )
        del worker.work[work.attempt]

    def decode_step(self, worker: Worker, work: Work) -> None:
        most = work.max_tokens - work.next_index
        count = min(most, self.random.choice([1, 1, 2, 3]))
        end = work.next_index + count
        is_last = end >= work.max_tokens
        entry = TokenEntry(
            request="r",
            attempt=work.attempt,
            sequence=0,
            index=work.next_index,
            token_ids=[true_token(index) for index in range(work.next_index, end)],
            cached_tokens=self.random.choice([None, None, 3]),
            finish=FinishReason.LENGTH if is_last else None,
            usage=self.random.choice([None, None, SequenceUsage(prompt_blocks=1)]),
        )
        work.next_index = end
        worker.outbox.append(TokensReceived(worker.ref, entry))
        if is_last:
            del worker.work[work.attempt]

    def deliver(self, worker: Worker) -> None:
        event = worker.outbox.popleft()
        self.past.append(event)
        self.feed(event)

    # -- mischief -----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """A worker dies, unless it is the last of the decode workers. What it sent and nobody took is gone."""
        alive = [worker for worker in self.workers.values() if not worker.dead]
        last_decode = sum(worker.role == "decode" for worker in alive) == 1
        victims = [worker for worker in alive if worker.role == "prefill" or not last_decode]
        if not victims:
            return
        victim = self.random.choice(victims)
        victim.dead = True
        victim.outbox.clear()
        victim.work.clear()
        was_silent, in_company = self.random.choice([(False, False), (False, False), (True, False), (False, True)])
        self.feed(WorkerLost(victim.ref, 0, "killed", was_silent=was_silent, in_company=in_company))

    def forget(self) -> None:
        """A worker that lives did not hear of the router for long: it gives up what is the router's."""
        worker = self.random.choice([worker for worker in self.workers.values() if not worker.dead])
        worker.inbox.clear()
        worker.outbox.clear()
        worker.work.clear()
        self.feed(WorkerLost(worker.ref, 0, "it lost us", is_alive=True))

    def repeat(self) -> None:
        """An event of the past comes again: a double, or one of an attempt that is over."""
        if self.past:
            event = self.random.choice(self.past)
            is_stale = event.attempt < self.machine.attempt  # type: ignore[union-attr]
            is_double = isinstance(event, FirstTokenReceived | TokensReceived) and self.machine.involves(event.worker)
            if is_stale or (is_double and self.machine.state is not AttemptState.WAITING):
                self.feed(event)

    def refuse(self) -> None:
        """A worker gives an attempt up."""
        busy = [worker for worker in self.workers.values() if worker.work]
        if busy:
            worker = self.random.choice(busy)
            attempt = self.random.choice(list(worker.work))
            if worker.role == "prefill" or worker.work[attempt].committed:
                refused = worker.work.pop(attempt).first_sent is False and self.random.random() < 0.5
                failed = Failed(failure=BROKEN, cause="out of luck", retriable=True, refused=refused)
                worker.outbox.append(FromWorker(worker.ref, attempt, 0, failed))

    def overtake(self) -> None:
        """Two batches of one worker come in the wrong order."""
        outboxes = [w.outbox for w in self.decodes.values() if len(w.outbox) > 1]
        for outbox in outboxes:
            if all(isinstance(event, TokensReceived) for event in (outbox[0], outbox[1])):
                outbox[0], outbox[1] = outbox[1], outbox[0]
