"""A request in progress with its sequences: it orders their tokens, and passes deltas on to the HTTP layer's sink, or
keeps them until they are taken.

A token is known by its output index. Tokens that were delivered before are dropped, and tokens behind a gap are held
until it is filled. Decode's first entry repeats prefill's first token: the one that arrives first is delivered.

Waking a task per token costs more than handling the token, so deltas go to the sink in a callback. It runs once in a
turn of the event loop, for all requests: tokens of one sequence that arrived together go out together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import final

import msgspec
from msgspec.structs import replace

from kvrelay.protocol.messages import PromptLogprobs, SequenceUsage, TokenEntry
from kvrelay.protocol.packed_logprobs import CollectedLogprobs
from kvrelay.protocol.sampling import FinishReason, TokenLogprobs
from kvrelay.text.choice import SequenceDelta, join_deltas
from kvrelay_router.dispatch.attempt import SequenceAttempts
from kvrelay_router.dispatch.events import AwaitLostWorkers, Event, FindDecode, FindPlacement, Instruction
from kvrelay_router.dispatch.interface import DeltaSink, GenerateRequest, RequestFailed, ServedBy
from kvrelay_router.dispatch.placement import PromptPrefixes, Work
from kvrelay_router.dispatch.records import RequestRecord, SequenceHistory
from kvrelay_router.dispatch.retry_budget import PROVEN_TOKENS
from kvrelay_router.fleet.load import Held, WorkerKey
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.routing.estimates import Decision

MAX_TAKEN = 128
"""Deltas that are taken at a time: a few milliseconds of work, even if each brings 20 log-probabilities."""
MAX_TAKEN_TOKENS = 2048
"""As are their tokens: forced tokens come many at a time, and each may have to be compared with stop strings."""
LIGHT_PUSHES = 16
"""Pushes of one token each, after which the time is asked for: about a millisecond with 20 log-probabilities each."""


@final
class ScoresReceived(msgspec.Struct, frozen=True):
    """A part of the prompt's log-probabilities came."""

    attempt: int
    body: PromptLogprobs


