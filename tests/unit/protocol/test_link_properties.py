"""What holds for links whatever network, stalls and restarts do, over random schedules of all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import PeerRef
from tests.thoroughness import examples
from tests.unit.protocol.link_network import Network, Process, size_of_state

PEERS = ("router", "prefill", "decode")
PAIRS = tuple(permutations(PEERS, 2))
SETTLE_S = 30.0

Action = Callable[["History"], None]


class History:
    """A network, and the record of what was sent in which life of which link."""

    def __init__(self, seed: int) -> None:
        self.network = Network(seed)
        self.everybody: list[Process] = []
        self.sent: dict[tuple[PeerRef, PeerRef], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.num_sent = 0
        for peer in PEERS:
            self.start(peer)

    def start(self, peer: str) -> None:
        self.everybody.append(self.network.start(peer))

    def start_by_clock(self, peer: str, clock: int) -> None:
        """Names of starts follow clocks, which may be set back. What the predecessor sent has come before."""
        self.network.run(0.01)
        name = f"{clock:06}"
        if name not in {process.me.incarnation for process in self.everybody}:
            self.everybody.append(self.network.start(peer, incarnation=name))

    def send(self, sender: str, peer: str, num_messages: int) -> None:
        process, target = self.network.processes[sender], self.network.processes[peer].me
        if process.is_running:
            for _ in range(num_messages):
                self.send_to(process, target)

    def send_to_predecessor(self, sender: str, peer: str) -> None:
        process = self.network.processes[sender]
        earlier = [p.me for p in self.everybody if p.me.peer_id == peer][-2:]
        if process.is_running:
            self.send_to(process, earlier[0])

    def send_to(self, process: Process, target: PeerRef) -> str:
        life = sum(event.peer == target for event in process.lost())
        text = f"{self.num_sent}"
        self.num_sent += 1
        self.sent[process.me, target][life].append(text)
        self.network.send(process, target, text)
        return text

    def settle(self) -> None:
        self.network.heal()
        for peer in PEERS:
            self.network.resume(peer)
        self.network.run(SETTLE_S)

    def check_deliveries(self) -> None:
        """Each life of a link at the receiver saw a prefix of one life at the sender; one not lost saw all of it."""
        for receiver in self.everybody:
            assert {e.header.to_incarnation for e in receiver.events if isinstance(e, Delivered)} <= {
                receiver.me.incarnation
            }
            for sender in self.everybody:
                sent = self.sent[sender.me, receiver.me]
                lives_seen = receiver.lives_with(sender.me)
                for seen in filter(None, lives_seen):
                    assert any(seen == texts[: len(seen)] for texts in sent.values()), (seen, dict(sent))
                if receiver.is_dead or sender.is_dead:
                    continue
                current = sent[sum(event.peer == receiver.me for event in sender.lost())]
                if current:
                    assert lives_seen[-1] == current


durations = st.sampled_from([0.02, 0.1, 0.7, 2.0, 4.5, 6.0, 6.0])
peers = st.sampled_from(PEERS)
pairs = st.sampled_from(PAIRS)
sends = st.builds(lambda pair, n: lambda h: h.send(*pair, n), pairs, st.integers(1, 8))
pauses = st.builds(lambda duration: lambda h: h.network.run(duration), durations)
weather = st.builds(
    lambda loss, delay: lambda h: vars(h.network).update(loss=loss, delay_s=(0.0, delay)),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from([0.002, 0.2, 2.0]),
)
accidents = st.one_of(
    st.builds(lambda pair: lambda h: h.network.partition(*pair), pairs),
    st.builds(lambda pair: lambda h: h.network.cut.add(pair), pairs),
    st.builds(lambda: lambda h: h.network.heal()),
    st.builds(lambda peer: lambda h: h.network.stop(peer), peers),
    st.builds(lambda peer: lambda h: h.network.resume(peer), peers),
    st.builds(lambda peer: lambda h: h.start(peer), peers),
    st.builds(lambda pair: lambda h: h.send_to_predecessor(*pair), pairs),
)


steps = st.tuples(sends, st.one_of(weather, accidents), pauses)
schedules = st.lists(steps, min_size=3, max_size=15).map(lambda chosen: [action for step in chosen for action in step])


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), schedules)
def test_deliveries_are_in_order_and_once_and_links_heal(seed: int, actions: list[Action]) -> None:
    history = History(seed)
    for action in actions:
        action(history)
    history.settle()
    history.check_deliveries()

    num_events = {id(process): len(process.lost()) for process in history.everybody}
    for sender, peer in PAIRS:
        history.send(sender, peer, 3)
    history.network.run(3.0)
    history.check_deliveries()
    for process in history.network.processes.values():
        assert len(process.lost()) == num_events[id(process)]
        assert size_of_state(process.links) == len(PEERS) - 1


starts_by_any_clock = st.builds(
    lambda peer, clock: lambda h: h.start_by_clock(peer, clock), peers, st.integers(0, 999_999)
)
unclocked_steps = st.tuples(sends, st.one_of(starts_by_any_clock, accidents), pauses)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.lists(unclocked_steps, min_size=3, max_size=15))
def test_who_is_reported_replaced_has_ended_whatever_clocks_say(seed: int, steps: list[tuple[Action, ...]]) -> None:
    history = History(seed)
    for action in [action for step in steps for action in step]:
        action(history)
        dead = {process.me for process in history.everybody if process.is_dead}
        for process in history.everybody:
            assert {event.peer for event in process.lost() if event.replaced} <= dead


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.one_of(sends, pauses), min_size=1, max_size=20))
def test_a_network_that_only_delays_costs_no_link(seed: int, actions: list[Action]) -> None:
    history = History(seed)
    history.network.delay_s = 0.0, 0.5
    for action in actions:
        action(history)
    history.settle()
    history.check_deliveries()
    assert [event for process in history.everybody for event in process.lost()] == []
    assert all(size_of_state(process.links) <= len(PEERS) - 1 for process in history.everybody)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), schedules)
def test_once_healed_idle_links_exchange_nothing_but_life_signs(seed: int, actions: list[Action]) -> None:
    history = History(seed)
    for action in actions:
        action(history)
    history.settle()
    network = history.network
    network.num_sent.clear()
    network.run(20.0)
    most = (len(PEERS) - 1) * (20.0 / network.settings.alive_interval_s + 1)
    assert all(network.num_sent[peer] <= most for peer in PEERS)
