"""Chooses the most likely of several texts: from the log-probabilities of their tokens or, for endpoints that do not
score prompts, by the likeliest next tokens.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from kvrelay_programs.errors import EndpointError
from kvrelay_programs.results import ChoiceScore, Generated, Selected


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


TopTokens = Mapping[str, float]


async def greedy_choice(choices: Sequence[str], top_tokens: Callable[[str], Awaitable[TopTokens]]) -> Selected:
    """Follows, from token to token, the likeliest one that continues a choice, until one choice is left.

    `top_tokens` gives the likeliest tokens behind the text so far and a common beginning of choices, with their
    log-probabilities. A choice's `total` counts its tokens up to the one that ruled it out: -inf if that was not among
    the likeliest. No choice may begin another. Raises EndpointError if no likely token continues a choice.
    """
    totals = dict.fromkeys(choices, 0.0)
    counts = dict.fromkeys(choices, 0)
    left, begin = list(choices), ""
    while len(left) > 1:
        tokens = await top_tokens(begin)
        likeliest = {choice: _likeliest(choice[len(begin) :], tokens) for choice in left}
        token, logprob = max(likeliest.values(), key=lambda each: each[1])
        if logprob == -math.inf:
            raise EndpointError(
                f"none of the {len(tokens)} likeliest tokens behind {begin!r} begins a choice; "
                "tell the model the choices, or use gen(choices=...)"
            )
        for choice in left:
            totals[choice] += likeliest[choice][1]
            counts[choice] += 1
        begin += token
        left = [choice for choice in left if choice.startswith(begin)]
    scores = tuple(ChoiceScore(choice, totals[choice], counts[choice], totals[choice]) for choice in choices)
    return Selected(left[0], scores)


def top_tokens_of(answer: Generated, *, is_chat: bool) -> dict[str, float]:
    """The alternatives of an answer's only token. Raises EndpointError if the endpoint gave none."""
    try:
        if is_chat:
            entries = answer.logprobs["content"][0]["top_logprobs"]
            return {entry["token"]: float(entry["logprob"]) for entry in entries}
        return {token: float(logprob) for token, logprob in answer.logprobs["top_logprobs"][0].items()}
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise EndpointError(
            "the endpoint neither scores prompts nor gives log-probabilities, so it cannot select"
        ) from (error)


def _likeliest(rest: str, tokens: TopTokens) -> tuple[str, float]:
    """The likeliest token that begins `rest`; -inf if none does."""
    found = [(token, logprob) for token, logprob in tokens.items() if token and rest.startswith(token)]
    return max(found, key=lambda each: each[1], default=("", -math.inf))
