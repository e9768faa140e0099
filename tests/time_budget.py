"""A pytest plugin that limits the time of a run: `--time-budget-s` skips each test that may end later. Tests marked
`always` go first and are not skipped.

Fault runs are ordered under a budget, so that what is skipped is worth least: the first test of every file, then the
others, in both cases by the value of their files. Each file that keeps a system for its tests starts it twice then.
"""

from __future__ import annotations

import time

import pytest

LONGEST_TEST_S = 120.0
"""What a fault run takes on a slow machine, with the start of its system. It is begun only if it can end."""
FAULTS = "faults"
ALWAYS = "always"
MOST_VALUABLE = (
    "test_storm.py",
    "test_kill_storm.py",
    "test_processes.py",
    "test_redis_under_streams.py",
    "test_partitions.py",
    "test_disturbed_fleet.py",
    "test_router_death.py",
    "test_supervision.py",
    "test_drains.py",
    "test_rolling_restarts.py",
    "test_soak.py",
)
"""Files of fault runs: first those with random faults, then those with one kind of fault, then those of one feature,
which are not named."""

_STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--time-budget-s", type=float, default=None, help="skip what may not end within so many seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED] = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After deselection and the order of tests/conftest.py."""
    if config.getoption("--time-budget-s") is not None:
        items[:] = sorted(by_value(items), key=lambda item: item.get_closest_marker(ALWAYS) is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s = item.config.getoption("--time-budget-s")
    if item.get_closest_marker(ALWAYS) is not None:
        return
    if budget_s is not None and time.monotonic() - item.config.stash[_STARTED] > budget_s - LONGEST_TEST_S:
        pytest.skip("no time left")


def by_value(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same tests, with fault runs ordered as above and in the places that fault runs had."""
    faults = [item for item in items if item.path.parent.name == FAULTS]
    seen: set[str] = set()
    ranks: dict[str, tuple[bool, int, str]] = {}
    for item in faults:
        file = item.path.name
        place = MOST_VALUABLE.index(file) if file in MOST_VALUABLE else len(MOST_VALUABLE)
        ranks[item.nodeid] = (file in seen, place, file)
        seen.add(file)
    ordered = iter(sorted(faults, key=lambda item: ranks[item.nodeid]))
    return [next(ordered) if item.nodeid in ranks else item for item in items]
