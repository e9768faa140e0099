"""Values of generation calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Generated:
    """Output of a `gen`. `usage` and `logprobs` have the endpoint's form; `reasoning` stands before the text."""

    text: str
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    logprobs: Any = None
    reasoning: str | None = None


@dataclass(slots=True)
class Usage:
    """What a run has asked of the endpoint so far, in calls and tokens. `cached_tokens` are those of prompts that the
    endpoint found in its cache; 0 if it does not say.
    """

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: Mapping[str, Any] | None) -> None:
        """Adds a call with the usage of its answer."""
        self.calls += 1
        if usage is not None:
            self.prompt_tokens += usage.get("prompt_tokens") or 0
            self.completion_tokens += usage.get("completion_tokens") or 0
            self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """Log-likelihood of a choice behind the text before it. `score` is `total` after normalization."""

    choice: str
    total: float
    num_tokens: int
    score: float


@dataclass(frozen=True, slots=True)
class Selected:
    """Result of a `select`: the choice with the highest score, and all scores in the order of the choices."""

    text: str
    scores: tuple[ChoiceScore, ...]
