"""Messages beyond the window wait for acknowledgements, in order, and prompts that wait are one copy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol import codec, send_window
from kvrelay.protocol.link import Delivered, Links
from kvrelay.protocol.messages import Cancel, Generate, Prompt
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.send_window import SendWindow
from tests.thoroughness import examples
from tests.unit.protocol.link_network import PEER_TIMEOUT_S, Network, Process

WINDOW = 10_000
TOKENS = bytes(4 * 1000)
NUM_SAMPLES = 128


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_window, "WINDOW_BYTES", WINDOW)


def sample(tokens: bytes = TOKENS) -> Generate:
    return Generate(prompt=Prompt(tokens=tokens, sampling=Sampling(max_tokens=1), num_samples=NUM_SAMPLES))


def window_to(process: Process, peer: Process) -> SendWindow:
    (link,) = process.links._links[peer.me.peer_id].values()
    return link.unacked


def send_samples(network: Network, sender: Process, receiver: Process) -> None:
    for number in range(NUM_SAMPLES):
        sender.links.send(receiver.me, sample(), network.now, request="r", sequence=number)
    network._collect(sender)


def received(process: Process) -> list[int]:
    return [event.header.sequence for event in process.events if isinstance(event, Delivered)]


def test_waiting_samples_of_a_prompt_refer_to_one_copy_of_it(network: Network) -> None:
    a, b = network.start("a"), network.start("b")
    send_samples(network, a, b)
    unacked = window_to(a, b)
    assert len(unacked) == NUM_SAMPLES and len(unacked.in_flight) == 3  # the third one exceeds the window
    assert unacked.held_bytes == unacked.in_flight_bytes < WINDOW + 2 * len(TOKENS)
    assert all(isinstance(each.body, Generate) and each.body.prompt.tokens is TOKENS for each in unacked.waiting)
    assert a.links.is_backed_up(b.me) and not b.links.is_backed_up(a.me)


def test_a_slow_peer_is_never_lost(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them together exceed every limit many times."""
    monkeypatch.setattr(Links, "MAX_UNACKED_BYTES", 2 * WINDOW)
    monkeypatch.setattr(Links, "MAX_HELD_BYTES", 2 * WINDOW)
    network.delay_s = (0.4, 0.5)
    a, b = network.start("a"), network.start("b")
    send_samples(network, a, b)
    for _ in range(100):
        network.run(PEER_TIMEOUT_S)
        assert window_to(a, b).in_flight_bytes < WINDOW + 2 * len(TOKENS)
    assert received(b) == list(range(NUM_SAMPLES))
    assert not a.lost() and not b.lost() and not window_to(a, b) and not window_to(a, b).held_bytes


def test_a_window_opens_as_soon_as_much_was_received(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "ACK_BYTES", WINDOW // 2)
    network.delay_s = (0.0001, 0.0002)
    a, b = network.start("a"), network.start("b")
    network.send(a, b.me, "hello")
    network.run(1.0)
    send_samples(network, a, b)
    network.run(0.04)  # no tick falls into this time but that of its end
    assert len(received(b)) == NUM_SAMPLES + 1


def test_a_message_that_is_too_large_is_refused_while_others_wait(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 8000)
    a, b = network.start("a"), network.start("b")
    send_samples(network, a, b)
    with pytest.raises(codec.MessageTooLarge):
        a.links.send(b.me, sample(bytes(8000)), network.now)
    network.run(10.0)
    assert received(b) == list(range(NUM_SAMPLES))


@settings(max_examples=examples(100))
@given(st.data())
def test_all_messages_come_in_order_over_a_bad_network(data: st.DataObject) -> None:
    network = Network(seed=data.draw(st.integers(0, 1000)))
    a, b = network.start("a"), network.start("b")
    network.loss = data.draw(st.sampled_from([0.0, 0.1, 0.3]))
    network.repeat = data.draw(st.sampled_from([0.0, 0.3]))
    num_sent = 0
    for _ in range(data.draw(st.integers(1, 6))):
        for size in data.draw(st.lists(st.sampled_from([1, 700, 3000, 25_000]), max_size=20)):
            body = sample(bytes(4 * size)) if data.draw(st.booleans()) else Cancel(reason="x" * size)
            a.links.send(b.me, body, network.now, sequence=num_sent)
            num_sent += 1
        network._collect(a)
        network.run(data.draw(st.sampled_from([0.0, 0.1, 2.0])))
        if num_sent:
            unacked = window_to(a, b)
            assert unacked.held_bytes == sum(each.held_bytes for each in unacked)
            assert unacked.in_flight_bytes == sum(each.held_bytes for each in unacked.in_flight)
    network.heal()
    network.run(300.0)
    assert received(b) == list(range(num_sent)) and not a.lost() and not b.lost()
