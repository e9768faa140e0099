"""How many random examples a test tries: a part of them in `make test`, all of them in `make test-all`."""

from __future__ import annotations

import os

import hypothesis

ALL_EXAMPLES = 100
"""Of a property without a number of its own; also what the numbers given to `examples` are relative to."""
EVERYDAY_EXAMPLES = 30
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
    """How many of so many examples the run tries."""
    return max(1, num_examples * hypothesis.settings().max_examples // ALL_EXAMPLES)
