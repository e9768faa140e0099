"""What all tests share: markers by folder, a Redis of their own, and a budget of time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis

KINDS = ("unit", "component", "e2e", "faults", "gpu")
TESTS = Path(__file__).parent

# A slow machine is no failure. Where CI is set, examples are the same in every run: what a change breaks is its own.
hypothesis.settings.register_profile(
    "kvrelay",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="CI" in os.environ,
    print_blob=True,
)
hypothesis.settings.load_profile("kvrelay")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-budget-s", type=float, default=None, help="skip what would start later than this, in seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test is of the kind that its folder says."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in KINDS:
            item.add_marker(folder)


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s = item.config.getoption("--time-budget-s")
    if budget_s is not None and time.monotonic() - item.config.stash[STARTED] > budget_s:
        pytest.skip("no time left")


STARTED = pytest.StashKey[float]()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A real Redis for tests that keep apart by prefix or model; one that stops or empties it needs its own."""
    with EmbeddedRedis() as server:
        yield server
