"""How long a supervisor waits before it starts a dead service again."""

from __future__ import annotations

from kvrelay.cli.supervisor import HEALTHY_AFTER_S, RestartPauses


def test_the_pauses_of_a_service_that_cannot_start_double_up_to_a_limit() -> None:
    pauses = RestartPauses()
    assert [pauses.after(1.0, became_ready=False) for _ in range(7)] == [0.5, 1, 2, 4, 8, 15, 15]


def test_a_service_that_is_killed_again_and_again_while_it_serves_comes_back_soon() -> None:
    pauses = RestartPauses()
    assert [pauses.after(1.0, became_ready=True) for _ in range(5)] == [0.5, 1, 2, 2, 2]


def test_a_service_that_became_ready_after_failed_starts_does_not_wait_long() -> None:
    pauses = RestartPauses()
    for _ in range(6):
        pauses.after(1.0, became_ready=False)
    assert pauses.after(1.0, became_ready=True) == 2


def test_a_long_run_ends_the_doubling() -> None:
    pauses = RestartPauses()
    for _ in range(6):
        pauses.after(1.0, became_ready=False)
    assert pauses.after(HEALTHY_AFTER_S + 1, became_ready=False) == 0.5
