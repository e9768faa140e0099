"""Values of generation calls."""

from __future__ import annotations

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
