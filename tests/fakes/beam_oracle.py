"""Beam search as slowly and plainly as it can be written: whole texts, all continuations, sorted lists."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from kvrelay.protocol.sampling import BeamSpec, Sampling
from kvrelay.step.batch import Candidates
from tests.fakes.hash_runner import EOS_TOKEN_ID, VOCAB_SIZE, next_candidates


@dataclass(frozen=True)
class Text:
    token_ids: tuple[int, ...]
    logprob: np.float32
    score: float


def search(
    spec: BeamSpec, ends: Collection[int], max_tokens: int, follow: Callable[[tuple[int, ...]], Candidates]
) -> list[Text]:
    """`follow` gives the continuations of an output so far."""
    live: list[tuple[tuple[int, ...], np.float32]] = [((), np.float32(0))]
    finished: list[Text] = []
    for length in range(1, max_tokens + 1):
        everything = []
        for beam, (tokens, logprob) in enumerate(live):
            given = follow(tokens)
            for token, value in zip(given.token_ids.tolist(), given.logprobs, strict=True):
                everything.append((-(value + logprob), beam, token, (*tokens, token)))
        everything.sort()
        live = []
        for rank, (minus, _, token, tokens) in enumerate(everything):
            if token not in ends and length < max_tokens:
                if len(live) < spec.width:
                    live.append((tokens, -minus))
            elif rank < spec.width:
                finished.append(Text(tokens, -minus, float(-minus / np.float32(float(length) ** spec.length_penalty))))
        finished = sorted(finished, key=lambda text: -text.score)[: spec.width]
        if len(finished) == spec.width and live:
            if spec.early_stopping is True:
                break
            grows = spec.early_stopping == "never" and spec.length_penalty > 0
            best = live[0][1] / np.float32(float(max_tokens if grows else length) ** spec.length_penalty)
            if not best > finished[-1].score:
                break
        if not live:
            break
    return finished[: spec.num_returned]


def expected_beams(prompt: list[int], sampling: Sampling, max_model_len: int) -> list[Text]:
    """What the hash model's workers must find."""
    assert sampling.beams is not None
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS_TOKEN_ID,))}
    count = min(VOCAB_SIZE - 1, max(2, 1 + len(ends)) * sampling.beams.width)

    def follow(tokens: tuple[int, ...]) -> Candidates:
        return next_candidates(np.array([*prompt, *tokens], np.int32), sampling, count)

    return search(sampling.beams, ends, min(sampling.max_tokens, max_model_len - len(prompt)), follow)
