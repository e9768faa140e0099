"""Workers wait longer for a silent router than for each other, unless its process has ended; and queues are bounded."""

from __future__ import annotations

import pytest

from kvrelay.protocol.link import Links, LinkSettings
from tests.unit.protocol.link_network import PEER_TIMEOUT_S, Network

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


def test_a_silent_peer_gets_no_repeats(patient: Network) -> None:
    router, worker = patient.start("r"), patient.start("w", "f")
    patient.send(router, worker.me, "hello")
    patient.run(1.0)
    patient.stop("r")
    for number in range(200):
        patient.send(worker, router.me, str(number))
    patient.run(PEER_TIMEOUT_S + 1.0)
    before = patient.num_sent["w"]
    patient.run(PEER_TIMEOUT_S)
    assert patient.num_sent["w"] - before <= PEER_TIMEOUT_S / LinkSettings().alive_interval_s + 2
    patient.resume("r")
    patient.run(10.0)
    assert router.texts_from(worker.me) == [str(number) for number in range(200)]


def test_a_peer_that_acknowledges_nothing_is_lost(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "MAX_UNACKED_BYTES", 10_000)
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "hello")
    network.run(1.0)
    network.cut.add(("a", "b"))  # what b sends still comes, so it is not silent
    for _ in range(12):
        network.send(a, b.me, "x" * 1000)
    network.run(PEER_TIMEOUT_S - 1.0)
    network.send(a, b.me, "too early to say")
    assert not a.lost()
    network.run(1.5)
    network.send(a, b.me, "now")
    assert [event.reason for event in a.lost() if "acknowledged" in event.reason]


def test_a_peer_with_too_much_unacknowledged_is_lost_at_once(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "MAX_UNACKED_BYTES", 10_000)
    monkeypatch.setattr(Links, "MAX_HELD_BYTES", 20_000)
    a, b = network.start("a"), network.start("b")
    for _ in range(18):
        network.send(a, b.me, "x" * 1000)
    assert not a.lost()
    for _ in range(3):
        network.send(a, b.me, "x" * 1000)
    assert [event.reason for event in a.lost() if "acknowledged" in event.reason]


def test_messages_ahead_of_a_gap_are_bounded_and_come_in_the_end(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Links, "MAX_EARLY_BYTES", 10_000)
    a, b = network.start("a"), network.start("b")
    network.loss = 0.3
    texts = [f"{number} " + "x" * 3000 for number in range(60)]
    for text in texts:
        network.send(a, b.me, text)
    network.run(30.0)
    network.heal()
    network.run(200.0)
    assert b.texts_from(a.me) == texts
