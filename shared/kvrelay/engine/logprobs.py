"""Log-probabilities of the model's own distribution, before temperature, penalties and truncation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.device import rows_to_host, to_device
from kvrelay.protocol.sampling import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: NDArray[np.int64], num_top: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """The log-probability of one token per row, and of the `num_top[row]` most likely ones.

    `logits` is `[rows, vocab]` of any float type, `token_ids` and `num_top` are `[rows]`.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, to_device(token_ids, logits.device)[:, None])[:, 0]
    most = min(int(num_top.max(initial=0)), logits.shape[-1])
    top = torch.topk(logprobs, most, dim=-1)
    drawn, ids, values = rows_to_host(chosen, top.indices, top.values)
    columns = token_ids, drawn, ids.astype(np.int64), values, num_top
    return [
        TokenLogprobs(token_id, logprob, row_ids[:count], row_values[:count])
        for token_id, logprob, row_ids, row_values, count in zip(*(each.tolist() for each in columns), strict=True)
    ]
