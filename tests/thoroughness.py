"""How much of a test `make test` runs: 20% of its random examples, and some of its cases if there are many.
`make test-all` runs all."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable

import hypothesis
import pytest

ALL_EXAMPLES = 100
"""The number for a test that names none. Numbers given to `examples` are scaled in proportion to it."""
EVERYDAY_EXAMPLES = 20
THOROUGH = "thorough"


def register_profiles() -> None:
    """The profiles for `--hypothesis-profile`. Loads the everyday one."""
    for name, max_examples in (("everyday", EVERYDAY_EXAMPLES), (THOROUGH, ALL_EXAMPLES)):
        hypothesis.settings.register_profile(
            name,
            max_examples=max_examples,
            deadline=None,  # a slow machine is no failure
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
            derandomize="CI" in os.environ,  # a change fails because of its own code, and not because of new examples
            print_blob=True,
        )
    hypothesis.settings.load_profile("everyday")


def examples(num_examples: int) -> int:
    """Scales a number of examples to the profile in use."""
    return max(1, num_examples * hypothesis.settings().max_examples // ALL_EXAMPLES)


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Marks as slow all but `n` cases of each test with the marker `everyday(n)`; of each device if it runs on several.
    Which ones stay is drawn by the test's name, so that all values of every parameter occur over the whole suite."""
    cases = defaultdict(list)
    for item in items:
        if (marker := item.get_closest_marker("everyday")) is not None:
            test = item.nodeid.partition("[")[0]
            cases[test, device_of(item), marker.args[0]].append(item)
    for (test, _, num_kept), of_test in cases.items():
        num_slow = max(0, len(of_test) - num_kept)
        for item in random.Random(test).sample(of_test, num_slow):
            item.add_marker("slow")


def device_of(item: pytest.Item) -> str | None:
    """The parameter `device`, where a test has one."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("device")
