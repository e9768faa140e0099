"""Every order in which the events of small handoffs can come, with the real machines; and that the search finds bugs.

`KVRELAY_MODEL_STATES` bounds the larger instances, which run in part unless it is set high enough.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from kvrelay.handoff import receiver, sender
from kvrelay.handoff.receiver import ReceiverHandoff, ReceiverState
from kvrelay.handoff.sender import SenderHandoff
from kvrelay.handoff.transports.base import ReceiverEvent, SenderDrained
from kvrelay.handoff.transports.sharded import LandingProgress, PushProgress
from kvrelay.protocol.messages import Drained, PeerRef, TokenEntry
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.state_machine import Transition, TransitionTable
from kvrelay_router.dispatch.running_request import TokenIntake
from tests.unit.handoff.check import prefill_side
from tests.unit.handoff.check.search import Counterexample, Explored, explore
from tests.unit.handoff.check.state import Size, State
from tests.unit.handoff.check.world import DISTURBANCES, World, start

LARGE_STATES = int(os.environ.get("KVRELAY_MODEL_STATES", "4000"))
TINY = Size(num_blocks=1, prefill_pool=1, decode_pool=1)


def search(size: Size, at_most: int = 10**9) -> Explored:
    return explore(start(size), DISTURBANCES.__contains__, at_most)


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "copied"])
@pytest.mark.parametrize("disturbance", ["", *sorted(DISTURBANCES - {"cut"})])
@pytest.mark.parametrize("size", [TINY, pytest.param(Size(), marks=pytest.mark.slow)], ids=["tiny", "two blocks"])
def test_one_disturbance_at_any_moment_leaves_nobody_waiting_and_nothing_held(
    disturbance: str, one_sided: bool, size: Size
) -> None:
    budget = ((disturbance, 1),) if disturbance else ()
    explored = search(replace(size, one_sided=one_sided, budget=budget))
    assert explored.is_complete
    assert explored.num_good_ends > 1


def test_a_link_breaks_at_any_moment() -> None:
    """One attempt, by a transport that copies: all else is too large to be visited whole, see `LARGE`."""
    explored = search(replace(TINY, max_attempts=1, one_sided=False, budget=(("cut", 1),)))
    assert explored.is_complete
    assert explored.num_good_ends > 1


RANKS = [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.slow)]


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "copied"])
@pytest.mark.parametrize("disturbance", ["", "fail", "lose", "late", "corrupt"])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_the_parts_of_ranks_come_and_fail_in_any_order(
    ranks: tuple[int, int], disturbance: str, one_sided: bool
) -> None:
    """The failure of one rank's transfer is that of the handoff, and may be repaired by another attempt."""
    budget = ((disturbance, 1),) if disturbance else ()
    max_attempts = 1 if one_sided or ranks[0] > 1 else 2  # all of them with two: the slow test
    explored = search(replace(TINY, ranks=ranks, one_sided=one_sided, max_attempts=max_attempts, budget=budget))
    assert explored.is_complete
    assert explored.num_good_ends > 1


@pytest.mark.slow
@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "copied"])
@pytest.mark.parametrize("disturbance", sorted(DISTURBANCES - {"cut", "lose", "late", "corrupt"}))
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_workers_of_several_ranks_with_a_second_attempt(
    ranks: tuple[int, int], disturbance: str, one_sided: bool
) -> None:
    explored = search(replace(TINY, ranks=ranks, one_sided=one_sided, budget=((disturbance, 1),)))
    assert explored.is_complete


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "copied"])
def test_two_requests_share_pools_that_hold_one(one_sided: bool) -> None:
    assert search(replace(TINY, num_requests=2, one_sided=one_sided)).is_complete


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "copied"])
def test_a_sample_is_granted_what_another_one_holds(one_sided: bool) -> None:
    """Two samples of a prompt of one block: decode has room for it once."""
    explored = search(replace(TINY, num_requests=2, prefill_pool=2, samples=True, one_sided=one_sided))
    assert explored.is_complete


