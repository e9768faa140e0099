"""Beam search over candidates that others compute: which continuations live, which are done, and when it ends. Pure.

The rules are those of `transformers`' beam search (`GenerationMixin._beam_search`, version 5), so that results are the
same: scores are sums of float32 log-probabilities; of the best continuations of all beams, those that end (an end
token, or the length) among the first `width` compete for the `width` places of finished ones, by their score divided
by length ** length_penalty; the first `width` that do not end live on.

1. LIVE  `parents` and `tokens` say what each beam is: which beam of the step before it follows, and with which token.
2. DONE  no beam lives any more, and `results` are final. Terminal.

A step costs O(width * candidates), whatever the length: texts are kept as links to the step before and read back at
the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.protocol.sampling import BeamSpec, FinishReason, ScoredText
from kvrelay.step.batch import Candidates


@dataclass(frozen=True, slots=True)
class _Step:
    """The beams after a step: `parents` are indices of beams of the step before."""

    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    """A finished text: what beam `parent` was after `num_tokens` - 1 tokens, and `token`."""

    score: float
    logprob: float
    num_tokens: int
    parent: int
    token: int
    finish: FinishReason


def num_candidates(width: int, num_ends: int) -> int:
    """Number of continuations to consider: enough that at least `width` of them continue, unless the length limit ends
    all."""
    return max(2, 1 + num_ends) * width


class BeamSearch:
    """Starts with one beam without tokens. `max_tokens`: the longest output."""

    def __init__(self, spec: BeamSpec, ends: Collection[int], max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"a beam search of {max_tokens} tokens")
        self.spec = spec
        self.num_tokens = 0
        self.is_done = False
        self.num_candidates = num_candidates(spec.width, len(set(ends)))
        self._ends = np.array(sorted(set(ends)), np.int64)
        self._max_tokens = max_tokens
        self._scores = np.zeros(1, np.float32)
        self._steps: list[_Step] = []
        self._finished: list[_Hypothesis] = []  # best first, at most `width`

    @property
    def num_live(self) -> int:
        """Number of beams that continue."""
        return 0 if self.is_done else len(self._scores)

    @property
    def parents(self) -> NDArray[np.int64]:
        """For each live beam, the index of the beam of the step before that it follows."""
        return self._steps[-1].parents

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The newest token of each live beam."""
        return self._steps[-1].tokens

    @staticmethod
    def check(candidates: Candidates) -> None:
        """Raises ValueError if these are no candidates: none at all, or without a log-probability for each."""
        num_tokens, logprobs = len(candidates.token_ids), candidates.logprobs
        if not num_tokens or len(logprobs) != num_tokens or np.isnan(logprobs).any():
            raise ValueError(f"{num_tokens} candidates with {len(logprobs)} log-probabilities, or one that is NaN")

    def advance(self, rows: Sequence[Candidates]) -> None:
        """A step: the best continuations of each live beam, in the order of the beams.

        Raises:
            ValueError: it is done, or there are not as many rows as live beams, or one has no candidates.
        """
        if self.is_done or len(rows) != self.num_live or not all(len(row.token_ids) for row in rows):
            raise ValueError(f"{len(rows)} rows of candidates for {self.num_live} live beams, or an empty one")
        tokens = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
        parents = np.repeat(np.arange(len(rows)), [len(row.token_ids) for row in rows])
        logprobs = np.concatenate(
            [row.logprobs.astype(np.float32) + score for row, score in zip(rows, self._scores, strict=True)]
        )
        # Equal ones by beam, then by token: where torch.topk leaves the order open, this is its order of positions.
        best = np.lexsort((tokens, parents, -logprobs))[: self.num_candidates]
        tokens, parents, logprobs = tokens[best], parents[best], logprobs[best]
        self.num_tokens += 1
        at_length = self.num_tokens >= self._max_tokens
        is_end = np.isin(tokens, self._ends)
        ends_here = is_end | at_length
        self._finish(tokens, parents, logprobs, ends_here, is_end)
        live = np.flatnonzero(~ends_here)[: self.spec.width]
        self._scores = logprobs[live]
        self._steps.append(_Step(parents[live], tokens[live]))
        self.is_done = not len(live) or not self._goes_on()

    def results(self) -> list[ScoredText]:
        """The best finished texts, best first, at most `num_returned`. O(their tokens)."""
        return [self._result(hypothesis) for hypothesis in self._finished[: self.spec.num_returned]]

    def _finish(
        self,
        tokens: NDArray[np.int64],
        parents: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        ends_here: NDArray[np.bool_],
        is_end: NDArray[np.bool_],
    ) -> None:
        width = self.spec.width
        new = np.flatnonzero(ends_here[:width])
        if not len(new):
            return
        scores = logprobs[new] / np.float32(float(self.num_tokens) ** self.spec.length_penalty)
        for rank, score in zip(new.tolist(), scores.tolist(), strict=True):
            finish = FinishReason.STOP_TOKEN if is_end[rank] else FinishReason.LENGTH
            self._finished.append(
                _Hypothesis(
                    score, float(logprobs[rank]), self.num_tokens, int(parents[rank]), int(tokens[rank]), finish
                )
            )
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: equal ones in the order of their coming
        del self._finished[width:]

    def _goes_on(self) -> bool:
        """Returns whether a live beam may still become better than the worst finished one, by the requested rule."""
        if len(self._finished) < self.spec.width:
            return True
        if self.spec.early_stopping is True:
            return False
        penalty = self.spec.length_penalty
        longest = self.spec.early_stopping == "never" and penalty > 0
        length = self._max_tokens if longest else self.num_tokens
        best_possible = self._scores[0] / np.float32(float(length) ** penalty)
        return bool(best_possible > np.float32(self._finished[-1].score))

    def _result(self, hypothesis: _Hypothesis) -> ScoredText:
        token_ids = [hypothesis.token]
        beam = hypothesis.parent
        for step in reversed(self._steps[: hypothesis.num_tokens - 1]):
            token_ids.append(int(step.tokens[beam]))
            beam = int(step.parents[beam])
        token_ids.reverse()
        return ScoredText(token_ids, hypothesis.score, hypothesis.logprob, hypothesis.finish)
