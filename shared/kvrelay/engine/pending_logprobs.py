"""Log-probabilities of the model's own distribution, before temperature, penalties and truncation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.device import HostCopy, to_device, to_host
from kvrelay.protocol.sampling import TokenLogprobs


class PendingLogprobs:
    """The log-probability of one token per row and of the most likely tokens, launched on the device without a wait."""

    def __init__(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: NDArray[np.int64], *, keep: bool = False
    ) -> None:
        """`logits` is `[rows, vocab]` of any float type, `token_ids` is `[rows]` on the same device, `num_top` is
        `[rows]`.

        With `keep`, all log-probabilities stay on the device, so that `read` can be called with other tokens.
        """
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
        top = torch.topk(logprobs, min(int(num_top.max(initial=0)), logits.shape[-1]), dim=-1)
        self._num_top = num_top
        self._copy = HostCopy(chosen, top.indices, top.values)
        self._kept = logprobs if keep else None

    def read(self, token_ids: NDArray[np.int64], changed: NDArray[np.int64] | None = None) -> list[TokenLogprobs]:
        """Waits, and returns the entries. `token_ids` `[rows]` are the tokens given at the start, except in the rows
        `changed`.

        Raises:
            ValueError: tokens have changed, and nothing was kept.
        """
        chosen, ids, values = self._copy.read()
        if changed is not None and len(changed):
            if self._kept is None:
                raise ValueError("log-probabilities of other tokens were not kept")
            where = to_device(changed, self._kept.device), to_device(token_ids[changed], self._kept.device)
            chosen[changed] = to_host(self._kept[where])[0]
        columns = token_ids, chosen, ids.astype(np.int64), values, self._num_top
        return [
            TokenLogprobs(token_id, logprob, row_ids[:count], row_values[:count])
            for token_id, logprob, row_ids, row_values, count in zip(*(each.tolist() for each in columns), strict=True)
        ]


def token_logprobs(
    logits: torch.Tensor, token_ids: NDArray[np.int64], num_top: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Computes the same and waits. `token_ids` is an array of the host."""
    return PendingLogprobs(logits, to_device(token_ids, logits.device), num_top).read(token_ids)
