"""Seeds of random sampling, on every device."""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.engine.sample.sampler import Sampler
from kvrelay.protocol.sampling import Sampling

VOCAB_SIZE = 100
NUM_TOKENS = 12


def test_all_64_bits_of_a_signed_seed_count(device: torch.device) -> None:
    seeds = [0, *(sign * (1 << bit) for bit in range(63) for sign in (1, -1)), 2**63 - 1, -(2**63), -(2**63) + 1]
    sampler = Sampler(VOCAB_SIZE, (), device)
    keys = [("seeds", index, 0) for index in range(len(seeds))]
    for key, seed in zip(keys, seeds, strict=True):
        sampler.add(key, Sampling(temperature=1.0, seed=seed), [1], 1)
    logits = torch.zeros(len(seeds), VOCAB_SIZE, device=device)
    steps = [sampler.begin(keys, np.full(len(seeds), step + 1), logits).land()[0] for step in range(NUM_TOKENS)]
    assert len(set(map(tuple, np.stack(steps, axis=1).tolist()))) == len(seeds)
