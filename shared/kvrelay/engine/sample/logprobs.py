"""Log-probabilities of the model's own distribution, before temperature, penalties and truncation.

They are those of sampled tokens, and of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.run.device import HostCopy, to_device, to_host
from kvrelay.engine.run.step_forward import PromptPart, StepForward, positions_to_score
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import RowsFailed, WorkerRow

_NOTHING: Mapping[int, NDArray[np.int64]] = MappingProxyType({})


class BadLogits(RowsFailed):
    """The model computed logits without a finite maximum (NaN or infinity) for the sequences in `keys`.

    No token was sampled or recorded. The step may be run again without these sequences.
    """

    kind = FailureKind.BAD_LOGITS

    def __init__(self, keys: Sequence[SequenceKey]) -> None:
        super().__init__(f"the model's logits are not finite for {', '.join(map(str, keys))}", keys)


def check_finite(keys: Sequence[SequenceKey], peaks: NDArray[np.float64]) -> None:
    """Raises BadLogits for rows whose greatest logit, `[rows]`, is not finite."""
    finite = np.isfinite(peaks)
    if not finite.all():
        raise BadLogits([key for key, fine in zip(keys, finite.tolist(), strict=True) if not fine])


def best_tokens(logprobs: torch.Tensor, num_wanted: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and values `[rows, most wanted]` of each row's best tokens, best first. `logprobs` is `[rows, vocab]`.

    On a CPU equal ones are in the order of their ids, and the first `num_wanted` `[rows]` are those of the lowest ids.
    torch's choice among equal ones depends on how many are asked for. On a GPU it stands: to search again is to wait.
    """
    most = min(int(num_wanted.max(initial=0)), logprobs.shape[1])
    if logprobs.device.type != "cpu" or not most:
        values, ids = torch.topk(logprobs, most, dim=-1)
        return ids, values
    # One more than wanted shows whether the last wanted one ties.
    values, ids = torch.topk(logprobs, min(most + 1, logprobs.shape[1]), dim=-1)
    found, order = values.numpy(), np.lexsort((ids.numpy(), -values.numpy()), axis=-1)
    found, found_ids = (np.take_along_axis(each, order, axis=-1) for each in (found, ids.numpy()))
    if most < logprobs.shape[1]:
        edges = np.take_along_axis(found, np.maximum(num_wanted, 1)[:, None] - 1, axis=-1)[:, 0]
        for row in np.flatnonzero((num_wanted > 0) & (edges == found[:, -1])):
            above, wanted = np.count_nonzero(found[row] > edges[row]), num_wanted[row]
            equal = np.flatnonzero(logprobs[row].numpy() == edges[row])
            found_ids[row, above:wanted] = equal[: wanted - above]
    return torch.from_numpy(found_ids[:, :most]), torch.from_numpy(found[:, :most])


class PendingLogprobs:
    """The log-probability of one token per row and of the most likely tokens, launched on the device without a wait."""

    def __init__(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        num_top: NDArray[np.int64],
        *,
        keep: bool = False,
        wanted_ids: Mapping[int, NDArray[np.int64]] = _NOTHING,
    ) -> None:
        """`logits` is `[rows, vocab]` of any float type, `token_ids` is `[rows]` on the same device, `num_top` is
        `[rows]`. `wanted_ids`, by row: tokens in place of the most likely ones.

        With `keep`, all log-probabilities stay on the device, so that `read` can be called with other tokens.
        """
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
        self._num_top, self._wanted_ids = num_top.copy(), wanted_ids
        self._num_top[[*wanted_ids]] = 0
        top_ids, top_values = best_tokens(logprobs, self._num_top)
        ids = np.zeros((len(num_top), max(map(len, wanted_ids.values()), default=0)), np.int64)
        for row, row_ids in wanted_ids.items():
            ids[row, : len(row_ids)] = row_ids
        wanted = [logprobs.gather(1, to_device(ids, logits.device))] if wanted_ids else []
        self._copy = HostCopy(chosen, top_ids, top_values, *wanted)
        self._kept = logprobs if keep else None

    def read(self, token_ids: NDArray[np.int64], changed: NDArray[np.int64] | None = None) -> list[TokenLogprobs]:
        """Waits, and returns the entries. `token_ids` `[rows]` are the tokens given at the start, except in the rows
        `changed`. Raises ValueError if tokens have changed, and nothing was kept."""
        chosen, ids, values, *wanted = self._copy.read()
        if changed is not None and len(changed):
            if self._kept is None:
                raise ValueError("log-probabilities of other tokens were not kept")
            where = to_device(changed, self._kept.device), to_device(token_ids[changed], self._kept.device)
            chosen[changed] = to_host(self._kept[where])[0]
        columns = token_ids, chosen, ids.astype(np.int64), values, self._num_top
        entries = [
            TokenLogprobs(token_id, logprob, row_ids[:count], row_values[:count])
            for token_id, logprob, row_ids, row_values, count in zip(*(each.tolist() for each in columns), strict=True)
        ]
        for row, row_ids in self._wanted_ids.items():
            row_values = wanted[0][row, : len(row_ids)].tolist()
            entries[row] = TokenLogprobs(entries[row].token_id, entries[row].logprob, row_ids.tolist(), row_values)
        return entries


def token_logprobs(
    logits: torch.Tensor, token_ids: NDArray[np.int64], num_top: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Computes the same and waits. `token_ids` is an array of the host."""
    return PendingLogprobs(logits, to_device(token_ids, logits.device), num_top).read(token_ids)


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
