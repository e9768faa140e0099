"""How a decode worker gathers the tokens of a step into messages."""

from __future__ import annotations

import pytest

from kvrelay.protocol.messages import PeerRef, TokenBatch, TokenEntry
from kvrelay_decode.stream import TokenStream

pytestmark = pytest.mark.unit
ROUTERS = [PeerRef(peer_id=f"r{number}", incarnation="1", address=f"tcp://r{number}:1") for number in range(2)]


def entry(request: str) -> TokenEntry:
    return TokenEntry(request=request, attempt=1, sequence=0, index=0, token_ids=[7])


def test_a_step_is_one_message_to_each_router() -> None:
    sent: list[tuple[PeerRef, TokenBatch]] = []
    stream = TokenStream(lambda router, batch: sent.append((router, batch)))
    entries = [entry("a"), entry("b"), entry("c"), entry("d")]
    for router, each in zip([0, 0, 0, 1], entries, strict=True):
        stream.put(ROUTERS[router], each)
    stream.flush()
    stream.flush()
    batches = [([each.request for each in batch.entries], ROUTERS.index(router)) for router, batch in sent]
    assert batches == [(["a", "b", "c"], 0), (["d"], 1)]
