"""How long a supervisor waits before it starts a dead service again."""

from __future__ import annotations

import pytest

from kvrelay.cli.supervisor import HEALTHY_AFTER_S, RestartPauses

FAILED, KILLED, LONG = (1.0, False), (1.0, True), (HEALTHY_AFTER_S + 1, False)


@pytest.mark.parametrize(
    ("runs", "pauses_s"),
    [
        ([FAILED] * 7, [0.5, 1, 2, 4, 8, 15, 15]),
        ([KILLED] * 5, [0.5, 1, 2, 2, 2]),  # while it serves, so it can start
        ([*[FAILED] * 6, KILLED], [0.5, 1, 2, 4, 8, 15, 2]),
        ([*[FAILED] * 3, LONG], [0.5, 1, 2, 0.5]),
    ],
)
def test_pauses_double_up_to_a_limit(runs: list[tuple[float, bool]], pauses_s: list[float]) -> None:
    pauses = RestartPauses()
    assert [pauses.after(ran_s, became_ready=ready) for ran_s, ready in runs] == pauses_s
