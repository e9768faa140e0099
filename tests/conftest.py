"""What all tests share: markers by folder, and a Redis of their own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import deferred_collection
from tests.fakes import zmq_contexts
from tests.fakes.shared_ssl_contexts import share_ssl_contexts
from tests.thoroughness import device_of, mark_slow_cases, register_profiles

pytest_plugins = ["tests.time_budget", "tests.time_limit"]

KINDS = ("unit", "component", "e2e", "faults", "gpu")
TESTS = Path(__file__).parent
BYTES_PER_PROCESS = 2 << 30
"""What pytest and the services of its tests take, at most."""

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: every core has a pytest of its own

REQUEST_LIMIT_S = 3.0
"""Of a test's time limit, for each request of `--requests`: a storm on two busy cores answers about one in a second."""

register_profiles()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--requests", type=int, default=None, help="how many random constrained requests a test sends")


def pytest_configure(config: pytest.Config) -> None:
    zmq_contexts.watch()
    share_ssl_contexts()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are cores, because tests wait a quarter of their time; fewer if the memory is not there."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    num_fitting = int(psutil.virtual_memory().available // BYTES_PER_PROCESS)
    return max(1, min(len(os.sched_getaffinity(0)) + 1, num_fitting))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Imports make a million objects that stay. Scanning them takes most of a second, in every collection that a test
    asks for, in those that Python makes by itself, and at the end of the process."""
    with deferred_collection():
        yield
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test is of the kind that its folder says; but one of `gpu` whose parameter `device` is no GPU is a component
    test, which proves the test's own code. In several processes files of all folders run side by side."""
    num_requests = config.getoption("--requests")
    for item in items:
        if num_requests and item.get_closest_marker("sends_requests"):
            item.add_marker(pytest.mark.timeout(max(900.0, REQUEST_LIMIT_S * num_requests)), append=False)
        if kind_of(item) == "gpu" and runs_on_cpu(item):
            item.add_marker("component")
        elif kind_of(item) in KINDS:
            item.add_marker(kind_of(item))
    mark_slow_cases(items)
    if hasattr(config, "workerinput"):
        from tests.each_test_once import places  # imports pytest-xdist, which need not be there

        place = places(item.path for item in items)
        items.sort(key=lambda item: place[item.path])


def runs_on_cpu(item: pytest.Item) -> bool:
    return device_of(item) in ("cpu", "pretended")


def kind_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """At the end of a file its fixtures have closed their ZMQ contexts."""
    yield
    if nextitem is None or nextitem.path != item.path:
        zmq_contexts.assert_none_since(frozenset())


@pytest.fixture(autouse=True)
def _closes_zmq_contexts() -> Iterator[None]:
    """A test leaves no ZMQ context open; those of the fixtures that it shares with others were open before."""
    before = zmq_contexts.open_contexts()
    yield
    zmq_contexts.assert_none_since(before)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A real Redis for tests that keep apart by prefix or model; one that stops or empties it needs its own."""
    with EmbeddedRedis() as server:
        yield server
