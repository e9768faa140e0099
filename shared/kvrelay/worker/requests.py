"""The open requests of a worker, and how both roles begin and end a request."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol, TypeVar

from kvrelay.kv.hashing import root_hash
from kvrelay.kv.table import BlockTable, blocks_for, blocks_for_group
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import (
    AnyBody,
    Failed,
    Header,
    PeerRef,
    Prompt,
    PromptLogprobs,
    unpack_tokens,
)
from kvrelay.protocol.packed_logprobs import packed_in_parts
from kvrelay.protocol.sampling import BeamSpec, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.sequence import Origin, Sequence, TokenBuffer
from kvrelay.step.batch import ModelSpec
from kvrelay.telemetry.tracer import trace_fields
from kvrelay.worker.context import WorkerContext

DEADLINE_GRACE_S = 5.0
"""The router ends a request at its deadline. A worker that gets no word from the router ends it this many seconds
later."""


class OpenRequest(Protocol):
    """The common part of both roles' requests."""

    @property
    def sequence(self) -> Sequence: ...

    @property
    def scores(self) -> ScoreParts | None: ...


RequestT = TypeVar("RequestT", bound=OpenRequest)


def is_same_process(one: PeerRef, other: PeerRef) -> bool:
    """Returns whether both refer to one incarnation of a peer, under whatever address."""
    return one.peer_id == other.peer_id and one.incarnation == other.incarnation


def deadline_of(prompt: Prompt) -> float:
    """The monotonic time at which a worker ends this request on its own."""
    return time.monotonic() + prompt.timeout_s + DEADLINE_GRACE_S


class CancelledRequestCache:
    """Keys of cancelled attempts, oldest first: a cancel can arrive before the request that it cancels. Entries
    expire after `keep_s` seconds; at most `at_most` are kept."""

    def __init__(self, keep_s: float = 120.0, at_most: int = 65536) -> None:
        self._keep_s = keep_s
        self._at_most = at_most
        self._cancelled_at: OrderedDict[SequenceKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cancelled_at)

    def add(self, key: SequenceKey, now: float) -> None:
        """Remembers that this attempt was cancelled at `now`, in monotonic seconds."""
        self._cancelled_at[key] = now
        self._cancelled_at.move_to_end(key)
        while self._cancelled_at and (
            len(self._cancelled_at) > self._at_most or now - next(iter(self._cancelled_at.values())) > self._keep_s
        ):
            self._cancelled_at.popitem(last=False)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._cancelled_at


class ScoreParts:
    """The log-probabilities of a prompt on their way from the steps to the router."""

    __slots__ = ("_num_sent",)

    def __init__(self) -> None:
        self._num_sent = 0

    def add(self, entries: SequenceOf[TokenLogprobs]) -> Iterator[PromptLogprobs]:
        """The messages for the entries of the next positions. Send every one before the next call."""
        for part in packed_in_parts(entries):
            message = PromptLogprobs(start=self._num_sent, part=part)
            self._num_sent += len(part)
            yield message

    def restart(self) -> None:
        """The prompt is computed again from its beginning."""
        self._num_sent = 0


def scores_of(prompt: Prompt) -> ScoreParts | None:
    """Returns None if the prompt's log-probabilities are not asked for."""
    return None if prompt.sampling.prompt_logprobs is None else ScoreParts()


