"""Links that strangers and forgers send changed recorded messages to: nothing raises, memory is bounded, answers are
bounded, and honest peers get every message in order and once."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol import codec
from kvrelay.protocol.link import Links
from kvrelay.protocol.messages import AnyBody, Cancel
from tests.fakes.traffic import changed, recorded_traffic
from tests.thoroughness import examples
from tests.unit.protocol.link_network import PEER_TIMEOUT_S, Network, Process
from tests.unit.protocol.message_strategies import KINDS

MAX_FORGED_SEQ = 8
NUMBERS = st.one_of(st.integers(0, MAX_FORGED_SEQ), st.sampled_from([2**31, 2**63 - 1, 2**64 - 1, -1]))
NOT_RECORDED = {"wake_rank"}
"""Sent between processes that the recorder does not see."""


def test_the_recorded_traffic_is_of_this_version_and_has_every_kind() -> None:
    kinds = {str(kind.__struct_config__.tag) for kind in KINDS}
    assert {each.kind for each in recorded_traffic()} == kinds - NOT_RECORDED
    for each in recorded_traffic():
        frames = [each.header, each.body]
        assert codec.decode_header(frames).sender
        body: AnyBody = codec.decode_body(frames)
        assert body.__struct_config__.tag == each.kind


def frames_of(data: st.DataObject, victim: Process, **identity: object) -> list[bytes]:
    """A recorded message as it is or changed, addressed to the victim. `identity` overrides the sender's names."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    each = rng.choice(recorded_traffic())
    header: dict[str, Any] = msgspec.msgpack.decode(each.header)
    header |= {"to_incarnation": victim.me.incarnation, "to_link": data.draw(st.sampled_from([0, 0, 1, 2]))}
    header |= {name: data.draw(NUMBERS) for name in ("seq", "link") if data.draw(st.booleans())}
    header |= identity
    packed = msgspec.msgpack.encode(header)
    if not identity:
        packed = changed(packed, rng)
    return [packed, changed(each.body, rng)]


class Attack:
    """A worker and its honest router, and messages of others."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self.network = Network()
        self.router, self.worker = self.network.start("r-honest"), self.network.start("w-honest", "hash-model")
        self.num_sent = 0

    def talk(self, num_messages: int = 3) -> None:
        for _ in range(num_messages):
            self.network.send(self.router, self.worker.me, f"{self.num_sent}")
            self.network.send(self.worker, self.router.me, f"{self.num_sent}")
            self.num_sent += 1

    def inject(self, frames: list[bytes]) -> None:
        links = self.worker.links
        links.receive(frames, self.network.now)
        answers = links.take_outgoing()
        assert len(answers) <= 1, "a message must not cause several"
        self.worker.events += links.take_events()

    def check_memory(self) -> None:
        links = self.worker.links
        assert len(links._links) <= links.settings.max_peers
        assert len(links._refusals) <= Links.MAX_REFUSALS_KEPT
        assert len(links._known_incarnations) <= Links.MAX_PEER_IDS_KEPT

    def heal(self) -> None:
        self.network.run(3 * PEER_TIMEOUT_S)
        self.talk(MAX_FORGED_SEQ + 1)  # each forged message takes the place of the one with its number
        self.network.run(PEER_TIMEOUT_S)
        for process in (self.router, self.worker):
            process.events.clear()
        self.talk()
        self.network.run(PEER_TIMEOUT_S)
        expected = [f"{number}" for number in range(self.num_sent - 3, self.num_sent)]
        assert self.worker.texts_from(self.router.me) == self.router.texts_from(self.worker.me) == expected
        assert not self.worker.lost() and not self.router.lost()


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_strangers_disturb_no_link_of_others(data: st.DataObject) -> None:
    attack = Attack(data)
    for _ in range(data.draw(st.integers(1, 12))):
        attack.talk(1)
        identity = {} if data.draw(st.booleans()) else {"sender": data.draw(st.sampled_from("xy"))}
        attack.inject(frames_of(data, attack.worker, **identity))
        attack.network.run(data.draw(st.sampled_from([0.0, 0.05, 1.0])))
        attack.check_memory()
    attack.network.run(PEER_TIMEOUT_S)
    everything = [f"{number}" for number in range(attack.num_sent)]
    assert attack.worker.texts_from(attack.router.me) == attack.router.texts_from(attack.worker.me) == everything
    assert not [event for event in attack.worker.lost() if event.peer == attack.router.me]
    attack.heal()


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_after_forged_messages_of_a_peer_its_link_heals(data: st.DataObject) -> None:
    """The forger knows all names and numbers, as only somebody on an unencrypted network can. What it forged may be
    delivered, but the two talk again within their timeouts."""
    attack = Attack(data)
    attack.talk()
    attack.network.run(1.0)
    for _ in range(data.draw(st.integers(1, 8))):
        me = attack.router.me
        incarnation = data.draw(st.sampled_from([me.incarnation, me.incarnation, "0", "~newer"]))
        identity = {"sender": me.peer_id, "incarnation": incarnation, "reply_to": me.address, "fingerprint": ""}
        attack.inject(frames_of(data, attack.worker, **identity))
        if data.draw(st.booleans()):
            attack.talk(1)
        attack.network.run(data.draw(st.sampled_from([0.0, 0.05, 1.0])))
        attack.check_memory()
    attack.heal()


def test_the_refusals_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "MAX_REFUSALS_KEPT", 5)
    worker = Network().start("worker", "our model")
    header = codec.decode_header([recorded_traffic()[0].header, b""])
    for number in range(20):
        stranger = msgspec.structs.replace(header, sender=f"s{number}", fingerprint="another model")
        worker.links.receive([codec.encode_header(stranger), *codec.encode_body(Cancel(reason="x"))], 0.0)
        assert len(worker.links._refusals) <= 5
    assert len(worker.links.take_events()) == 20
