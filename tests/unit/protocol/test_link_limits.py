"""A process has links with a bounded number of peers."""

from __future__ import annotations

import pytest

from kvrelay.protocol.link import LinkSettings
from tests.unit.protocol.link_network import PEER_TIMEOUT_S, Network

pytestmark = pytest.mark.unit


@pytest.fixture
def network() -> Network:
    return Network(settings=LinkSettings(max_peers=3))


def test_a_peer_beyond_the_limit_gets_no_answer_until_another_has_left(network: Network) -> None:
    full = network.start("full")
    peers = [network.start(f"peer-{number}") for number in range(4)]
    for peer in peers:
        network.send(peer, full.me, "hello")
        network.run(0.1)
    network.run(1.0)
    assert [full.texts_from(peer.me) for peer in peers] == [["hello"]] * 3 + [[]]
    assert full.links.num_beyond_limit >= 1
    network.kill("peer-0")
    network.run(PEER_TIMEOUT_S + 1)
    network.send(peers[3], full.me, "again")
    network.run(2.5)
    assert full.texts_from(peers[3].me) == ["again"]
    assert not any(peer.lost() for peer in peers[1:3])


def test_a_message_to_a_peer_beyond_the_limit_reports_it_lost(network: Network) -> None:
    full = network.start("full")
    peers = [network.start(f"peer-{number}") for number in range(4)]
    for peer in peers:
        network.send(full, peer.me, "hello")
    assert [event.peer for event in full.lost()] == [peers[3].me]
    assert "max_peers" in full.lost()[0].reason
    network.run(1.0)
    assert [peer.texts_from(full.me) for peer in peers] == [["hello"]] * 3 + [[]]
