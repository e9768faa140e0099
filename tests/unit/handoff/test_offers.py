"""Which transports a prefill worker offers to whom."""

from __future__ import annotations

import pytest

from kvrelay.protocol.messages import PeerRef
from kvrelay_prefill.pushes import TRY_AGAIN_AFTER_S, TransportOffers

pytestmark = pytest.mark.unit

PEER, OTHER = PeerRef("d", "1", "tcp://d"), PeerRef("e", "1", "tcp://e")


def test_what_failed_with_a_peer_is_not_offered_to_it_for_a_while() -> None:
    offers = TransportOffers(["nixl", "zmq"])
    offers.failed(PEER, "nixl", 100.0)
    assert offers.to(PEER, 100.0) == ["zmq"]
    assert offers.to(OTHER, 100.0) == ["nixl", "zmq"]
    assert offers.to(PEER, 100.0 + TRY_AGAIN_AFTER_S) == ["nixl", "zmq"]


def test_something_is_always_offered() -> None:
    offers = TransportOffers(["nixl"])
    offers.failed(PEER, "nixl", 0.0)
    assert offers.to(PEER, 0.0) == ["nixl"]
