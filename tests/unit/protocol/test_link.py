"""The link between processes that live on, one situation at a time: gaps, silence, patience with routers, limits."""

from __future__ import annotations

import pytest

from kvrelay.protocol.link import Delivered, Links, LinkSettings
from kvrelay.protocol.messages import Generate, PeerRef, Prompt
from kvrelay.protocol.sampling import Sampling
from tests.unit.protocol.link_network import PEER_TIMEOUT_S, Network, size_of_state


def test_an_idle_pair_stays_joined_for_hours_and_grows_nothing(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "hello")
    network.run(1.0)
    before = size_of_state(a.links), size_of_state(b.links)
    network.num_sent.clear()
    network.run(3600.0)
    assert (size_of_state(a.links), size_of_state(b.links)) == before
    assert not a.lost() and not b.lost()
    assert network.num_sent["a"] <= 7201 and network.num_sent["b"] <= 7201


def test_a_dead_peer_is_reported_once_and_then_left_alone(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "hello")
    network.run(1.0)
    network.kill("b")
    network.run(PEER_TIMEOUT_S - 0.6)
    assert not a.lost()
    network.run(0.8)
    assert [event.peer for event in a.lost()] == [b.me]
    network.num_sent.clear()
    network.run(60.0)
    assert len(a.lost()) == 1
    assert network.num_sent["a"] == 0
    assert size_of_state(a.links) == 0


def test_a_peer_that_never_was_is_reported_lost(network: Network) -> None:
    a = network.start("a")
    network.send(a, PeerRef("b", "000009", "b"), "is anybody there")
    network.run(PEER_TIMEOUT_S + 0.2)
    assert len(a.lost()) == 1


