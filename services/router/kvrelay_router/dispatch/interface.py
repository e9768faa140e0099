"""The interface between the HTTP layer and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import Sampling
from kvrelay.text.choice import SequenceDelta
from kvrelay_router.routing.policy import PolicyName


class NoWorkerReady(Exception):
    """No placement for a request at this moment: HTTP 503 with Retry-After."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLate(Exception):
    """No placement is expected to give a first token in time: HTTP 429 with Retry-After."""

    def __init__(self, expected_s: float, deadline_s: float) -> None:
        super().__init__(
            f"The first token is expected after {expected_s:.1f} s, the deadline is {deadline_s:g} s; try again later"
        )
        self.retry_after_s = expected_s - deadline_s


class RequestFailed(Exception):
    """A request that was accepted could not be finished, after all retries."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.INTERNAL_ERROR) -> None:
        super().__init__(message)
        self.kind = kind


class Ending(msgspec.Struct, frozen=True):
    """The tokens of a sequence behind the prompt that it shares with the others of its request, and how it is scored:
    positions in `sampling` count from the beginning of the prompt."""

    token_ids: list[int]
    sampling: Sampling


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated, tokenized request. Sequence i of `num_sequences` samples with the seed (sampling.seed, i, position).
    With `endings` there is a sequence for each of them."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    num_sequences: int = 1
    endings: Sequence[Ending] = ()
    cache_salt: str = ""
    session: str = ""  # the client's name of what this request is part of, such as a program
    priority: int = 0
    timeout_s: float = 600.0
    trace: str = ""
    owner: str = ""  # whose request it is, in records
    tenant: str = ""  # gets a fair share by `weight`
    weight: float = 1.0
    text_owner: str | None = None  # guesses may come from earlier outputs of the same owner; None: from none
    # Every output begins with these tokens, because the grammar forces them. Fewer than `sampling.max_tokens`. They go
    # to workers with the prompt, as the output of an earlier attempt would, and to the client with the first token
    # that a worker brings.
    opening: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, and of all endings."""
        return len(self.prompt_ids) + sum(len(ending.token_ids) for ending in self.endings)

    @property
    def session_key(self) -> str:
        """The session as workers know it."""
        return session_key(self.session, self.owner)


def session_key(session: str, owner: str) -> str:
    """A digest, so that sessions of one name and several owners differ; empty for no session."""
    if not session:
        return ""
    return blake2b(f"{owner}/{session}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(slots=True)
class ServedBy:
    """The workers of a request's latest attempt. None if no worker of that role is part of it."""

    prefill: str | None = None
    decode: str | None = None
    num_attempts: int = 0  # of the sequence with the most
    numerics: list[str] = field(default_factory=list)  # of the workers of all attempts, in order of first use
    describe_route: Callable[[], dict[str, Any]] = dict  # the routing decision with its reasons, JSON-ready


class DeltaSink(Protocol):
    """Takes a request's deltas in the callback that receives them."""

    @property
    def can_take(self) -> Callable[[], bool]:
        """Returns whether `take` may be called: not while the sink's task handles earlier deltas."""
        ...

    def take(self, deltas: list[SequenceDelta]) -> None:
        """Takes at most one delta per sequence. Never waits, never raises."""
        ...

    @property
    def wake(self) -> Callable[[], None]:
        """Deltas wait in the handle because the sink cannot take them, or a sequence or the request has ended."""
        ...


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
    tokenizer: str = ""  # the router's own, see `kvrelay.model_directory`; workers with another one are not used
