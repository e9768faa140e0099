"""The requests and sequences in progress: what the dispatcher keeps for each beside its state machine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from kvrelay.protocol.messages import TokenEntry
from kvrelay.text.sequence_delta import SequenceDelta
from kvrelay_router.dispatch.attempt import SequenceAttempts
from kvrelay_router.dispatch.events import AwaitLostWorkers, Event, FindDecode, FindPlacement, Instruction
from kvrelay_router.dispatch.intake import ScoresReceived, TokenIntake
from kvrelay_router.dispatch.placement import PromptPrefixes, Work
from kvrelay_router.dispatch.records import RequestRecord, SequenceHistory
from kvrelay_router.dispatch.retry import PROVEN_TOKENS
from kvrelay_router.dispatch.running_request import RunningRequest
from kvrelay_router.fleet.load import Held, WorkerKey
from kvrelay_router.routing.policy import PolicyName

Search = FindPlacement | AwaitLostWorkers | FindDecode
"""A sequence that waits for a worker has one of these."""


NO_WORK = Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Fields ending in `_s` are in seconds."""

    policy: PolicyName = "cost"
    local_prefill_tokens: int | None = None  # longest prompt that decode computes alone; None: the policy decides
    ttft_deadline_s: float | None = None  # requests whose first token is expected later are refused
    max_attempts: int = 3
    max_requests: int = 1024  # requests in progress; more are refused
    max_wait_for_worker_s: float = 120.0  # a request, retry or handoff fails if no worker is ready for this long
    registry_interval_s: float = 0.5
    status_interval_s: float = 1.0
    tokenizer: str = ""  # the router's own, see `kvrelay.tokenizer_identity`; workers with another one are not used


class ExpectedCacheHit(msgspec.Struct, frozen=True):
    """Tokens of an attempt's prompt, and how many of them placement expected in the worker's cache."""

    num_prompt: int
    num_cached: int


@dataclass(slots=True)
class CacheTally:
    """Tokens of computed prompts: how many the router expected in a cache, and how many were found there."""

    num_prompt: int = 0
    num_predicted: int = 0
    num_found: int = 0

    def add(self, expected: ExpectedCacheHit, num_found: int) -> None:
        self.num_prompt += expected.num_prompt
        self.num_predicted += min(expected.num_cached, expected.num_prompt)
        self.num_found += num_found

    def as_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt,
            "predicted_tokens": self.num_predicted,
            "found_tokens": self.num_found,
        }


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in progress. It is over when its last sequence is."""

    handle: RunningRequest
    record: RequestRecord
    deadline: float  # monotonic seconds
    deadline_timer: asyncio.TimerHandle
    prompt: PromptPrefixes
    sequences: dict[int, ActiveSequence] = field(default_factory=dict)  # the unfinished ones
    outcome: str = "finished"


@dataclass(slots=True, eq=False)
class ActiveSequence:
    index: int
    attempts: SequenceAttempts
    intake: TokenIntake
    handle_event: Callable[[Event], list[Instruction]]  # `attempts.handle`, recorded if an event log is kept
    handle_entry: Callable[[TokenEntry | ScoresReceived], SequenceDelta | None]  # `intake.handle`, recorded likewise
    request: ActiveRequest
    record: SequenceHistory
    held: Held = field(default_factory=Held)
    expected: ExpectedCacheHit | None = None  # None once the first token has said how much was cached
    trace: str = ""  # the trace context of the current attempt
    fingerprint: str = ""  # identifies the model of the current attempt's workers
    work: Work = NO_WORK  # the load that placement expects from the current attempt
    silent_workers: frozenset[WorkerKey] = frozenset()  # those that were silent when the current attempt was sent
    waiting_for: Search | None = None  # while no worker is ready
    waiting_timer: asyncio.TimerHandle | None = None  # also the timer of the pause before a retry

    @property
    def request_id(self) -> str:
        return self.request.handle.request.request_id

    @property
    def is_proven(self) -> bool:
        """True if the current attempt brought so many tokens that its request cannot be why a worker fails."""
        return len(self.intake.output) - self.attempts.num_resumed >= PROVEN_TOKENS


OUTCOMES = ("submitted", "finished", "failed", "timed_out", "cancelled", "refused")


class RequestCounts:
    """Counts since the start. There are as many owners as API keys."""

    def __init__(self) -> None:
        self._of_owners: dict[str, Counter[str]] = {}

    def add(self, outcome: str, owner: str) -> None:
        counter = self._of_owners.get(owner)
        if counter is None:
            counter = self._of_owners[owner] = Counter()
        counter[outcome] += 1

    def of(self, owner: str | None) -> dict[str, int]:
        """The number of requests of an owner (None: of all) by outcome."""
        counters = [counter for each, counter in self._of_owners.items() if owner in (None, each)]
        return {outcome: sum(counter[outcome] for counter in counters) for outcome in OUTCOMES}


def own_figures(running: Iterable[ActiveRequest], records: Iterable[RequestRecord], owner: str) -> dict[str, int]:
    """Figures of one owner's requests. Retries are those of the requests in `records`."""
    own = [each for each in running if each.record.owner == owner]
    sequences = [sequence for each in own for sequence in each.sequences.values()]
    return {
        "running": len(own),
        "running_sequences": len(sequences),
        "sequences_waiting_for_worker": sum(sequence.waiting_for is not None for sequence in sequences),
        "retries": sum(max(0, len(each.attempts) - 1) for record in records for each in record.sequences),
    }
