"""Log-probabilities of the model's own distribution, before temperature, penalties and truncation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.device import to_device
from kvrelay.protocol.sampling import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: NDArray[np.int64], num_top: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """The log-probability of one token per row, and of the `num_top[row]` most likely ones.

    `logits` is `[rows, vocab]` of any float type, `token_ids` and `num_top` are `[rows]`..
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, to_device(token_ids, logits.device)[:, None])[:, 0].tolist()
    most = min(int(num_top.max(initial=0)), logits.shape[-1])
    top = torch.topk(logprobs, most, dim=-1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(token_id, logprob, row_ids[:count], row_values[:count])
        for token_id, logprob, row_ids, row_values, count in zip(
            token_ids.tolist(), chosen, ids, values, num_top.tolist(), strict=True
        )
    ]