class OpenRequests(Mapping[SequenceKey, RequestT]):
    """A role's requests by key. `cancel` is the role's function to end a request; `role` names the role in messages."""

    def __init__(self, context: WorkerContext, role: str, cancel: Callable[[SequenceKey, str], None]) -> None:
        self.cancel = cancel
        self.draining = False
        self.cancelled = CancelledRequestCache()
        self._context = context
        self._role = role
        self._open: dict[SequenceKey, RequestT] = {}
        self._samples: dict[str, dict[SequenceKey, RequestT]] = {}  # key: the router's request id

    def __getitem__(self, key: SequenceKey) -> RequestT:
        return self._open[key]

    def get(self, key: SequenceKey | None, default: object = None) -> RequestT | None:  # type: ignore[override]
        return self._open.get(key) if key is not None else None

    def __iter__(self) -> Iterator[SequenceKey]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: RequestT) -> None:
        key = request.sequence.key
        self._open[key] = request
        self._samples.setdefault(key[0], {})[key] = request

    def remove(self, key: SequenceKey) -> None:
        """Removes a request that holds nothing here any more. Does nothing for an unknown key."""
        request = self._open.pop(key, None)
        if request is None:
            return
        samples = self._samples[key[0]]
        del samples[key]
        if not samples:
            del self._samples[key[0]]

    def samples_of(self, request: str) -> Collection[RequestT]:
        """The samples of a router's request that are open here, in any attempt, in order of arrival."""
        samples = self._samples.get(request)
        return samples.values() if samples is not None else ()

    # -- the beginning ------------------------------------------------------------------------------------------------

    def queue(self, header: Header, router: PeerRef, prompt: Prompt, *, prefill_only: bool) -> Sequence | None:
        """Hands a new sequence to the scheduler and ends older attempts of it. Returns None if no sequence starts: it
        is known, cancelled or refused, or the worker drains. In the last two cases the router gets `Failed`."""
        key = sequence_key(header)
        if key in self.cancelled or key in self._open:
            return None
        if self.draining:
            cause = f"the {self._role} worker is draining"
            self.send(router, key, Failed(failure=FailureKind.DRAINING, cause=cause, retriable=True, refused=True))
            return None
        self.supersede(key)
        try:
            max_running = None if prefill_only else self._context.scheduler.limits.max_running
            sequence = make_sequence(header, prompt, router, self._context.spec, max_running)
            sequence.prefill_only = prefill_only
            if prefill_only:
                sequence.origin.sample_group = ""  # it leaves with its first token, whatever the other samples do
            self._context.steps.add(sequence)
        except (ValueError, OverflowError) as error:
            self.send(router, key, Failed(failure=FailureKind.TOO_LARGE, cause=str(error), retriable=False))
            return None
        return sequence

    def supersede(self, key: SequenceKey) -> None:
        """Ends the older attempts of the same sequence."""
        for other in [k for k in self._samples.get(key[0], ()) if k[2] == key[2] and k[1] < key[1]]:
            self.cancel(other, "a newer attempt took over")

    # -- the log-probabilities of prompts ------------------------------------------------------------------------------

    def restart_scores(self, recomputed: Iterable[Sequence]) -> None:
        """The prompts of these sequences are computed again from their beginnings."""
        for sequence in recomputed:
            request = self.get(sequence.key)
            if request is not None and request.scores is not None:
                request.scores.restart()

    def send_scores(self, output: SequenceOutput, scores: ScoreParts | None) -> None:
        """Sends what a step brought of a prompt's log-probabilities."""
        if output.prompt_logprobs and scores is not None:
            for message in scores.add(output.prompt_logprobs):
                self.send(output.sequence.origin.router, output.sequence.key, message)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, key: SequenceKey, router: PeerRef, reason: str) -> None:
        """Ends a request for its router, and remembers its key, so that a request that arrives after its own cancel
        does not start. Does nothing for a request of another router."""
        request = self._open.get(key)
        if request is not None and not is_same_process(request.sequence.origin.router, router):
            return
        self.cancel(key, reason)
        self.cancelled.add(key, time.monotonic())

    def log_fields(self, key: SequenceKey | None) -> dict[str, Any]:
        """The `extra` of a log line about a sequence. Empty if the sequence is not open here."""
        request = self.get(key)
        if request is None:
            return {}
        request_id, attempt, index = request.sequence.key
        fields = {"request_id": request_id, "attempt": attempt, "sequence": index}
        return fields | trace_fields(request.sequence.origin.trace)

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, peer: PeerRef, key: SequenceKey, body: AnyBody) -> None:
        """Sends a message about a sequence, with its trace context if the sequence is open here."""
        request = self._open.get(key)
        trace = request.sequence.origin.trace if request is not None else ""
        self._context.messenger.send(peer, body, request=key[0], attempt=key[1], sequence=key[2], trace=trace)


class PromptRefused(ValueError):
    """A prompt that this worker can never run. The router should have refused it."""


def sequence_key(header: Header) -> tuple[str, int, int]:
    """The key of the sequence that a message is about."""
    return header.request, header.attempt, header.sequence


def make_sequence(
    header: Header,
    prompt: Prompt,
    router: PeerRef,
    spec: ModelSpec,
    max_running: int | None = None,
    *,
    numerics: str | None = None,
) -> Sequence:
    """Returns a waiting sequence. `max_running` is the limit of the scheduler that runs its output, or None if this
    worker only prefills. `numerics` are those of the worker that computes the prompt, or None if this one does. Raises
    PromptRefused."""
    tokens = unpack_tokens(prompt.tokens)
    if not 0 <= prompt.num_output < len(tokens):
        raise PromptRefused(f"a prompt of {len(tokens)} tokens of which {prompt.num_output} are output")
    if int(tokens.min()) < 0 or int(tokens.max()) >= spec.vocab_size:
        raise PromptRefused(f"a token id outside [0, {spec.vocab_size})")
    num_fed = len(tokens) + (1 if prompt.sampling.max_tokens > prompt.num_output else 0)
    if num_fed > spec.max_model_len:
        raise PromptRefused(f"{len(tokens)} tokens do not fit max_model_len {spec.max_model_len}")
    longest = min(len(tokens) - prompt.num_output + prompt.sampling.max_tokens, spec.max_model_len)
    num_blocks = blocks_for(max(longest, len(tokens)), spec.block_size)
    if num_blocks > spec.num_blocks:
        raise PromptRefused(f"it may grow to {num_blocks} blocks, the pool has {spec.num_blocks}")
    if prompt.sampling.beams is not None and max_running is not None:
        _check_beams(prompt.sampling.beams, len(tokens), longest, spec, max_running)
    return Sequence(
        key=sequence_key(header),
        tokens=TokenBuffer(tokens),
        num_prompt=len(tokens) - prompt.num_output,
        sampling=prompt.sampling,
        # KV of a worker that rounds otherwise is reused only behind prompts of such workers.
        root=root_hash(
            model=spec.pairing_fingerprint,
            numerics=spec.numerics if numerics is None else numerics,
            cache_salt=prompt.cache_salt,
        ),
        table=BlockTable(spec.block_size),
        origin=Origin(
            router,
            header.trace,
            prompt.priority,
            prompt.tenant,
            prompt.weight,
            prompt.session,
            prompt.text_owner,
            sample_group=header.request if prompt.num_samples > 1 else "",
        ),
    )


def _check_beams(beams: BeamSpec, num_tokens: int, longest: int, spec: ModelSpec, max_running: int) -> None:
    """Checks that all beams of a search fit at once. Raises PromptRefused."""
    if beams.width > max_running:
        raise PromptRefused(f"{beams.width} beams run at a time, and max_running is {max_running}")
    num_blocks = blocks_for_group(num_tokens, longest, beams.width, spec.block_size)
    if num_blocks > spec.num_blocks:
        raise PromptRefused(
            f"{beams.width} beams may grow to {num_blocks} blocks together, the pool has {spec.num_blocks}"
        )
