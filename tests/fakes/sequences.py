"""Sequences as a worker makes them of a prompt, for tests of schedulers, step loops and engines without services."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import fields
from typing import Any

import numpy as np

from kvrelay.kv.hashing import root_hash
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.sequence import Origin, Sequence, TokenBuffer


def new_sequence(key: SequenceKey, prompt: Items[int], sampling: Sampling, block_size: int, **others: Any) -> Sequence:
    """One with nothing computed, from a router that there is not. `others` are fields of `Sequence` or `Origin`."""
    origin = {field.name: others.pop(field.name) for field in fields(Origin) if field.name in others}
    return Sequence(
        key=key,
        tokens=TokenBuffer(np.array(prompt, np.int32)),
        num_prompt=len(prompt),
        sampling=sampling,
        root=root_hash(model="test"),
        table=BlockTable(block_size),
        origin=Origin(PeerRef("router", "1", "tcp://nowhere"), **origin),
        **others,
    )