class TokenIntake:
    """`num_scores`: so many log-probabilities of the prompt were asked for. They go out with the first tokens.
    `opening`: tokens that the output begins with. They go out with the first ones of a worker, so that a request that
    fails before has no output."""

    def __init__(self, sequence: int, num_scores: int = 0, opening: tuple[int, ...] = ()) -> None:
        self.output: list[int] = list(opening)  # tokens delivered, over all attempts, and the opening
        self._opening = opening  # until it is delivered
        self.lacks_scores = num_scores > 0  # some of the prompt's log-probabilities are still to come
        self._scores_due = self.lacks_scores  # until they are delivered
        self._num_scores = num_scores
        self._scores = CollectedLogprobs()
        self._sequence = sequence
        self._attempt = 1
        self._held: dict[int, TokenEntry] = {}  # entries behind a gap, by the index of their first token
        self._usage: SequenceUsage | None = None  # sent with the next delta, then None
        self._cached_tokens: int | None = None  # sent with the next delta, then None
        self._cached_tokens_reported = False
        self._has_details = self._scores_due or bool(opening)  # the next delta brings more than an entry's tokens

    def handle(self, entry: TokenEntry | ScoresReceived) -> SequenceDelta | None:
        """Returns the tokens that can be delivered now, in one delta. Nothing follows a delta with a finish reason.

        `entry` must be of the current attempt or of a new one.
        """
        if type(entry) is ScoresReceived:  # `isinstance` takes ten times as long for a struct that is none
            return self._handle_scores(entry)
        output, token_ids = self.output, entry.token_ids
        if (
            not token_ids
            or entry.index != len(output)
            or entry.attempt != self._attempt
            or entry.logprobs
            or entry.usage is not None
            or entry.cached_tokens is not None
            or self._has_details
            or self._held
        ):
            return self._handle_unusual(entry)
        # Nearly all entries are the next tokens of the current attempt and nothing else.
        output += token_ids
        return SequenceDelta(self._sequence, token_ids, entry.logprobs, finish=entry.finish)

    def _handle_unusual(self, entry: TokenEntry) -> SequenceDelta | None:
        """Does what `handle` does, for entries of any kind."""
        if entry.attempt != self._attempt:
            self._begin_attempt(entry.attempt)
        num_known = len(self.output) - entry.index
        if num_known < 0 or self.lacks_scores:
            self._hold(entry)
            return None
        token_ids, logprobs, finish = entry.token_ids, entry.logprobs, entry.finish
        if num_known:
            if num_known > len(token_ids):
                finish = None  # another worker has already gone beyond this end
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if entry.usage is not None or entry.cached_tokens is not None:
            self._keep_details(entry)
        delta = None
        if token_ids or finish is not None:
            self.output += token_ids
            if self._has_details or entry.texts:
                delta = self._delta_with_details(entry, token_ids, logprobs, finish)
            else:
                delta = SequenceDelta(self._sequence, token_ids, logprobs, finish=finish)
        return self._release_held(delta) if self._held else delta

    def _keep_details(self, entry: TokenEntry) -> None:
        """Keeps the values that are not tokens for the next delta. Cached tokens are reported once."""
        if entry.usage is not None:
            self._usage, self._has_details = entry.usage, True
        if entry.cached_tokens is not None and not self._cached_tokens_reported:
            self._cached_tokens, self._cached_tokens_reported = entry.cached_tokens, True
            self._has_details = True

    def _delta_with_details(
        self, entry: TokenEntry, token_ids: list[int], logprobs: list[TokenLogprobs], finish: FinishReason | None
    ) -> SequenceDelta:
        opening, self._opening = self._opening, ()
        delta = SequenceDelta(
            self._sequence,
            [*opening, *token_ids] if opening else token_ids,
            logprobs,
            self._scores if self._scores_due else (),
            self._cached_tokens,
            finish,
            self._usage,
            entry.texts,
        )
        if self._scores_due:
            self._scores_due = False
            self._scores = CollectedLogprobs()
        self._has_details = False
        self._cached_tokens = self._usage = None
        return delta

    def _begin_attempt(self, attempt: int) -> None:
        """The entries held for the previous one are dropped. Its worker computes the prompt again, and with it the
        log-probabilities, unless all of them came before."""
        self._attempt = attempt
        self._held.clear()
        if self.lacks_scores:
            self._scores = CollectedLogprobs()

    def _handle_scores(self, event: ScoresReceived) -> SequenceDelta | None:
        """Keeps a part. The last one releases tokens that came before it from another worker."""
        if not self.lacks_scores:
            return None
        if event.attempt != self._attempt:
            self._begin_attempt(event.attempt)
        start, part, num_known = event.body.start, event.body.part, len(self._scores)
        if start + len(part) > num_known:  # a prompt that is computed again may have other parts
            self._scores.add(part.without_first(num_known - start) if num_known > start else part)
            self.lacks_scores = len(self._scores) < self._num_scores
        return self._release_held(None) if self._held and not self.lacks_scores else None

    def _hold(self, entry: TokenEntry) -> None:
        """Of two entries with the same first token, keeps the longer or later one."""
        held = self._held.get(entry.index)
        if held is None or len(held.token_ids) <= len(entry.token_ids):
            self._held[entry.index] = entry

    def _release_held(self, delta: SequenceDelta | None) -> SequenceDelta | None:
        """Adds the held entry behind this delta. That entry adds the next one."""
        index = min(self._held)
        if index > len(self.output) or (delta is not None and delta.finish is not None):
            return delta
        released = self.handle(self._held.pop(index))
        return join_deltas([each for each in (delta, released) if each is not None]) if released is not None else delta


Search = FindPlacement | AwaitLostWorkers | FindDecode
"""A sequence that waits for a worker has one of these."""

NO_WORK = Work()


class PushQueue:
    """The requests that have deltas for their sinks."""

    def __init__(self) -> None:
        self._requests: list[RunningRequest] = []

    def add(self, request: RunningRequest) -> None:
        """Pushes the request's deltas in the next turn of the event loop."""
        if not self._requests:
            asyncio.get_running_loop().call_soon(self._push)
        self._requests.append(request)

    def _push(self) -> None:
        """Pushes for the time of a slice. The requests that are left come first in the next turn."""
        requests, self._requests = self._requests, []
        if len(requests) == 1:
            requests[0].push()
            return
        share = LoopShare()
        for number, request in enumerate(requests, 1):
            # Asking for the time after each token would cost as much as a tenth of the push.
            if (request.push() or not number % LIGHT_PUSHES) and share.is_used_up and number < len(requests):
                if not self._requests:
                    asyncio.get_running_loop().call_soon(self._push)
                self._requests = requests[number:] + self._requests
                return


