"""The link to peers of other models and versions, and what cannot be read, one situation at a time."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.protocol import codec
from kvrelay.protocol.messages import PROTOCOL_VERSION, Alive, Cancel, Header, Reject
from tests.unit.protocol.link_network import Network, Process, with_header

ALIVE, GENERATE = codec.encode_body(Alive())[0], msgspec.msgpack.encode({"kind": "generate", "prompt": {}})


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


def test_a_named_successor_of_another_model_refuses_and_its_predecessor_is_lost(network: Network) -> None:
    a, old_b = network.start("a", fingerprint="llama"), network.start("b", fingerprint="llama")
    network.send(old_b, a.me, "hello")
    network.run(1.0)
    new_b = network.start("b", fingerprint="qwen")
    network.send(a, new_b.me, "hello")
    network.run(1.0)
    assert [(event.peer, event.replaced) for event in a.lost()] == [(old_b.me, True)]
    assert [event.peer for event in a.refused()] == [new_b.me]
    assert new_b.texts_from(a.me) == []
    assert not a.links.addresses()


@pytest.mark.parametrize("version", [-1, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_other_versions_are_refused(network: Network, version: int) -> None:
    a, b = network.start("a"), network.start("b")
    a.links.send(b.me, Cancel(reason="hello"), network.now)
    ((_, frames),) = a.links.take_outgoing()
    network.inject("b", with_header(frames, version=version))
    network.run(1.0)
    assert b.texts_from(a.me) == []
    for process in (a, b):
        assert [f"version {version}" in event.reason for event in process.refused()] == [True]


def test_messages_with_malformed_headers_are_counted_and_change_nothing(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "before")
    network.run(1.0)
    good = codec.encode(
        Header(sender="a", incarnation=a.me.incarnation, reply_to="a", to_incarnation=b.me.incarnation, link=1), Alive()
    )
    bad: list[list[bytes]] = [[], [b""], [b"", b""], [b"\xc1", b"\xc1"], good[:1], [*good, b"", b""]]
    bad += [[b"\x81\xa1x" + b"\x91" * 100_000, good[1]]]
    for frames in bad:
        b.links.receive(frames, network.now)
    assert b.links.num_malformed == len(bad)
    network.send(a, b.me, "after")
    network.run(1.0)
    assert b.texts_from(a.me) == ["before", "after"]
    assert not a.lost() and not b.lost() and not a.refused() and not b.refused()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("speaks_next", ["a", "b"])
@pytest.mark.parametrize(
    "body", [[b"\xc1"], [b"\x82\xa4kind\xa5\xff\xff\xff\xff\xff"], [b"\x81\xa4kind\xa3new"], [ALIVE, b""], [GENERATE]]
)
def test_after_a_malformed_body_both_sides_lose_the_link_and_talk_on_a_new_one(
    network: Network, is_first: bool, speaks_next: str, body: list[bytes]
) -> None:
    a, b = network.start("a"), network.start("b")
    if not is_first:
        network.send(a, b.me, "before")
        network.send(b, a.me, "before")
        network.run(1.0)
    send_unreadable(network, a, b, body)
    network.run(10.0)
    assert b.links.num_malformed == 1
    assert [("malformed" in event.reason, event.is_alive) for event in a.lost()] == [(True, False)]
    assert [("malformed" in event.reason, event.is_alive) for event in b.lost()] == [(True, False)] * (not is_first)
    assert not a.refused() and not b.refused()
    sender, receiver = (a, b) if speaks_next == "a" else (b, a)
    network.send(sender, receiver.me, "after")
    network.run(10.0)
    assert receiver.texts_from(sender.me)[-1] == "after"
    assert b.links.num_malformed == 1


def test_a_peer_whose_every_message_is_unreadable_is_not_sent_more_and_more(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    for _ in range(10):
        send_unreadable(network, a, b, [b"\xc1"])
        network.run(1.0)
    assert not a.refused() and not b.refused()
    assert network.num_sent["b"] < 100


def send_unreadable(network: Network, sender: Process, receiver: Process, body: list[bytes]) -> None:
    sender.links.send(receiver.me, Cancel(reason="x"), network.now)
    for address, frames in sender.links.take_outgoing():
        network.inject(address, [frames[0], *body] if codec.decode_header(frames).seq else frames)


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
