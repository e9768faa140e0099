"""What the attempt machine is made of, its events and its instructions: plain data between the machine and
`AttemptDriver`."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import TOKEN_BYTES, AnyBody, Failed, NeedDecode, PeerRef, Prompt, pack_tokens
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay_router.fleet.load import WorkerKey


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a sequence that all its attempts have in common. `prompt`: that of a first attempt, whose tokens all
    sequences of the request share. `ending`: the tokens behind them in this sequence."""

    sequence: int
    prompt: Prompt
    ending: bytes = b""
    opening: tuple[int, ...] = ()  # see `GenerateRequest`
    max_attempts: int = 3  # only attempts that count, see `RetryBudget`

    @property
    def sampling(self) -> Sampling:
        return self.prompt.sampling

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt and the ending."""
        return (len(self.prompt.tokens) + len(self.ending)) // TOKEN_BYTES

    @property
    def num_scores(self) -> int:
        """Log-probabilities of the prompt that are asked for."""
        return self.sampling.num_prompt_scores(self.num_prompt_tokens)

    def prompt_after(self, output: list[int], timeout_s: float) -> Prompt:
        """Returns the prompt of an attempt that goes on after these output tokens, of earlier attempts or of
        the opening."""
        prompt = self.prompt
        if output and self.sampling.prompt_logprobs is not None:  # the scores were delivered with the first token
            prompt = replace(prompt, sampling=replace(self.sampling, prompt_logprobs=None))
        tokens = b"".join((prompt.tokens, self.ending, pack_tokens(output))) if output or self.ending else prompt.tokens
        return replace(prompt, tokens=tokens, num_output=len(output), timeout_s=timeout_s)


# -- events from placement --------------------------------------------------------------------------------------------


class WorkersAssigned(msgspec.Struct, frozen=True):
    """At least one worker is set. Without `prefill`, `decode` computes the prompt itself.

    `timeout_s` is the rest of the request's deadline. `output` are the tokens delivered by earlier attempts: this
    attempt computes them again as a part of the prompt.
    """

    prefill: PeerRef | None
    decode: PeerRef | None
    timeout_s: float
    output: list[int] = []


class PlacementFailed(msgspec.Struct, frozen=True):
    """No worker became ready in time, or none of the lost workers came back."""

    reason: str
    kind: FailureKind = FailureKind.NO_WORKER


class DecodeChosen(msgspec.Struct, frozen=True):
    """Answers `FindDecode`. `decode` is None if there is no other worker.

    `returned`, only with None: the lost decode workers are ready again, but have forgotten this attempt.
    """

    decode: PeerRef | None
    returned: bool = False


# -- events from the token path ---------------------------------------------------------------------------------------


class TokensArrived(msgspec.Struct, frozen=True):
    """A worker of this attempt sent an entry. `are_delivered`: tokens or an end went to the client. `is_last`: with a
    finish reason."""

    from_prefill: bool
    are_delivered: bool
    is_last: bool


# -- events from workers ----------------------------------------------------------------------------------------------


class FromWorker(msgspec.Struct, frozen=True):
    """A worker's message about an attempt. `num_output` counts the tokens delivered so far, over all attempts."""

    worker: PeerRef
    attempt: int
    num_output: int
    body: NeedDecode | Failed


class WorkerLost(msgspec.Struct, frozen=True):
    """The link to this incarnation of a worker is gone, and the worker has forgotten this router's requests.

    `num_output` counts the tokens delivered so far, over all attempts. `is_alive`: messages
    between the two were lost, or the worker received nothing from this router, which was stopped or cut off.

    `was_silent`: the worker was silent already when the attempt was sent to it. `in_company`: other requests were lost
    with the worker, any of which may be the cause.
    """

    worker: PeerRef
    num_output: int
    reason: str
    is_alive: bool = False
    was_silent: bool = False
    in_company: bool = False


class WorkerBack(msgspec.Struct, frozen=True):
    """This incarnation of a lost worker has sent messages again."""

    worker: PeerRef


# -- events from the client -------------------------------------------------------------------------------------------


class StopMatched(msgspec.Struct, frozen=True):
    """The text has a stop string."""


class Cancelled(msgspec.Struct, frozen=True):
    """The client is gone, the deadline passed, or another sequence of the request failed."""

    reason: str


Event = (
    WorkersAssigned
    | PlacementFailed
    | DecodeChosen
    | TokensArrived
    | FromWorker
    | WorkerLost
    | WorkerBack
    | StopMatched
    | Cancelled
)

# -- instructions -----------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send this message about this attempt of the sequence."""

    worker: PeerRef
    attempt: int
    body: AnyBody


class FindPlacement(msgspec.Struct, frozen=True):
    """Choose workers for a new attempt after `delay_s`, then report `WorkersAssigned` or `PlacementFailed`.

    Workers in `avoid` are chosen only if there are no others. `is_suspect`: several workers were lost with the
    sequence. `hands_over`: False if decode must compute the prompt alone, since a handoff has failed.
    """

    attempt: int
    cause: str
    avoid: frozenset[str]
    delay_s: float = 0.0
    is_suspect: bool = False
    hands_over: bool = True


class AwaitLostWorkers(msgspec.Struct, frozen=True):
    """The retry budget is exhausted, but attempts were lost with workers that may only be stopped.

    Report `WorkerBack` if one of them sends messages again, or `PlacementFailed` after a while.
    """

    cause: str


class FindDecode(msgspec.Struct, frozen=True):
    """Choose another decode worker for the present prefill worker, then report `DecodeChosen`.

    `excluded` has ids and incarnations.
    """

    cause: str
    excluded: frozenset[WorkerKey]


class Ended(msgspec.Struct, frozen=True):
    """The sequence is over. `error`, a text for people, and `kind` are set if it failed.

    `finish` is set if all tokens were delivered but their finish reason was lost with the worker: deliver it.
    """

    error: str | None
    finish: FinishReason | None = None
    kind: FailureKind | None = None


Instruction = Send | FindPlacement | AwaitLostWorkers | FindDecode | Ended
