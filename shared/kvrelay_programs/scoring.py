"""Which of several texts is the most likely, from the log-probabilities of their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay_programs.results import ChoiceScore, Selected


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens and the log-probabilities of the last of them, or all, each given the tokens before."""

    token_ids: list[int]
    logprobs: list[float]

    def behind(self, first: int) -> ScoredTokens:
        """Tokens from position `first` on. Raises ValueError if one of them has no log-probability."""
        num_unscored = len(self.token_ids) - len(self.logprobs)
        cut = ScoredTokens(self.token_ids[first:], self.logprobs[max(0, first - num_unscored) :])
        if first < num_unscored or any(math.isnan(logprob) for logprob in cut.logprobs):
            raise ValueError("a token has no log-probability")
        return cut


def best_choice(
    choices: Sequence[str],
    scored: Sequence[ScoredTokens],
    *,
    by_tokens: bool,
    unconditional: Sequence[ScoredTokens] | None = None,
) -> Selected:
    """The choice with the highest score, the first of equals.

    `by_tokens` divides by the number of tokens; `unconditional` are the scores of the same choices behind another text,
    whose sums are subtracted.
    """
    scores = []
    for position, (choice, tokens) in enumerate(zip(choices, scored, strict=True)):
        total = math.fsum(tokens.logprobs)
        score = total
        if by_tokens:
            score = total / max(len(tokens.logprobs), 1)
        elif unconditional is not None:
            score = total - math.fsum(unconditional[position].logprobs)
        scores.append(ChoiceScore(choice, total, len(tokens.logprobs), score))
    best = max(scores, key=lambda each: each.score)
    return Selected(best.choice, tuple(scores))
