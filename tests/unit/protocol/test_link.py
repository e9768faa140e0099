"""The reliable link, one situation at a time."""

from __future__ import annotations

import pytest

from kvrelay.protocol import codec
from kvrelay.protocol.link import Links
from kvrelay.protocol.messages import Alive, Cancel, Header, PeerRef, Reject
from tests.unit.protocol.link_network import Network, size_of_state, with_header

PEER_TIMEOUT_S = 5.0


@pytest.fixture
def network() -> Network:
    return Network()


def hour_of(network: Network) -> None:
    network.run(3600.0)


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
    hour_of(network)
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


def test_sending_to_a_replaced_peer_reports_it_lost(network: Network) -> None:
    a, old_b = network.start("a"), network.start("b")
    new_b = network.start("b")
    network.send(a, new_b.me, "hello")
    network.send(a, old_b.me, "hello")
    assert [event.peer for event in a.lost()] == [old_b.me]
    network.run(1.0)
    assert new_b.texts_from(a.me) == ["hello"]


def test_a_name_that_was_never_heard_is_no_proof_that_another_start_is_gone(network: Network) -> None:
    a, b = network.start("a"), network.start("b", incarnation="5")
    network.send(b, a.me, "hello")
    network.run(1.0)
    network.send(a, PeerRef("b", "4", "b"), "to a lower name")
    network.send(a, PeerRef("b", "6", "b"), "to a higher name")
    assert [(event.peer.incarnation, event.replaced) for event in a.lost()] == [("4", False), ("5", False)]


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
    assert [(event.peer, event.by_peer) for event in b.lost()] == [(a.me, False)]
    assert [(event.peer, event.by_peer) for event in a.lost()] == [(b.me, True)]


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


def test_a_process_that_was_stopped_too_long_learns_that_it_was_given_up(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "before")
    network.run(1.0)
    network.stop("b")
    network.send(a, b.me, "while stopped")
    network.run(30.0)
    assert len(a.lost()) == 1 and not b.lost()
    network.resume("b")
    network.run(1.0)
    assert len(b.lost()) == 1
    network.send(a, b.me, "after")
    network.send(b, a.me, "after")
    network.run(1.0)
    assert b.lives_with(a.me)[-1] == ["after"]
    assert a.lives_with(b.me)[-1] == ["after"]
    assert len(a.lost()) == len(b.lost()) == 1


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


def test_a_forgotten_link_is_made_known_by_its_new_number(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "before")
    network.send(b, a.me, "before")
    network.run(1.0)
    network.cut.add(("b", "a"))
    network.run(PEER_TIMEOUT_S + 0.3)
    assert len(a.lost()) == 1
    network.heal()
    network.send(a, b.me, "after")
    network.run(1.0)
    assert len(b.lost()) == 1
    network.send(b, a.me, "after")
    network.run(1.0)
    assert b.lives_with(a.me) == [["before"], ["after"]]
    assert a.lives_with(b.me) == [["before"], ["after"]]


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