def test_a_partition_shorter_than_the_timeout_goes_unnoticed_if_nothing_was_sent(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "0")
    network.run(1.0)
    network.partition("a", "b")
    network.run(PEER_TIMEOUT_S - 1.2)
    network.heal()
    network.send(a, b.me, "1")
    network.run(1.0)
    assert b.texts_from(a.me) == ["0", "1"]
    assert not a.lost() and not b.lost()


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("num_after", [0, 1, 3])
def test_a_message_that_did_not_arrive_ends_the_link_on_both_sides(
    network: Network, num_before: int, num_after: int
) -> None:
    """The next message shows the gap, or the next life sign if there is none."""
    a, b = network.start("a"), network.start("b")
    for _ in range(num_before):
        network.send(a, b.me, "before")
        network.send(b, a.me, "before")
        network.run(1.0)
    network.loss = 1.0
    network.send(a, b.me, "lost")
    network.loss = 0.0
    for _ in range(num_after):
        network.send(a, b.me, "behind the gap")
    network.run(1.0)
    assert b.texts_from(a.me) == ["before"] * num_before
    assert [(event.peer, event.is_alive) for event in a.lost()] == [(b.me, True)]
    assert [(event.peer, event.is_alive) for event in b.lost()] == [(a.me, True)] * num_before
    network.send(a, b.me, "after")
    network.send(b, a.me, "after")
    network.run(PEER_TIMEOUT_S + 1.0)
    assert b.lives_with(a.me)[-1] == a.lives_with(b.me)[-1] == ["after"]
    assert len(a.lost()) == 1 and len(b.lost()) == num_before


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_peer_that_takes_nothing_is_lost(
    network: Network, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    monkeypatch.setattr(Links, "MAX_UNTAKEN_BYTES", 10_000)
    a, b = network.start("a"), network.start("b")
    network.delay_s = (0.0, 0.0) if is_answered else (PEER_TIMEOUT_S - 1.0, PEER_TIMEOUT_S - 1.0)
    for _ in range(12):
        network.send(a, b.me, "x" * 1000)
        network.run(0.2)
    assert [event.reason[:16] for event in a.lost()] == ([] if is_answered else ["it has not taken"])


def test_samples_of_a_prompt_share_its_tokens(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not count for the limit of what a peer has not taken."""
    monkeypatch.setattr(Links, "MAX_UNTAKEN_BYTES", 100_000)
    a, b = network.start("a"), network.start("b")
    tokens = bytes(40_000)
    body = Generate(prompt=Prompt(tokens=tokens, num_output=3, sampling=Sampling(max_tokens=4), num_samples=128))
    for number in range(128):
        a.links.send(b.me, body, network.now, request="r", sequence=number)
    outgoing = a.links.take_outgoing()
    assert all(frames[2] is tokens for _, frames in outgoing)
    for address, frames in outgoing:
        network.inject(address, frames)
    network.run(1.0)
    assert [event.body for event in b.events if isinstance(event, Delivered)] == [body] * 128
    assert not a.lost()


# -- workers wait longer for a silent router than for each other, unless its process has ended -----------------------


ROUTER_TIMEOUT_S = 6 * PEER_TIMEOUT_S


@pytest.fixture
def patient() -> Network:
    return Network(settings=LinkSettings(router_timeout_s=ROUTER_TIMEOUT_S))


def test_a_router_that_was_stopped_goes_on_with_its_workers(patient: Network) -> None:
    router, worker = patient.start("r"), patient.start("w", "f")
    patient.send(router, worker.me, "before")
    patient.run(1.0)
    patient.stop("r")
    patient.send(worker, router.me, "while it stands still")
    patient.run(3 * PEER_TIMEOUT_S)
    assert [peer.peer_id for peer in worker.links.silent_routers(patient.now)] == ["r"]
    patient.resume("r")
    patient.run(3.0)
    assert router.texts_from(worker.me) == ["while it stands still"]
    assert not router.lost() and not worker.lost()
    assert worker.links.silent_routers(patient.now) == []


def test_a_router_that_stays_silent_is_lost_in_the_end(patient: Network) -> None:
    router, worker = patient.start("r"), patient.start("w", "f")
    patient.send(router, worker.me, "hello")
    patient.run(1.0)
    patient.stop("r")
    patient.run(ROUTER_TIMEOUT_S - 2.0)
    assert not worker.lost()
    patient.run(4.0)
    assert [event.peer for event in worker.lost()] == [router.me]


def test_a_router_whose_process_has_ended_is_lost_like_any_peer(patient: Network) -> None:
    router, worker = patient.start("r"), patient.start("w", "f")
    patient.send(router, worker.me, "hello")
    patient.run(1.0)
    patient.kill("r")
    worker.links.process_ended(router.me)
    patient.run(PEER_TIMEOUT_S - 2.0)
    assert not worker.lost()
    patient.run(2.5)
    assert [event.peer for event in worker.lost()] == [router.me]


def test_workers_and_routers_are_not_patient_with_workers(patient: Network) -> None:
    router, one, other = patient.start("r"), patient.start("one", "f"), patient.start("other", "f")
    for process in (router, one):
        patient.send(process, other.me, "hello")
    patient.run(1.0)
    patient.stop("other")
    patient.run(PEER_TIMEOUT_S + 1.0)
    assert [event.peer for event in (*router.lost(), *one.lost())] == [other.me] * 2


# -- a process has links with a bounded number of peers --------------------------------------------------------------


@pytest.fixture
def narrow() -> Network:
    return Network(settings=LinkSettings(max_peers=3))


def test_a_peer_beyond_the_limit_gets_no_answer_until_another_has_left(narrow: Network) -> None:
    full = narrow.start("full")
    peers = [narrow.start(f"peer-{number}") for number in range(4)]
    for peer in peers:
        narrow.send(peer, full.me, "hello")
        narrow.run(0.1)
    narrow.run(1.0)
    assert [full.texts_from(peer.me) for peer in peers] == [["hello"]] * 3 + [[]]
    assert full.links.num_beyond_limit >= 1
    narrow.kill("peer-0")
    narrow.run(PEER_TIMEOUT_S + 1)
    narrow.send(peers[3], full.me, "again")
    narrow.run(2.5)
    assert full.texts_from(peers[3].me) == ["again"]
    assert not any(peer.lost() for peer in peers[1:3])


def test_a_message_to_a_peer_beyond_the_limit_reports_it_lost(narrow: Network) -> None:
    full = narrow.start("full")
    peers = [narrow.start(f"peer-{number}") for number in range(4)]
    for peer in peers:
        narrow.send(full, peer.me, "hello")
    assert [event.peer for event in full.lost()] == [peers[3].me]
    assert "max_peers" in full.lost()[0].reason
    narrow.run(1.0)
    assert [peer.texts_from(full.me) for peer in peers] == [["hello"]] * 3 + [[]]
