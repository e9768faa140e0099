"""Workers wait longer for a silent router than for each other, unless its process has ended."""

from __future__ import annotations

import pytest

from kvrelay.protocol.link import LinkSettings
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
