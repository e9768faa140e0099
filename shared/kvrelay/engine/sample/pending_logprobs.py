"""Log-probabilities of the model's own distribution, before temperature, penalties and truncation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.run.device import HostCopy, to_device, to_host
from kvrelay.protocol.sampling import TokenLogprobs

_NOTHING: Mapping[int, NDArray[np.int64]] = MappingProxyType({})


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
        top = torch.topk(logprobs, min(int(self._num_top.max(initial=0)), logits.shape[-1]), dim=-1)
        ids = np.zeros((len(num_top), max(map(len, wanted_ids.values()), default=0)), np.int64)
        for row, row_ids in wanted_ids.items():
            ids[row, : len(row_ids)] = row_ids
        wanted = [logprobs.gather(1, to_device(ids, logits.device))] if wanted_ids else []
        self._copy = HostCopy(chosen, top.indices, top.values, *wanted)
        self._kept = logprobs if keep else None

    def read(self, token_ids: NDArray[np.int64], changed: NDArray[np.int64] | None = None) -> list[TokenLogprobs]:
        """Waits, and returns the entries. `token_ids` `[rows]` are the tokens given at the start, except in the rows
        `changed`.

        Raises:
            ValueError: tokens have changed, and nothing was kept.
        """
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
