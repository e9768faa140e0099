"""Results of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.protocol.sampling import ScoredText, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.text.choice import Choice, SequenceDelta


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


@dataclass(slots=True)
class EngineRequest:
    """`choices` are its texts; each of `keys` is a sequence, one for each text or one for a whole beam search."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    choices: list[Choice]
    keys: list[SequenceKey]
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_ended: int = 0

    @property
    def has_ended(self) -> bool:
        return self.num_ended == len(self.choices)

    def take(self, output: SequenceOutput) -> list[StepOutput]:
        """Returns what a step brought, as text."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.sequence.num_cached_tokens
        if output.sequence.key == self.keys[0]:  # every sample scores the same prompt
            self.prompt_logprobs += output.prompt_logprobs
        if output.texts:
            return [self._scored(*each) for each in zip(self.choices, output.texts, strict=False)]
        if not output.token_ids and output.finish is None:
            return []
        choice = self.choices[output.sequence.key[2]]
        delta = SequenceDelta(choice.index, list(output.token_ids), list(output.logprobs), finish=output.finish)
        choice.feed(delta)
        return [self._told(choice)]

    def recomputed(self, key: SequenceKey) -> None:
        """The sequence's prompt is computed again from its beginning, and so are its log-probabilities."""
        if key == self.keys[0]:
            self.prompt_logprobs.clear()

    def ended(self, key: SequenceKey, reason: str, error: str = "") -> list[StepOutput]:
        """The texts of a sequence end without being finished."""
        choices = [self.choices[key[2]]] if len(self.keys) == len(self.choices) else self.choices
        open_choices = [choice for choice in choices if choice.finish_reason is None]
        for choice in open_choices:
            choice.finish_reason = reason
        return [self._told(choice, error) for choice in open_choices]

    def output(self, texts: Sequence[CompletionOutput]) -> RequestOutput:
        """The answer, of the texts that were collected. A text that was cut short says why."""
        for choice, text in zip(self.choices, texts, strict=True):
            text.finish_reason = choice.finish_reason
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        usage = Usage(len(self.prompt_ids), num_tokens, self.num_cached_tokens or 0)
        return RequestOutput(self.request_id, self.prompt, self.prompt_ids, self.prompt_logprobs, list(texts), usage)

    def _scored(self, choice: Choice, text: ScoredText) -> StepOutput:
        choice.feed_scored(text)
        return self._told(choice, beam_score=text.score)

    def _told(self, choice: Choice, error: str = "", beam_score: float | None = None) -> StepOutput:
        self.num_ended += choice.finish_reason is not None
        records = choice.take_records()
        return StepOutput(
            self.request_id, choice.index, choice.take_text(), records.token_ids, records.logprobs,
            choice.finish_reason, choice.stop_reason, error, beam_score,
        )  # fmt: skip