@dataclass(slots=True, eq=False)
class ActiveSequence:
    index: int
    attempts: SequenceAttempts
    intake: TokenIntake
    handle_event: Callable[[Event], list[Instruction]]  # `attempts.handle`, recorded if an event log is kept
    handle_entry: Callable[[TokenEntry | ScoresReceived], SequenceDelta | None]  # `intake.handle`, recorded likewise
    running: RunningRequest
    record: SequenceHistory
    held: Held = field(default_factory=Held)
    # The current attempt: its workers, the tokens of its prompt, and the load that placement expects from it.
    decision: Decision | None = None
    num_prompt_tokens: int = 0  # 0 once the first token has said how many of them were cached
    trace: str = ""  # the trace context of the current attempt
    work: Work = NO_WORK
    silent_workers: frozenset[WorkerKey] = frozenset()  # those that were silent when the current attempt was sent
    waiting_for: Search | None = None  # while no worker is ready
    waiting_timer: asyncio.TimerHandle | None = None  # also the timer of the pause before a retry

    @property
    def request_id(self) -> str:
        return self.running.request.request_id

    @property
    def fingerprint(self) -> str:
        """Identifies the model of the current attempt's workers."""
        return self.decision.fingerprint if self.decision is not None else ""

    @property
    def numerics(self) -> str:
        """The numerics of the worker that computes the prompt in the current attempt."""
        return self.decision.numerics if self.decision is not None else ""

    @property
    def is_proven(self) -> bool:
        """True if the current attempt brought so many tokens that its request cannot be why a worker fails."""
        return len(self.intake.output) - self.attempts.num_resumed >= PROVEN_TOKENS

    def record_details(self, delta: SequenceDelta) -> None:
        """Records what few deltas bring beside their tokens."""
        record = self.record
        if record.first_token_ms is None:
            record.first_token_ms = self.running.record.elapsed_ms()
        if delta.cached_tokens is not None:
            record.cached_tokens = delta.cached_tokens
        if delta.usage is not None:
            record.usage = delta.usage
        if delta.finish is not None:
            record.finish = str(delta.finish)
            record.num_output_tokens += sum(len(text.token_ids) for text in delta.texts)


