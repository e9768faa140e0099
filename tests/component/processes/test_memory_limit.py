"""A process in a control group with a memory limit sizes itself by that limit."""

from __future__ import annotations

import subprocess
import sys

from tests.fakes.memory_groups import memory_group
from tests.fakes.waiting import PATIENCE_S

LIMIT_BYTES = 200 << 20
CODE = """
import sys
sys.stdin.readline()
from kvrelay.machine_memory import available_memory_bytes, machine_memory_bytes
print(machine_memory_bytes(), available_memory_bytes())
"""


def test_memory_is_that_of_the_group() -> None:
    with (
        memory_group() as group,
        subprocess.Popen(
            [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        group.limit(LIMIT_BYTES)
        group.add(process.pid)
        output, _ = process.communicate("go\n", timeout=PATIENCE_S)
        total, available = map(int, output.split())
        assert total == LIMIT_BYTES
        assert 0 < available <= LIMIT_BYTES
