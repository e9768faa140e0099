"""A rank that is lost without its connection being closed holds up neither others nor the end of their processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvrelay.engine.parallel.group_coordinator import GroupCoordinator, GroupNotFormed
from tests.component.engine.tensor_parallel_ranks import free_address
from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.component


@pytest.mark.parametrize(("memory", "status"), [("shared", 0), ("gloo", 1)])  # gloo's collective cannot be cancelled
def test_leaving_ends_a_collective_and_the_process_can_end(memory: str, status: int) -> None:
    address = free_address()
    command = [sys.executable, "-m", "tests.component.engine.leaving_rank", str(address[1]), memory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        idle = GroupCoordinator.connect(1, 2, address, PATIENCE_S)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert output.splitlines() == ["rank 0 of 2 has left the group"] * 2
        assert process.returncode == status
        idle.close()


def test_a_check_ends_the_wait_for_other_ranks() -> None:
    def check() -> None:
        raise ValueError("rank 1 was killed by SIGKILL")

    with pytest.raises(ValueError, match="rank 1 was killed by SIGKILL"):
        GroupCoordinator.connect(0, 2, free_address(), PATIENCE_S, check=check)
    with pytest.raises(GroupNotFormed, match="1 did not come"):
        GroupCoordinator.connect(0, 2, free_address(), 0.1)