class RunningRequest:
    """`on_stop` and `on_cancel` belong to the dispatcher, whose requests share one `queue`.

    `error` is set if the request failed; deltas that came before can still be taken. It is over for the dispatcher when
    the last of its `sequences` is.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompt: PromptPrefixes,
        on_stop: Callable[[RunningRequest, int], None],
        on_cancel: Callable[[RunningRequest], None],
        queue: PushQueue | None = None,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.record = RequestRecord(request)
        self.deadline = time.monotonic() + request.timeout_s
        self.sequences: dict[int, ActiveSequence] = {}  # the unfinished ones
        self.outcome = "finished"
        self.served_by = ServedBy()
        self.error: RequestFailed | None = None
        self._on_stop = on_stop
        self._on_cancel = on_cancel
        self._queue = queue or PushQueue()
        self._unfinished = set(range(request.num_sequences))
        self._deltas: list[SequenceDelta] = []  # deltas in their order of arrival
        self._sink: DeltaSink | None = None
        self._sink_was_ready = False
        self._awaiting_worker: set[int] = set()

    @property
    def awaits_worker(self) -> bool:
        """True while no worker is ready for a sequence. The sink is woken when that begins."""
        return bool(self._awaiting_worker) and not self.is_over

    @property
    def is_over(self) -> bool:
        """True if nothing more will be delivered."""
        return not self._unfinished or self.error is not None

    @property
    def has_deltas(self) -> bool:
        """True if `take` would return deltas."""
        return bool(self._deltas)

    # -- for the HTTP layer -------------------------------------------------------------------------------------------

    def connect(self, sink: DeltaSink) -> None:
        """From now on the sink gets all deltas, in order, while it can take them. Other deltas wait for `take`."""
        self._sink = sink

    def disconnect(self) -> None:
        """The sink gets nothing more. Must be called, because the two refer to each other."""
        self._sink = None

    def take(self) -> list[SequenceDelta]:
        """Returns the deltas that wait, joined to one per sequence. If they are many, some wait for the next call."""
        deltas, self._deltas = self._deltas, []
        if len(deltas) <= 1:
            return [self._first_texts(deltas[0])] if deltas and deltas[0].texts else deltas
        num_taken = num_tokens = 0
        for delta in deltas[:MAX_TAKEN]:
            num_tokens += len(delta.token_ids)
            if num_taken and num_tokens > MAX_TAKEN_TOKENS:
                break
            num_taken += 1
        if num_taken < len(deltas):
            deltas, self._deltas = deltas[:num_taken], deltas[num_taken:]
        return self._joined(deltas)

    def _first_texts(self, delta: SequenceDelta) -> SequenceDelta:
        """Takes the first texts of a search. The others wait for the next call."""
        num_taken = num_tokens = 0
        for text in delta.texts:
            num_tokens += len(text.token_ids)
            if num_taken and num_tokens > MAX_TAKEN_TOKENS:
                break
            num_taken += 1
        if num_taken == len(delta.texts):
            return delta
        self._deltas = [replace(delta, texts=delta.texts[num_taken:], cached_tokens=None, usage=None)]
        return replace(delta, texts=delta.texts[:num_taken])

    def _joined(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        """Joins deltas to one per sequence."""
        if self.request.num_sequences == 1:
            return [join_deltas(deltas)]
        by_sequence: dict[int, list[SequenceDelta]] = {}
        for delta in deltas:
            by_sequence.setdefault(delta.sequence, []).append(delta)
        return [join_deltas(each) for each in by_sequence.values()]

    def stop(self, sequence: int) -> None:
        """Ends a sequence whose text has a stop string. Its later tokens are dropped."""
        self._deltas = [delta for delta in self._deltas if delta.sequence != sequence]
        if sequence in self._unfinished and self.error is None:
            self._on_stop(self, sequence)

    def cancel(self) -> None:
        """Frees everything of this request on all workers. Idempotent, and without effect after the end."""
        if not self.is_over:
            self._on_cancel(self)

    # -- for the dispatcher -------------------------------------------------------------------------------------------

    def deliver(self, delta: SequenceDelta) -> None:
        if self._deltas:  # the sink has been told
            self._deltas.append(delta)
            return
        self._deltas.append(delta)
        sink = self._sink
        if sink is None:
            return
        if self._sink_was_ready or sink.can_take():
            self._sink_was_ready = True
            self._queue.add(self)
        else:
            # A stream's first delta waits for its task, which writes the HTTP head. Waking the task now and not in the
            # next turn lets heads go out before the deltas of other requests.
            sink.wake()

    def push(self) -> bool:
        """Gives the deltas to the sink. Returns whether they brought more than one token."""
        sink, deltas = self._sink, self._deltas
        if sink is None or not deltas:
            return False
        if not sink.can_take():
            sink.wake()
            return False
        if len(deltas) == 1 and not deltas[0].texts:  # nearly always: as `take`, without the call
            self._deltas = []
            sink.take(deltas)
            return len(deltas[0].token_ids) > 1
        sink.take(self.take())
        if self._deltas:
            self._queue.add(self)
        return True

    def worker_awaited(self, sequence: int) -> None:
        """This sequence starts to wait for a worker."""
        self._awaiting_worker.add(sequence)
        self._wake()

    def worker_found(self, sequence: int) -> None:
        """The sequence's wait is over."""
        self._awaiting_worker.discard(sequence)

    def finish(self, sequence: int) -> None:
        self._unfinished.discard(sequence)
        self._wake()

    def fail(self, error: RequestFailed) -> None:
        if not self.is_over:
            self.error = error
            self._wake()

    def _wake(self) -> None:
        if self._sink is not None:
            self._sink.wake()


def own_figures(running: Iterable[RunningRequest], records: Iterable[RequestRecord], owner: str) -> dict[str, int]:
    """Figures of one owner's requests. Retries are those of the requests in `records`."""
    own = [each for each in running if each.record.owner == owner]
    sequences = [sequence for each in own for sequence in each.sequences.values()]
    return {
        "running": len(own),
        "running_sequences": len(sequences),
        "sequences_waiting_for_worker": sum(sequence.waiting_for is not None for sequence in sequences),
        "retries": sum(max(0, len(each.attempts) - 1) for record in records for each in record.sequences),
    }
