"""After any history of stores, evictions, crashes, gaps and Redis' accidents the index is the union of the caches."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.index import publication
from kvrelay.fleet.index.publication import RangeState
from tests.component.fleet.index_world import CHAINS, World

Happening = Callable[[World], None]
NUM_EXAMPLES = 60


def compute(number: int, chain: list[bytes], length: int, world: World) -> None:
    world.workers[number].compute(chain[:length])


def compute_twice(number: int, chain: list[bytes], seed: int, world: World) -> None:
    world.workers[number].compute_twice(chain, random.Random(seed))


def evict(number: int, num_blocks: int, world: World) -> None:
    world.workers[number].cache.evict(num_blocks)


def withdraw(number: int, chain: list[bytes], at: int, world: World) -> None:
    world.workers[number].cache.remove([chain[at]])


def publish(number: int, num_calls: int, loses: str, world: World) -> None:
    for _ in range(num_calls):
        world.publish(world.workers[number], loses=loses)


def everybody_publishes(world: World) -> None:
    for worker in world.workers:
        while world.publish(worker):
            pass


def renew(number: int, world: World) -> None:
    world.publish(world.workers[number], renew=True)


def crash(number: int, world: World) -> None:
    world.crash(number)


def stopped_processes_wake_up(num_calls: int, world: World) -> None:
    """They may still take a range where their successor has none yet, and lose it to it."""
    for zombie in world.zombies[-2:]:
        for _ in range(num_calls):
            world.publish(zombie)


def expire(number: int, world: World) -> None:
    world.expire(number)


def sweep(budget: int, world: World) -> None:
    world.sweep(budget)


def settle(world: World) -> None:
    world.settle()
    for zombie in world.zombies:  # their ranges are gone by now, whatever they believe
        world.publish(zombie, renew=True)
        assert zombie.publication.state is not RangeState.OPEN
    world.zombies.clear()
    world.check_settled()


WORKERS = st.integers(0, 2)
STORES = st.one_of(
    st.builds(partial, st.just(compute), WORKERS, st.sampled_from(CHAINS), st.integers(1, 6)),
    st.builds(partial, st.just(compute_twice), WORKERS, st.sampled_from(CHAINS), st.integers(0, 9)),
    st.builds(partial, st.just(evict), WORKERS, st.integers(1, 12)),
    st.builds(partial, st.just(withdraw), WORKERS, st.sampled_from(CHAINS), st.integers(0, 5)),
)
CALLS = st.one_of(
    st.just(everybody_publishes),
    st.builds(partial, st.just(publish), WORKERS, st.integers(1, 4), st.sampled_from(["", "", "question", "answer"])),
    st.builds(partial, st.just(renew), WORKERS),
    st.just(World.follow),
    st.just(World.follow),
    st.just(World.check_in_time),
    st.builds(partial, st.just(sweep), st.integers(5_000, 70_000)),
)
ACCIDENTS = st.one_of(
    st.builds(partial, st.just(crash), WORKERS),
    st.builds(partial, st.just(stopped_processes_wake_up), st.integers(1, 3)),
    st.builds(partial, st.just(expire), WORKERS),
    st.just(World.empty),
    st.just(World.remember),
    st.just(World.remember),
    st.just(World.roll_back),
    st.just(World.roll_back),
    st.just(World.forget_scripts),
    st.just(World.restart_router),
)
HISTORIES: st.SearchStrategy[list[Happening]] = st.lists(
    st.one_of(STORES, STORES, CALLS, CALLS, ACCIDENTS, st.just(settle)), min_size=30, max_size=60
)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that runs are cut."""
    monkeypatch.setattr(publication, "MAX_BATCH_BLOCKS", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=HISTORIES)
def test_any_history(redis_server: EmbeddedRedis, history: list[Happening]) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        world = World(client, redis_server.url)
        try:
            for happening in [*history, settle]:
                happening(world)
                world.check_always()
        finally:
            world.close()
