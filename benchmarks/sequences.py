"""Sequences as a worker makes them of a prompt, for benchmarks that drive schedulers and runners without services."""

from __future__ import annotations

import numpy as np

from kvrelay.kv.hashing import root_hash
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.grammar import Grammar
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.sequence import Origin, Sequence, TokenBuffer

ROOT = root_hash(model="benchmark")


def greedy_sequence(number: int, prompt: np.ndarray, max_tokens: int, block_size: int) -> Sequence:
    """One of a prompt [tokens], drawn greedily for `max_tokens` whatever they are; `number` names it."""
    return Sequence(
        key=(str(number), 1, 0),
        tokens=TokenBuffer(prompt.astype(np.int32)),
        num_prompt=len(prompt),
        sampling=Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        root=ROOT,
        table=BlockTable(block_size),
        origin=Origin(PeerRef("router", "1", "tcp://nowhere")),
    )


def sampled_sequence(
    number: int, prompt: np.ndarray, max_tokens: int, block_size: int, seed: int, grammar: Grammar | None
) -> Sequence:
    """One of a prompt [tokens], sampled under the grammar to its end, or without one for `max_tokens`."""
    sequence = greedy_sequence(number, prompt, max_tokens, block_size)
    sequence.sampling = Sampling(
        temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=grammar is None, grammar=grammar
    )
    return sequence
