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
    first: int  # position of the first token that is scored


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
            self._prompts[key] = _ScoredPrompt(np.asarray(token_ids, np.int64), num_top, first)

    def drop(self, key: SequenceKey) -> None:
        """Drops a prompt. Unknown keys are ignored."""
        self._prompts.pop(key, None)

    def scored_positions(self, row: WorkerRow) -> range:
        """Numbers of the row's positions whose next token is scored."""
        prompt = self._prompts.get(row.key)
        if prompt is None:
            return range(0)
        first = max(0, prompt.first - 1 - row.position)
        return range(first, max(first, min(len(row.token_ids), len(prompt.token_ids) - row.position - 1)))

    def score(
        self, forward: StepForward, logits_of: Callable[[torch.Tensor], torch.Tensor], *, as_resolved: bool
    ) -> dict[int, list[TokenLogprobs]]:
        """The log-probabilities of the prompt tokens that follow each of the row's positions, by row of the step.

        `as_resolved`: other ranks compute the head for each row's scored positions, so this one does too, also if
        the sequence was dropped since.

        Raises BadLogits.
        """
        scored: dict[int, tuple[range, _ScoredPrompt | None]] = {}
        with self._lock:
            for place, row in enumerate(forward.rows):
                if as_resolved:
                    positions = range(row.first_scored, row.first_scored + row.num_scored)
                else:
                    positions = self.scored_positions(row)
                if positions:
                    scored[place] = positions, self._prompts.get(row.key)
        results: dict[int, list[TokenLogprobs]] = {}
        for place, (positions, prompt) in scored.items():
            row, entries = forward.rows[place], list[TokenLogprobs]()
            for at, hidden in forward.prompt_slices(place, positions.start, len(positions)):
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
