"""The reliable link between processes that live on, one situation at a time."""

from __future__ import annotations

from kvrelay.protocol.link import Links
from kvrelay.protocol.messages import Cancel, PeerRef
from tests.unit.protocol.link_network import PEER_TIMEOUT_S, Network, size_of_state


def test_messages_arrive_in_order_and_are_acknowledged(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    for i in range(100):
        network.send(a, b.me, f"{i}")
        network.send(b, a.me, f"{i}")
    network.run(0.3)
    assert b.texts_from(a.me) == a.texts_from(b.me) == [f"{i}" for i in range(100)]
    assert a.links.num_unacked == b.links.num_unacked == 0


def test_both_may_speak_first(network: Network) -> None:
    network.delay_s = (0.3, 0.3)
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "from a")
    network.send(b, a.me, "from b")
    network.run(3.0)
    assert b.texts_from(a.me) == ["from a"]
    assert a.texts_from(b.me) == ["from b"]
    assert not a.lost() and not b.lost()


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


def test_a_peer_that_starts_late_gets_what_waited_for_it(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.partition("a", "b")
    network.send(a, b.me, "early")
    network.run(PEER_TIMEOUT_S - 1)
    network.heal()
    network.run(2.5)
    assert b.texts_from(a.me) == ["early"]
    assert not a.lost()


def test_a_partition_shorter_than_the_timeout_goes_unnoticed(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "0")
    network.run(1.0)
    network.partition("a", "b")
    network.send(a, b.me, "1")
    network.run(PEER_TIMEOUT_S - 1.2)
    network.send(b, a.me, "back")
    network.heal()
    network.run(2.5)
    assert b.texts_from(a.me) == ["0", "1"]
    assert a.texts_from(b.me) == ["back"]
    assert not a.lost() and not b.lost()


def test_a_longer_partition_is_reported_on_both_sides_and_heals(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "before")
    network.run(1.0)
    network.partition("a", "b")
    network.send(a, b.me, "lost")
    network.run(PEER_TIMEOUT_S + 1)
    network.heal()
    network.run(10.0)
    assert len(a.lost()) == len(b.lost()) == 1
    network.send(b, a.me, "after")
    network.send(a, b.me, "after")
    network.run(1.0)
    assert b.texts_from(a.me) == ["before", "after"]
    assert a.texts_from(b.me) == ["after"]
    assert len(a.lost()) == len(b.lost()) == 1


def test_a_gap_filled_last_frees_all_that_waited_for_it() -> None:
    sender, receiver = PeerRef("a", "1", "a"), PeerRef("b", "1", "b")
    a, b = Links(sender), Links(receiver)
    for i in range(Links.MAX_EARLY + 100):
        a.send(receiver, Cancel(reason=f"{i}"), 0.0)
    (_, first), *rest = a.take_outgoing()
    for _, frames in rest:
        b.receive(frames, 0.1)
    assert b.take_events() == []
    b.receive(first, 0.2)
    assert len(b.take_events()) == Links.MAX_EARLY


def test_repeats_come_ever_more_slowly(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.partition("a", "b")
    network.send(a, b.me, "hello")
    network.run(PEER_TIMEOUT_S - 0.1)
    assert sum(header.seq == 1 for _, header in network.log) == 4


def test_repeats_to_a_silent_peer_are_bounded(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.partition("a", "b")
    for i in range(5000):
        network.send(a, b.me, f"{i}")
    network.num_sent.clear()
    network.run(1.0)
    assert network.num_sent["a"] <= Links.MAX_RESENT_PER_TICK * 21
    network.heal()
    network.run(8.0)
    assert b.texts_from(a.me) == [f"{i}" for i in range(5000)]


def test_repeats_are_bounded_in_bytes_too(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.partition("a", "b")
    text = "x" * Links.MAX_RESENT_BYTES_PER_TICK
    for _ in range(10):
        network.send(a, b.me, text)
    network.run(0.5)
    network.num_sent.clear()
    network.run(0.2)
    assert 1 <= network.num_sent["a"] <= 4


def test_messages_for_an_earlier_life_are_answered_sparingly(network: Network) -> None:
    a, old_b = network.start("a"), network.start("b")
    for i in range(1000):
        a.links.send(old_b.me, Cancel(reason=f"{i}"), network.now)
    new_b = network.start("b")
    for _, frames in a.links.take_outgoing():
        network.inject("b", frames)
    network.run(1.0)
    assert new_b.texts_from(a.me) == []
    assert network.num_sent["b"] <= 5
    assert len(a.lost()) == 1