def test_messages_kept_from_a_lost_link_never_fill_a_gap_in_the_next(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.loss = 1.0
    network.send(a, b.me, "first")
    network.loss = 0.0
    network.send(a, b.me, "second")
    network.run(0.2)
    a.links._lose(next(iter(a.links._links.values())), "for this test")
    network.run(2.0)
    network.send(a, b.me, "one")
    network.run(1.0)
    network.send(a, b.me, "two")
    network.run(3.0)
    assert b.texts_from(a.me)[-2:] == ["one", "two"]
    assert "second" not in b.texts_from(a.me)


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


@pytest.mark.parametrize("speaks_first", ["a", "b", "both"])
def test_peers_of_different_models_refuse_each_other_once(network: Network, speaks_first: str) -> None:
    a, b = network.start("a", fingerprint="llama"), network.start("b", fingerprint="qwen")
    if speaks_first != "b":
        network.send(a, b.me, "hello")
    if speaks_first != "a":
        network.send(b, a.me, "hello")
    network.run(10.0)
    for process, other in ((a, b), (b, a)):
        (refused,) = process.refused()
        assert refused.peer == other.me
        assert "llama" in refused.reason and "qwen" in refused.reason
        assert not process.lost() and not process.texts_from(other.me)
    assert network.num_sent.total() <= 6


def test_a_refusal_that_gets_lost_is_repeated_but_reported_once(network: Network) -> None:
    a, b = network.start("a", fingerprint="llama"), network.start("b", fingerprint="qwen")
    network.cut.add(("b", "a"))
    network.send(a, b.me, "hello")
    network.run(2.0)
    network.heal()
    network.run(5.0)
    assert len(a.refused()) == len(b.refused()) == 1
    assert network.num_sent["b"] <= 8


def test_each_try_to_reach_a_refused_peer_is_refused(network: Network) -> None:
    a, b = network.start("a", fingerprint="llama"), network.start("b", fingerprint="qwen")
    for _ in range(3):
        network.send(a, b.me, "hello")
        network.run(1.0)
    assert len(a.refused()) == 3
    assert len(b.refused()) == 1


def test_a_peer_without_a_model_talks_to_all(network: Network) -> None:
    router, worker = network.start("a"), network.start("b", fingerprint="qwen")
    network.send(router, worker.me, "hello")
    network.run(1.0)
    assert worker.texts_from(router.me) == ["hello"]


@pytest.mark.parametrize(("to_incarnation", "to_link"), [("000000", 1), ("000001", 7)])
def test_a_refusal_meant_for_an_earlier_link_changes_nothing(
    network: Network, to_incarnation: str, to_link: int
) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "hello")
    network.run(1.0)
    header = Header(
        sender="b",
        incarnation=b.me.incarnation,
        reply_to="b",
        to_incarnation=to_incarnation,
        link=0,
        to_link=to_link,
    )
    network.inject("a", codec.encode(header, Reject(code="fingerprint", reason="another model")))
    network.run(1.0)
    assert not a.refused() and a.links.addresses() == {b.me.address}


def test_a_peer_replaced_by_one_of_another_model_is_lost_and_refused(network: Network) -> None:
    a, old_b = network.start("a", fingerprint="llama"), network.start("b", fingerprint="llama")
    network.send(a, old_b.me, "hello")
    network.run(1.0)
    new_b = network.start("b", fingerprint="qwen")
    network.run(2.0)
    assert [event.peer for event in a.lost()] == [old_b.me]
    assert [event.peer for event in new_b.refused()] == [a.me]


@pytest.mark.parametrize(("version", "is_taken"), [(0, True), (1, True), (2, True), (3, False), (-1, False)])
def test_only_neighbouring_versions_are_taken(network: Network, version: int, is_taken: bool) -> None:
    a, b = network.start("a"), network.start("b")
    a.links.send(b.me, Cancel(reason="hello"), network.now)
    ((_, frames),) = a.links.take_outgoing()
    network.inject("b", with_header(frames, version=version))
    network.run(1.0)
    assert b.texts_from(a.me) == (["hello"] if is_taken else [])
    for process in (a, b):
        assert [f"version {version}" in event.reason for event in process.refused()] == ([] if is_taken else [True])


def test_malformed_messages_are_counted_and_change_nothing(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "before")
    network.run(1.0)
    good = codec.encode(
        Header(sender="a", incarnation=a.me.incarnation, reply_to="a", to_incarnation=b.me.incarnation, link=1), Alive()
    )
    bad: list[list[bytes]] = [[], [b""], [b"", b""], [b"\xc1", b"\xc1"], good[:1], [*good, b""], [good[0], b"\xc1"]]
    bad += [[b"\x81\xa1x" + b"\x91" * 100_000, good[1]], [good[0], b"\x82\xa4kind\xa5\xff\xff\xff\xff\xff"]]
    for frames in bad:
        b.links.receive(frames, network.now)
    assert b.links.num_malformed == len(bad)
    network.send(a, b.me, "after")
    network.run(1.0)
    assert b.texts_from(a.me) == ["before", "after"]
    assert not a.lost() and not b.lost() and not a.refused() and not b.refused()


def test_a_body_that_cannot_be_read_ends_the_link_on_both_sides(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "before")
    network.run(1.0)
    a.links.send(b.me, Cancel(reason="x"), network.now)
    ((address, frames),) = a.links.take_outgoing()
    network.inject(address, [frames[0], b"\x81\xa4kind\xa3new"])
    network.run(1.0)
    assert b.links.num_malformed == 1
    assert len(a.refused()) == len(b.refused()) == 1
    assert "malformed" in a.refused()[0].reason


def test_a_message_that_no_peer_would_take_is_refused_at_once(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    a, b = network.start("a"), network.start("b")
    with pytest.raises(codec.MessageTooLarge):
        network.send(a, b.me, "x" * 1000)
    network.send(a, b.me, "shorter")
    network.run(1.0)
    assert b.texts_from(a.me) == ["shorter"]
