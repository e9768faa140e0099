"""The benchmark of handoffs between unequal numbers of ranks brings all blocks over, also between processes."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import sharded_transfer
from benchmarks.sharded_transfer import run

pytestmark = pytest.mark.component
SIZES = ((1, 2), (2, 1), (2, 2))


@pytest.mark.parametrize("in_processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_table_has_every_size(in_processes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_transfer, "SIZES", SIZES)
    head, _, *rows = asyncio.run(run(1, "zmq", in_processes=in_processes)).splitlines()
    assert all(row.count("|") == head.count("|") == (8 if in_processes else 6) for row in rows)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [each[0] for each in cells] == ["1:2", "2:1", "2:2"]
    assert [each[4] for each in cells] == ["2.00", "2.00", "2.00"], "runs of a block"
    assert cells[-1][2] == "1.00", "of equal sizes"
    assert all(float(cell) > 0 for each in cells for cell in each[5:]), "CPU time"
