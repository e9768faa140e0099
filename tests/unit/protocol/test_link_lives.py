"""The link when processes are restarted, replaced, stopped or forget each other, one situation at a time."""

from __future__ import annotations

from kvrelay.protocol.link import Links
from kvrelay.protocol.messages import Cancel, PeerRef
from tests.unit.protocol.link_network import PEER_TIMEOUT_S, Network


def test_a_restarted_peer_is_noticed_at_its_first_word(network: Network) -> None:
    a, old_b = network.start("a"), network.start("b")
    network.send(a, old_b.me, "to the old one")
    network.run(1.0)
    new_b = network.start("b")
    network.send(a, old_b.me, "to the old one too")
    network.run(1.0)
    assert [event.peer for event in a.lost()] == [old_b.me]
    assert new_b.texts_from(a.me) == []
    assert not new_b.lost()
    network.send(a, new_b.me, "to the new one")
    network.send(new_b, a.me, "from the new one")
    network.run(1.0)
    assert new_b.texts_from(a.me) == ["to the new one"]
    assert a.texts_from(new_b.me) == ["from the new one"]
    assert len(a.lost()) == 1


def test_a_peer_that_was_replaced_is_reported_lost_when_its_successor_answers(network: Network) -> None:
    a, old_b = network.start("a"), network.start("b")
    new_b = network.start("b")
    network.send(a, new_b.me, "hello")
    network.send(a, old_b.me, "hello")
    assert not a.lost()
    network.run(1.0)
    assert [event.peer for event in a.lost()] == [old_b.me]
    assert new_b.texts_from(a.me) == ["hello"]


def test_a_name_that_was_never_heard_is_no_proof_that_another_start_is_gone(network: Network) -> None:
    a, b = network.start("a"), network.start("b", incarnation="5")
    network.send(b, a.me, "hello")
    network.run(1.0)
    network.send(a, PeerRef("b", "4", "b"), "to a lower name")
    network.send(a, PeerRef("b", "6", "elsewhere"), "to a higher name")
    for number in range(2 * int(PEER_TIMEOUT_S)):
        network.send(a, b.me, f"{number}")
        network.send(b, a.me, f"{number}")
        network.run(1.0)
    assert [(event.peer.incarnation, event.replaced) for event in a.lost()] == [("4", False), ("6", False)]
    assert not b.lost()
    texts = [f"{number}" for number in range(2 * int(PEER_TIMEOUT_S))]
    assert b.texts_from(a.me) == texts
    assert a.texts_from(b.me) == ["hello", *texts]


def test_a_name_that_was_never_heard_keeps_no_peer_from_getting_its_first_message(network: Network) -> None:
    a, b = network.start("a"), network.start("b", incarnation="5")
    network.send(a, PeerRef("b", "6", "elsewhere"), "to a higher name")
    network.send(a, b.me, "to b")
    network.run(1.0)
    network.send(b, a.me, "from b")
    network.run(1.0)
    assert b.texts_from(a.me) == ["to b"] and a.texts_from(b.me) == ["from b"]
    assert not a.lost() and not b.lost()


def test_a_named_successor_replaces_a_peer_with_its_first_message(network: Network) -> None:
    a, old_b = network.start("a"), network.start("b")
    network.send(old_b, a.me, "hello")
    network.run(1.0)
    new_b = network.start("b")
    network.cut.add(("b", "a"))
    network.send(a, new_b.me, "one")
    network.run(1.0)
    assert not a.lost()
    network.heal()
    network.run(1.0)
    assert [(event.peer, event.replaced) for event in a.lost()] == [(old_b.me, True)]
    network.send(a, new_b.me, "two")
    network.run(1.0)
    assert new_b.texts_from(a.me) == ["one", "two"]


