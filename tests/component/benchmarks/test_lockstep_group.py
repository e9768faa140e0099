"""The benchmark of a group in lockstep: its load, what it counts, and a run of a small group of processes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks import lockstep_group
from benchmarks.client import Request
from benchmarks.lockstep_group import BURSTS, HEAD, VARIANTS, Outcome, main, row, uneven_load

pytestmark = pytest.mark.component
NUM_REQUESTS = 4


@pytest.mark.parametrize("burst", BURSTS.values())
def test_the_load_has_its_rate_and_bursts_whatever_the_seed(burst: int) -> None:
    requests = uneven_load(1000, 8.0, burst, seed=3)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert set(Counter(arrivals).values()) == {burst}
    assert len(requests) / arrivals[-1] == pytest.approx(8.0, rel=0.25)
    lengths = [(len(request.prompt), request.num_output) for request in requests]
    assert lengths == [(len(each.prompt), each.num_output) for each in uneven_load(1000, 8.0, burst, seed=3)]
    assert lengths != [(len(each.prompt), each.num_output) for each in uneven_load(1000, 8.0, burst, seed=4)]


def test_what_a_load_amounts_to() -> None:
    prompt = np.zeros(3, np.int32)
    requests = [Request(1.0, prompt, 2, [1.5, 2.0]), Request(2.0, prompt, 3, [3.0, 3.25, 3.5])]
    outcome = Outcome(
        requests, Counter({"all.no_wait": 2, "mixed.delay": 3, "mixed.wait_timeout": 1, "none.no_prompt": 9})
    )
    assert outcome.tokens_per_s == 5 / 2.5
    assert outcome.delayed == 3 / 6
    cells = [cell.strip() for cell in row("on", outcome).strip("|").split("|")]
    assert len(cells) == HEAD.splitlines()[0].count("|") - 1
    assert cells[:3] == ["on", "2", "0.75"] and cells[-1] == "0.50"
    assert Outcome(requests, Counter()).delayed == 0.0


@pytest.mark.slow
def test_a_group_of_two_serves_both_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(lockstep_group, "VARIANTS", {"on": VARIANTS["on"]})
    flags = ["--size=2", "--rate=20", f"--requests={NUM_REQUESTS}", "--repeats=1", f"--write={page}"]
    monkeypatch.setattr(sys, "argv", ["lockstep_group", *flags])
    main()
    for text in (page.read_text(), capsys.readouterr().out):
        assert f"2 ranks, {NUM_REQUESTS} requests" in text
    rows = [line for line in page.read_text().splitlines() if line.startswith("| on |")]
    assert len(rows) == len(BURSTS)
    for line in rows:
        cells = [float(cell) for cell in line.strip("|").split("|")[1:]]
        assert cells[0] > 0 and min(cells) >= 0 and cells[-1] <= 1
