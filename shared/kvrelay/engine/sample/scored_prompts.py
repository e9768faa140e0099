"""Prompts for which log-probabilities are requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.run.device import to_host
from kvrelay.engine.run.step_forward import PromptPart, StepForward, positions_to_score
from kvrelay.engine.sample.pending_logprobs import token_logprobs
from kvrelay.engine.sample.pending_tokens import BadLogits
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import WorkerRow


@dataclass(frozen=True, slots=True)
class _ScoredPrompt:
    token_ids: NDArray[np.int64]  # those that are scored
    num_top: int
    first: int  # position of the first of them

    @property
    def end(self) -> int:
        """The number of the prompt's tokens."""
        return self.first + len(self.token_ids)


class ScoredPrompts:
    """The prompts of a runner's sequences that are scored."""

    def __init__(self, lock: Lock) -> None:
        """`lock` is the runner's. `score` takes it; callers of the other methods hold it."""
        self._lock = lock
        self._prompts: dict[SequenceKey, _ScoredPrompt] = {}

    def add(self, key: SequenceKey, token_ids: Sequence[int], num_top: int, first: int) -> None:
        """Adds a prompt, if its key is new. Each token from position `first` on (1 or more) gets its log-probability
        and `num_top` others."""
        if key not in self._prompts:
            self._prompts[key] = _ScoredPrompt(np.asarray(token_ids[first:], np.int64), num_top, first)

    def drop(self, key: SequenceKey) -> None:
        """Drops a prompt. Unknown keys are ignored."""
        self._prompts.pop(key, None)

    def scored_positions(self, row: WorkerRow) -> range:
        """Numbers of the row's positions whose next token is scored."""
        prompt = self._prompts.get(row.key)
        if prompt is None:
            return range(0)
        first = max(0, prompt.first - 1 - row.position)
        return range(first, max(first, min(len(row.token_ids), prompt.end - row.position - 1)))

    def score(
        self, forward: StepForward, logits_of: Callable[[torch.Tensor], torch.Tensor], *, as_resolved: bool
    ) -> dict[int, list[TokenLogprobs]]:
        """The log-probabilities of the prompt tokens that follow each of the row's positions, by row of the step.

        `as_resolved`: other ranks compute the head for each row's scored positions, so this one does too, also if
        the sequence was dropped since.

        Raises BadLogits.
        """
        rows = forward.rows
        with self._lock:
            if as_resolved:
                scored = positions_to_score(rows)
            else:
                found = ((place, self.scored_positions(row)) for place, row in enumerate(rows))
                scored = {place: positions for place, positions in found if positions}
            prompts = {place: self._prompts.get(rows[place].key) for place in scored}
        results: dict[int, list[TokenLogprobs]] = {place: [] for place, prompt in prompts.items() if prompt is not None}
        for hidden, parts in forward.prompt_groups(scored):
            logits = logits_of(hidden)
            wanted: list[tuple[PromptPart, _ScoredPrompt, slice]] = []
            end = 0
            for part in parts:
                start, end = end, end + part.count
                if (prompt := prompts[part.place]) is not None:
                    wanted.append((part, prompt, slice(start, end)))
            if not wanted:
                continue
            finite = np.isfinite(to_host(logits.amax(dim=-1))[0])
            if bad := {rows[part.place].key: None for part, _, at in wanted if not finite[at].all()}:
                raise BadLogits(list(bad))
            token_ids, num_top = np.zeros(end, np.int64), np.zeros(end, np.int64)
            for part, prompt, at in wanted:
                first = rows[part.place].position + 1 + part.first - prompt.first
                token_ids[at] = prompt.token_ids[first : first + part.count]
                num_top[at] = prompt.num_top
            entries = token_logprobs(logits, token_ids, num_top)
            for part, _, at in wanted:
                results[part.place] += entries[at]
        return results
