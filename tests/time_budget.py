"""A pytest plugin that limits the time of a run: `--time-budget-s` skips each test that may end later. Tests marked
`always` go first and are not skipped. It counts what ran by kind; `python -m tests.time_budget FILE` sums several runs.

Fault runs are ordered under a budget, so that what is skipped is worth least: the first test of every file, then the
others, in both cases by the value of their files. Each file that keeps a system for its tests starts it twice then.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

LONGEST_TEST_S = 120.0
"""What a fault run takes on a slow machine, with the start of its system. It is begun only if it can end."""
FAULTS = "faults"
ALWAYS = "always"
NO_TIME = "no time left"
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
    "test_soak.py",
)
"""Files of fault runs: first those with random faults, then those with one kind of fault, then those of one feature,
which are not named."""

_STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--time-budget-s", type=float, default=None, help="skip what may not end within so many seconds")
    parser.addoption("--counts", type=Path, default=None, help="add what ran, by kind, to this file of JSON lines")


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
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many tests of each kind ran, and how many the budget left out."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            is_late = outcome == "skipped" and NO_TIME in str(report.longrepr)
            kind = report.nodeid.removeprefix("tests/").partition("/")[0]
            counts[kind]["left out for time" if is_late else outcome] += 1
    for line in lines_of(counts):
        terminalreporter.write_line(line)
    path = config.getoption("--counts")
    if path is not None and not hasattr(config, "workerinput"):  # xdist's processes would count their tests again
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(counts) + "\n")


def lines_of(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    return [
        f"{kind}: " + ", ".join(f"{num} {outcome}" for outcome, num in of_kind.items())
        for kind, of_kind in sorted(counts.items())
    ]


def print_sum(path: Path) -> None:
    """Prints the sum of the runs in a file of `--counts`, and as its last line what a reader of CI looks for."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for line in path.read_text(encoding="utf-8").splitlines():
        for kind, of_kind in json.loads(line).items():
            counts[kind].update(of_kind)
    print(*lines_of(counts), sep="\n")
    total = sum(counts.values(), Counter())
    num_failed = total["failed"] + total["error"]
    num_skipped = total.total() - total["passed"] - num_failed
    print(f"{total['passed']} passed, {num_failed} failed, {num_skipped} skipped")


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


if __name__ == "__main__":
    print_sum(Path(sys.argv[1]))
