"""Prompts for which log-probabilities are requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.batch import WorkerRow
from kvrelay.engine.device import to_host
from kvrelay.engine.pending_logprobs import token_logprobs
from kvrelay.engine.pending_tokens import BadLogits
from kvrelay.engine.step_forward import StepForward
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey


@dataclass(frozen=True, slots=True)
class _ScoredPrompt:
    token_ids: NDArray[np.int64]
    num_top: int


class ScoredPrompts:
    """The prompts of a runner's sequences that are scored."""

    def __init__(self, lock: Lock) -> None:
        """`lock` is the runner's. `score` takes it; callers of the other methods hold it."""
        self._lock = lock
        self._prompts: dict[SequenceKey, _ScoredPrompt] = {}

    def add(self, key: SequenceKey, token_ids: Sequence[int], num_top: int) -> None:
        """Adds a prompt, if its key is new. Each position gets its token's log-probability and `num_top` others."""
        if key not in self._prompts:
            self._prompts[key] = _ScoredPrompt(np.asarray(token_ids, np.int64), num_top)

    def drop(self, key: SequenceKey) -> None:
        """Drops a prompt. Unknown keys are ignored."""
        self._prompts.pop(key, None)

    def num_scored(self, row: WorkerRow) -> int:
        """The number of the row's first positions whose next token is of a prompt that is scored."""
        prompt = self._prompts.get(row.key)
        if prompt is None:
            return 0
        return max(0, min(len(row.token_ids), len(prompt.token_ids) - row.position - 1))

    def score(
        self, forward: StepForward, logits_of: Callable[[torch.Tensor], torch.Tensor], *, as_resolved: bool
    ) -> dict[int, list[TokenLogprobs]]:
        """The log-probabilities of the prompt tokens that follow each of the row's positions, by row of the step.

        `as_resolved`: other ranks compute the head for each row's `num_scored` positions, so this one does too, also if
        the sequence was dropped since.

        Raises BadLogits.
        """
        scored: dict[int, tuple[int, _ScoredPrompt | None]] = {}
        with self._lock:
            for place, row in enumerate(forward.rows):
                if num_scored := row.num_scored if as_resolved else self.num_scored(row):
                    scored[place] = num_scored, self._prompts.get(row.key)
        results: dict[int, list[TokenLogprobs]] = {}
        for place, (num_scored, prompt) in scored.items():
            row, entries = forward.rows[place], list[TokenLogprobs]()
            for at, hidden in forward.prompt_slices(place, num_scored):
                logits = logits_of(hidden)
                if prompt is None:
                    continue
                if not np.isfinite(to_host(logits.amax(dim=-1))[0]).all():
                    raise BadLogits([row.key])
                first = row.position + 1 + at
                part = prompt.token_ids[first : first + len(hidden)]
                entries += token_logprobs(logits, part, np.full(len(part), prompt.num_top, np.int64))
            if prompt is not None:
                results[place] = entries
        return results
