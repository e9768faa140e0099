"""The number of random examples of a test: `make test` runs 30% of them, `make test-all` runs all."""

from __future__ import annotations

import os

import hypothesis

ALL_EXAMPLES = 100
"""The number for a test that names none. Numbers given to `examples` are scaled in proportion to it."""
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
    """Scales a number of examples to the profile in use."""
    return max(1, num_examples * hypothesis.settings().max_examples // ALL_EXAMPLES)
