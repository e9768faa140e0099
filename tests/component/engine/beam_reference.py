"""transformers' beam search, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.protocol.sampling import Sampling


@dataclass(frozen=True)
class Text:
    token_ids: list[int]
    score: float


def reference_beams(model: Any, prompt: list[int], sampling: Sampling, eos: list[int] | None) -> list[Text]:
    """What `generate` gives. Sequences are cut behind their first end token."""
    beams = sampling.beams
    assert beams is not None
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=beams.width,
            num_return_sequences=beams.num_returned,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens or None,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    texts = []
    # One beam is no beam search there: the same tokens, and no score.
    scores = output.sequences_scores if beams.width > 1 else torch.full((1,), float("nan"))
    for tokens, score in zip(output.sequences[:, len(prompt) :].tolist(), scores.tolist(), strict=True):
        ends = [index for index, token in enumerate(tokens) if token in (eos or [])]
        texts.append(Text(tokens[: ends[0] + 1] if ends else tokens, score))
    return texts
