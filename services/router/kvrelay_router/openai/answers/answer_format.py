"""What completions and chat completions have in common when they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvrelay.protocol.sampling import BeamResult, TokenLogprobs
from kvrelay_router.openai.answers.choice import Choice, ChoiceOutput
from kvrelay_router.openai.generation import PromptRun, Step


@dataclass(slots=True)
class Collected:
    """All outputs of one choice."""

    run: PromptRun
    choice: Choice
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    stop_reason: str | int | None = None
    beam: BeamResult | None = None

    def add(self, output: ChoiceOutput) -> None:
        """Takes the next output."""
        self.texts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.offsets += output.offsets
        if output.stop_reason is not None:
            self.stop_reason = output.stop_reason
        if output.beam is not None:
            self.beam = output.beam

    def whole(self) -> ChoiceOutput:
        """All of it as one output."""
        return ChoiceOutput(
            "".join(self.texts),
            self.token_ids,
            self.logprobs,
            self.offsets,
            self.choice.finish_reason,
            self.stop_reason,
            self.beam,
        )


class AnswerFormat(Protocol):
    """How one kind of answer is written, in whole or as a stream."""

    def chunk(self, step: Step) -> bytes:
        """The stream's events for a step; empty if nothing is to be said yet."""
        ...

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and after the text, a JSON string, of an event of this choice that has begun and tells
        nothing else. None: each of its events tells more."""
        ...

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The event that ends a stream with its usage."""
        ...

    def whole(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain answer."""
        ...


def beam_scores(output: ChoiceOutput) -> dict[str, Any]:
    """What a choice that a beam search found says beside its text."""
    if output.beam is None:
        return {}
    return {"score": output.beam.score, "cumulative_logprob": output.beam.logprob}


def usage_of(runs: Sequence[PromptRun]) -> dict[str, Any]:
    """Tokens of all prompts (each once) and of all sequences that were drawn."""
    prompt_tokens = sum(len(run.request.prompt_ids) for run in runs)
    completion_tokens = sum(choice.num_tokens for run in runs for choice in run.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(run.cached_tokens for run in runs)},
    }
