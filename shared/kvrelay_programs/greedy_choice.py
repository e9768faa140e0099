"""A choice by the likeliest next tokens, for endpoints that do not score prompts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvrelay_programs.errors import EndpointError
from kvrelay_programs.results import ChoiceScore, Generated, Selected

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