LARGE = {
    "a link breaks, one attempt of one block, one-sided": replace(TINY, max_attempts=1, budget=(("cut", 1),)),
    "a link breaks": Size(budget=(("cut", 1),)),
    "two of each": replace(TINY, num_requests=2, prefills=("p1", "p2"), decodes=("d1", "d2")),
    "two decode workers, one dies": replace(TINY, decodes=("d1", "d2"), budget=(("die", 1),)),
    "two samples, a cancel": replace(TINY, num_requests=2, prefill_pool=2, samples=True, budget=(("cancel", 1),)),
    "two samples, a death": replace(
        TINY, num_requests=2, prefill_pool=2, decodes=("d1", "d2"), samples=True, budget=(("die", 1),)
    ),
    "two samples, lost and late blocks": replace(
        TINY, num_requests=2, prefill_pool=2, samples=True, one_sided=False, budget=(("lose", 1), ("late", 1))
    ),
    "a cancel and a death": replace(TINY, budget=(("cancel", 1), ("die", 1))),
    "everything once": Size(budget=tuple((name, 1) for name in sorted(DISTURBANCES))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_larger_instances_as_far_as_the_bound_allows(name: str) -> None:
    explored = search(LARGE[name], LARGE_STATES)
    assert explored.is_complete or explored.num_states == LARGE_STATES


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_walks_through_large_instances_end_well(seed: int) -> None:
    """Two of each, three requests, pools for two, every disturbance twice: too large to be visited whole."""
    rng = random.Random(seed)
    budget = tuple((name, 2 if name != "die" else 1) for name in sorted(DISTURBANCES))
    for one_sided in (True, False):
        size = Size(3, ("p1", "p2"), ("d1", "d2"), 2, 4, 4, 3, one_sided, samples=seed % 2 > 0, budget=budget)
        world: World = start(size)
        for number in range(3000):
            steps = list(world.steps())
            fair = [step for step in steps if step[0] not in DISTURBANCES]
            if not fair:
                break
            may_disturb = number < 200 and rng.random() < 0.1
            world = world.after(rng.choice(steps if may_disturb else fair))
            world.check()
        assert world.is_good_end


# -- the search finds what is wrong -----------------------------------------------------------------------------------


@contextmanager
def broken(target: type[Any] | ModuleType, name: str, replacement: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, replacement)
        yield


@contextmanager
def broken_row(table: TransitionTable[Any], event: type[Any], replacement: Transition[Any]) -> Iterator[None]:
    """In every state in which the event does something."""
    with pytest.MonkeyPatch.context() as patch:
        for (state, event_class), transition in table.items():
            if event_class is event and "ignore" not in transition.__name__:
                patch.setitem(table, (state, event_class), partial(replacement, transition))
        yield


def _commit_with_the_handoff_alone(self: ReceiverHandoff) -> list[receiver.ReceiverInstruction]:
    if self._handoff is None:
        return []
    self.state = ReceiverState.RUNNING
    return [receiver.StopReceiving(self.reservation), receiver.Commit(self._handoff)]


def _free_at_once(self: ReceiverHandoff, reason: str | None, **more: Any) -> list[receiver.ReceiverInstruction]:
    self._is_one_sided = False
    return _end(self, reason, **more)


def _release_without_draining(self: SenderHandoff) -> list[sender.SenderInstruction]:
    self._granted = None
    return []


def _waits_on(transition: Any, self: ReceiverHandoff, event: object) -> list[receiver.ReceiverInstruction]:
    return []


def _without_drained(transition: Any, self: SenderHandoff, event: SenderDrained) -> list[sender.SenderInstruction]:
    return [
        made
        for made in transition(self, event)
        if not (isinstance(made, sender.SendTo) and isinstance(made.body, Drained))
    ]


def _without_need_decode(self: SenderHandoff, worker: PeerRef, reason: str) -> list[sender.SenderInstruction]:
    return _replace_decode(self, worker, reason)[:-1]


def _repeats_the_first_token(self: TokenIntake, entry: TokenEntry) -> None:
    self.output.extend(entry.token_ids)


_end = ReceiverHandoff._end
_replace_decode = SenderHandoff._replace_decode

BUGS: dict[str, tuple[Callable[[], AbstractContextManager[None]], str, str]] = {
    "decode runs without all blocks": (
        lambda: broken(ReceiverHandoff, "_commit_if_complete", _commit_with_the_handoff_alone),
        "", "runs on d with blocks",
    ),
    "no quarantine": (
        lambda: broken(ReceiverHandoff, "_end", _free_at_once), "cancel", "which is free or another's",
    ),
    "a grant is dropped with writes in flight": (
        lambda: broken(SenderHandoff, "_stop_pushing", _release_without_draining),
        "cancel", "which is free or another's",
    ),
    "blocks that were lost are waited for": (
        lambda: broken_row(receiver.TRANSITIONS, receiver.BlocksOverdue, _waits_on), "lose", "a good end",
    ),
    "Drained is not sent": (
        lambda: broken_row(sender.TRANSITIONS, SenderDrained, _without_drained), "cancel", "a good end",
    ),
    "a refusal is not passed on": (
        lambda: broken(SenderHandoff, "_replace_decode", _without_need_decode),
        "deadline", "a good end",
    ),
    "a token is delivered twice": (
        lambda: broken(TokenIntake, "handle", _repeats_the_first_token), "", "tokens [0, 0]",
    ),
}  # fmt: skip


@pytest.mark.everyday(3)
@pytest.mark.parametrize("name", BUGS)
def test_the_search_finds_a_known_bug_and_shows_the_way_to_it(name: str) -> None:
    make, disturbance, trouble = BUGS[name]
    with make(), pytest.raises(Counterexample) as found:
        search(Size(one_sided=disturbance != "lose", budget=((disturbance, 1),) if disturbance else ()))
    assert trouble in str(found.value)
    assert found.value.trace[0][0] in ("place", "cancel")


def _lands_on_one_rank(self: LandingProgress, rank: int, event: ReceiverEvent) -> ReceiverEvent:
    return event


def _drains_with_the_first_rank(self: PushProgress, pushes: Any, event: SenderDrained) -> SenderDrained:
    return event


RANK_BUGS: dict[str, tuple[type[Any], str, object, tuple[int, int], str, str]] = {
    "one rank's parts are taken for the whole block": (
        LandingProgress, "handle", _lands_on_one_rank, (1, 2), "", "runs on d with blocks",
    ),
    "drained when one rank has drained": (
        PushProgress, "_drained", _drains_with_the_first_rank, (2, 1), "cancel", "which is free or another's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RANK_BUGS)
def test_the_search_finds_a_known_bug_of_ranks(name: str) -> None:
    target, method, replacement, ranks, disturbance, trouble = RANK_BUGS[name]
    with broken(target, method, replacement), pytest.raises(Counterexample) as found:
        search(replace(TINY, ranks=ranks, budget=((disturbance, 1),) if disturbance else ()))
    assert trouble in str(found.value)


def _ends_nothing(state: State, who: str, key: SequenceKey) -> None: ...


def test_the_search_finds_a_cancel_that_is_not_carried_out() -> None:
    trouble = r"a good end|IllegalEvent|do not add up|free or another's"
    with broken(prefill_side, "cancel", _ends_nothing), pytest.raises(Counterexample, match=trouble):
        search(Size(budget=(("cancel", 1),)))
