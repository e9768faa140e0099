"""The answer of a selection: the scores of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from kvrelay.protocol.packed_logprobs import own_logprobs
from kvrelay.text.choice import Choice
from kvrelay_router.openai.answers.answer_format import DocumentFormat
from kvrelay_router.openai.answers.logprob_format import LOWEST
from kvrelay_router.openai.generation import PromptRun

Normalization = Literal["tokens", "none", "unconditional"]


class ScoredGroup(msgspec.Struct, frozen=True):
    """The runs of all choices behind one text. Their choices are numbered from `first_index` on.

    The scores of all begin at position `first_scored`. The first one has those of the prompt, which are scores of the
    others too.
    """

    runs: Sequence[PromptRun]
    first_index: int
    num_choices: int
    first_scored: int

    @property
    def num_shared_scores(self) -> int:
        """Scored tokens that all choices begin with."""
        return max(0, len(self.runs[0].request.prompt_ids) - self.first_scored)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, which is counted once, and of all endings."""
        num_repeated = (len(self.runs) - 1) * len(self.runs[0].request.prompt_ids)
        return sum(run.request.num_prompt_tokens for run in self.runs) - num_repeated


class SelectAnswer(DocumentFormat):
    """One JSON object. With unconditional scores, `unconditional` are the same choices behind another text."""

    def __init__(
        self, head: dict[str, Any], normalization: Normalization, group: ScoredGroup, unconditional: ScoredGroup | None
    ) -> None:
        self._head, self._normalization = head, normalization
        self._group, self._unconditional = group, unconditional
        self._sums: dict[int, float] = {}
        self._shared: dict[int, float] = {}  # sums of what all choices of a group have in common

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        """Keeps the sum of the log-probabilities that end a sequence."""
        group = self._group if choice.index < self._group.num_choices else self._unconditional
        assert group is not None
        logprobs, run.prompt_logprobs = own_logprobs(run.prompt_logprobs), ()
        logprobs = np.maximum(logprobs, LOWEST)
        num_shared = 0
        if choice.index == group.first_index:
            num_shared = group.num_shared_scores
            self._shared[group.first_index] = float(logprobs[:num_shared].sum())
        self._sums[choice.index] = float(logprobs[num_shared:].sum())
        return b""

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        totals = self._totals(self._group)
        others = None if self._unconditional is None else self._totals(self._unconditional)
        scores: list[dict[str, Any]] = []
        for index, (total, num_tokens) in enumerate(totals):
            score = total / num_tokens if self._normalization == "tokens" else total
            fields: dict[str, Any] = {"index": index, "score": score, "logprob": total, "num_tokens": num_tokens}
            if others is not None:
                fields["unconditional_logprob"] = others[index][0]
                fields["score"] = total - others[index][0]
            scores.append(fields)
        best = max(scores, key=lambda each: float(each["score"]))
        return {**self._head, "selected": best["index"], "scores": scores, "usage": usage | self._usage()}

    def _totals(self, group: ScoredGroup) -> list[tuple[float, int]]:
        """Each choice's log-likelihood and number of tokens."""
        shared, index = self._shared[group.first_index], group.first_index
        totals: list[tuple[float, int]] = []
        for run in group.runs:
            num_before = len(run.request.prompt_ids) - group.first_scored
            for ending in run.request.endings:
                totals.append((shared + self._sums[index], num_before + len(ending.token_ids)))
                index += 1
        return totals

    def _usage(self) -> dict[str, Any]:
        """Each text is counted once, and not for each of its choices."""
        groups = [group for group in (self._group, self._unconditional) if group is not None]
        prompt_tokens = sum(group.num_prompt_tokens for group in groups)
        cached = sum(min(run.cached_tokens for run in group.runs) for group in groups)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