def test_after_a_clock_was_set_back_the_later_start_is_the_newer_one(network: Network) -> None:
    a, old_b = network.start("a"), network.start("b", incarnation="9")
    network.send(old_b, a.me, "from the old one")
    network.run(1.0)
    new_b = network.start("b", incarnation="3")
    network.run(10.0)
    network.send(new_b, a.me, "from the new one")
    network.run(1.0)
    assert a.texts_from(new_b.me) == ["from the new one"]
    assert not [event for event in a.lost() if event.replaced]
    num_lost = len(a.lost())
    network.send(a, old_b.me, "to the old one")
    assert [(event.peer, event.replaced) for event in a.lost()[num_lost:]] == [(old_b.me, True)]
    old_b.links.send(a.me, Cancel(reason="on its way for long"), network.now)
    for _, frames in old_b.links.take_outgoing():
        network.inject("a", frames)
    network.run(1.0)
    network.send(a, new_b.me, "to the new one")
    network.run(1.0)
    assert new_b.texts_from(a.me) == ["to the new one"]
    assert len(a.lost()) == num_lost + 1


def test_a_peer_that_gave_us_up_is_told_from_one_that_fell_silent(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "hello")
    network.run(1.0)
    network.stop("a")
    network.run(7.0)
    network.resume("a")
    network.run(1.0)
    assert [(event.peer, event.is_alive) for event in b.lost()] == [(a.me, False)]
    assert [(event.peer, event.is_alive) for event in a.lost()] == [(b.me, True)]


def test_what_a_stopped_predecessor_says_after_its_successor_is_dropped(network: Network) -> None:
    a, old_b = network.start("a"), network.start("b")
    network.cut.add(("a", "b"))
    network.send(old_b, a.me, "in time")
    network.run(1.0)
    network.stop("b")
    old_b.links.send(a.me, Cancel(reason="too late"), network.now)
    network.heal()
    new_b = network.start("b")
    network.send(new_b, a.me, "successor")
    network.run(1.0)
    for address, frames in old_b.links.take_outgoing():
        network.inject(address, frames)
    network.run(1.0)
    assert a.texts_from(old_b.me) == ["in time"]
    assert a.texts_from(new_b.me) == ["successor"]
    assert [event.peer for event in a.lost()] == [old_b.me]


def test_a_process_that_was_stopped_blames_nobody_for_its_own_silence(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "hello")
    network.run(1.0)
    network.partition("a", "b")
    network.stop("b")
    network.run(4.0)
    network.heal()
    network.resume("b")
    network.run(5.0)
    assert not a.lost() and not b.lost()


def test_processes_suspended_together_go_on_together(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "before")
    network.run(1.0)
    network.stop("a")
    network.stop("b")
    network.run(600.0)
    network.resume("a")
    network.resume("b")
    network.send(a, b.me, "after")
    network.run(1.0)
    assert b.texts_from(a.me) == ["before", "after"]
    assert not a.lost() and not b.lost()


def test_a_stop_does_not_delay_the_detection_of_a_later_death(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "hello")
    network.run(1.0)
    network.stop("b")
    network.run(PEER_TIMEOUT_S - 1)
    network.resume("b")
    network.run(0.1)
    network.kill("a")
    network.run(PEER_TIMEOUT_S + 0.2)
    assert len(b.lost()) == 1


def test_a_process_that_always_ticks_late_still_notices_a_death() -> None:
    links = Links(PeerRef("a", "1", "a"))
    peer = PeerRef("b", "1", "b")
    links.send(peer, Cancel(reason="hello"), 0.0)
    for i in range(20):
        links.tick(1.5 * i)
    assert not links.addresses()


def test_a_late_copy_from_a_lost_link_is_dropped(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    a.links.send(b.me, Cancel(reason="old"), network.now)
    ((_, late),) = a.links.take_outgoing()
    a.links._lose(next(iter(a.links._links.values())), "for this test")
    network.send(a, b.me, "new")
    network.run(1.0)
    network.inject("b", late)
    network.run(3.0)
    assert b.texts_from(a.me) == ["new"]
    assert not b.lost()
