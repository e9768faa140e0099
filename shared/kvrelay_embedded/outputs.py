"""Results of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.protocol.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought one text of a request: tokens, and the text that cannot change any more.

    `finish_reason` is "stop", "length", "abort" or "error" with the last one of this text; `stop_reason` is the stop
    string or token that ended it, `error` the cause of a failure. A beam search gives one output for each of its
    texts, at its end.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""
    beam_score: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens`: tokens of the prompt whose KV was found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class CompletionOutput:
    """One text of a request. `logprobs` has an entry for each token if they were asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""
    beam_score: float | None = None

    def add(self, told: StepOutput) -> None:
        """Takes what the next step brought."""
        self.text += told.text
        self.token_ids += told.token_ids
        self.logprobs += told.logprobs
        self.finish_reason, self.stop_reason, self.error = told.finish_reason, told.stop_reason, told.error
        self.beam_score = told.beam_score

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the tokens; None without `logprobs`."""
        return sum(each.logprob for each in self.logprobs) if self.logprobs else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request that has ended. `prompt` is None for a prompt of token ids. `prompt_logprobs[i]` is that of prompt
    token i + 1, or i + `logprob_start_len` if the request has it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs]
    outputs: list[CompletionOutput]
    usage: Usage
