"""How much one sender may hold of a pool: the running count against a sum over all reservations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay_decode.shares import PEER_SHARE, Shares

pytestmark = pytest.mark.unit

NUM_POOL_BLOCKS = 40
PEERS = [PeerRef(name, "1", f"tcp://{name}") for name in "pq"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(1, 30)), max_size=40))
def test_the_count_is_what_a_sum_over_the_reservations_gives(history: list[tuple[int, int, int]]) -> None:
    """Each step grants a sequence that holds nothing, and settles one that does."""
    shares = Shares(NUM_POOL_BLOCKS)
    held: dict[SequenceKey, tuple[PeerRef, int]] = {}
    for number, who, num_blocks in history:
        key, peer = (f"r{number}", 1, 0), PEERS[who]
        if held.pop(key, None) is not None:
            shares.settled(key)
        else:
            mine = [blocks for of, blocks in held.values() if of == peer]
            expected = not mine or sum(mine) + num_blocks <= PEER_SHARE * NUM_POOL_BLOCKS
            assert shares.allows(peer, num_blocks) is expected
            if expected:
                shares.granted(key, peer, num_blocks)
                held[key] = peer, num_blocks
        shares.settled(("nobody", 1, 0))
        assert len(shares) == len(held)
