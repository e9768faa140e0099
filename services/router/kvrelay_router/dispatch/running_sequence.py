"""Requests and sequences in progress: what the shell keeps beside their machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay_router.dispatch.attempt import SequenceAttempts
from kvrelay_router.dispatch.events import AwaitLost, Event, FindDecode, FindPlacement, Instruction
from kvrelay_router.dispatch.load import Held
from kvrelay_router.dispatch.placement import PromptPrefixes, Work
from kvrelay_router.dispatch.records import RequestRecord, SequenceHistory
from kvrelay_router.dispatch.running_request import RunningRequest
from kvrelay_router.routing.policy import PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Times in seconds."""

    policy: PolicyName = "cost"
    local_prefill_tokens: int | None = None  # prompts not longer than this go to decode alone; None: the policy decides
    ttft_deadline_s: float | None = None  # requests expected later are refused
    max_attempts: int = 3
    max_requests: int = 1024  # in progress; more are refused
    wait_for_worker_s: float = 30.0  # a retry or a handoff that finds no worker ready waits so long for one
    num_recent_requests: int = 2000
    num_last_decisions: int = 50
    registry_interval_s: float = 0.5
    status_interval_s: float = 1.0
    live_timeout_s: float = 0.5


@dataclass(frozen=True, slots=True)
class ExpectedCacheHit:
    """What an attempt's placement expected of the cache, in tokens."""

    num_prompt: int
    num_cached: int


@dataclass(slots=True)
class CacheTally:
    """Tokens of prompts that a worker has computed: how many the router expected in a cache, how many were found."""

    num_prompt: int = 0
    num_predicted: int = 0
    num_found: int = 0

    def add(self, expected: ExpectedCacheHit, num_found: int) -> None:
        """A first token came."""
        self.num_prompt += expected.num_prompt
        self.num_predicted += min(expected.num_cached, expected.num_prompt)
        self.num_found += num_found

    def as_json(self) -> dict[str, int]:
        """JSON-ready."""
        return {
            "prompt_tokens": self.num_prompt,
            "predicted_tokens": self.num_predicted,
            "found_tokens": self.num_found,
        }


@dataclass(slots=True, eq=False)
class Running:
    """A request in progress. It is over when its last sequence is."""

    handle: RunningRequest
    record: RequestRecord
    deadline: float  # monotonic
    deadline_timer: asyncio.TimerHandle
    prompt: PromptPrefixes
    sequences: dict[int, RunningSequence] = field(default_factory=dict)  # the unfinished ones
    outcome: str = "finished"


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sequence in progress."""

    index: int
    machine: SequenceAttempts
    handle: Callable[[Event], list[Instruction]]  # the machine's, recorded if an event log is kept
    running: Running
    record: SequenceHistory
    held: Held = field(default_factory=Held)
    expected: ExpectedCacheHit | None = None  # of the cache, until it is known
    trace: str = ""  # the current attempt's context
    fingerprint: str = ""  # of the current attempt's workers
    work: Work = field(default_factory=Work)  # of the current attempt, as its placement expected
    waiting_for: FindPlacement | AwaitLost | FindDecode | None = None  # while no worker is ready
    waiting_timer: asyncio.TimerHandle | None = None  # also that of a pause before the next attempt

    @property
    def request_id(self) -> str:
        """Of the request it belongs to."""
        return self.running.handle.request.request_id
