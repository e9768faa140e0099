"""How much one sender may hold of a pool: the running count against a sum over all reservations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.queue.sender_limits import SENDER_SHARE, SenderLimits

pytestmark = pytest.mark.unit

NUM_POOL_BLOCKS = 40
SENDERS = [PeerRef(name, "1", f"tcp://{name}") for name in "pq"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(1, 30)), max_size=40))
def test_the_count_is_what_a_sum_over_the_reservations_gives(history: list[tuple[int, int, int]]) -> None:
    """Each step reserves blocks for a sequence that holds none, and releases those of one that does."""
    limits = SenderLimits(NUM_POOL_BLOCKS)
    held: dict[SequenceKey, tuple[PeerRef, int]] = {}
    for number, who, num_blocks in history:
        key, sender = (f"r{number}", 1, 0), SENDERS[who]
        if held.pop(key, None) is not None:
            limits.released(key)
        else:
            mine = [blocks for of, blocks in held.values() if of == sender]
            expected = not mine or sum(mine) + num_blocks <= SENDER_SHARE * NUM_POOL_BLOCKS
            assert limits.allows(sender, num_blocks) is expected
            if expected:
                limits.reserved(key, sender, num_blocks)
                held[key] = sender, num_blocks
        assert limits.released(("nobody", 1, 0)) is None
        assert len(limits) == len(held)
