"""The GPU benchmark's own code: its flags, parts that hang or are cut off, what it makes of a trace."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity

from benchmarks.gpu.__main__ import main, run_limited
from benchmarks.gpu.figures import Recorder, figures, read_entries
from benchmarks.gpu.idle import Activity, device_activities, idleness, make_profiler
from benchmarks.gpu.parts.kernels import by_kind
from benchmarks.gpu.report import PartResult, Report
from tests.fakes.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--part", "decode,sleep"], "unknown: sleep (allowed: parity, floors,"),
        (["--limit", "decode"], "seconds are a number, as in decode=300"),
        (["--limit", "sleep=3"], "unknown: 'sleep'"),
        (["--add"], "--write names no page of an earlier run"),
        (["--device", "cuda:77"], "device = cuda:77: torch finds"),
    ],
)
def test_bad_flags_are_refused_with_what_is_allowed(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", "--smoke", *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    sleeper = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    program = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {sleeper!r}])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
{sleeper}
"""
    # The limit is the time to start: however long that takes, the wait for its end comes after it.
    assert run_limited([sys.executable, "-c", program], limit_s=2.0, grace_s=0.1) == "cut off after 2 s"
    left = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], PATIENCE_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], gone


def test_a_part_that_fails_says_so() -> None:
    assert run_limited([sys.executable, "-c", "raise SystemExit(3)"], PATIENCE_S).startswith("failed with status 3")


def test_rows_outlive_a_part_that_was_cut_off_in_the_middle_of_one(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    recorder = Recorder(path, deadline=0.0)
    recorder.row("Table", step_ms=figures([1.0, 2.0]))
    assert not recorder.has_time("the rest")
    with path.open("a") as file:
        file.write('{"table": "Tab')
    assert read_entries(path) == [
        {"table": "Table", "cells": {"step ms": {"figures": [1.0, 2.0], "digits": 2}}},
        {"note": "Not measured, for want of time: the rest."},
    ]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.booleans()), min_size=1, max_size=12))
def test_idle_time_is_what_no_activity_covers(drawn: list[tuple[int, int, bool]]) -> None:
    """Against microseconds counted one by one, each to the activity that ended last before it."""
    activities = [Activity(start, start + length, ends_step) for start, length, ends_step in drawn]
    first, last = min(a.start for a in activities), max(a.end for a in activities)
    idle = [t for t in range(int(first), int(last)) if not any(a.start <= t < a.end for a in activities)]
    between = within = 0
    for moment in idle:
        before = [a for a in activities if a.end <= moment]
        latest = max(a.end for a in before)
        ending = {a.ends_step for a in before if a.end == latest}
        if len(ending) > 1:
            return  # two ended at one moment: either may be taken
        between += ending == {True}
        within += ending == {False}
    found = idleness(activities)
    assert found.between_steps * (last - first) == pytest.approx(between)
    assert found.within_steps * (last - first) == pytest.approx(within)


def test_the_profiler_sees_what_other_threads_do() -> None:
    profiler = make_profiler(ProfilerActivity.CPU)
    profiler.start()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.ones, 3).result()
    profiler.stop()
    events = profiler.events()
    assert events is not None
    assert any(event.name == "aten::ones" for event in events)
    assert device_activities(profiler) == [], "the CPU's work is not the device's"


def test_a_trace_without_any_activity_is_no_idle_device() -> None:
    with pytest.raises(ValueError, match="no activity"):
        idleness([])


def test_a_later_run_of_other_parts_keeps_the_earlier_ones_with_their_floors(tmp_path: Path) -> None:
    page, cpu = tmp_path / "gpu.md", torch.device("cpu")
    rate = {"table": "Floors", "cells": {"what": "copy", "rate": figures([40.0, 50.0], 1), "unit": "GB/s"}}
    step = {"table": "Decoding step", "cells": {"batch": 1, "step ms": figures([2.0])}}
    first = Report(cpu, "a model", "first")
    first.parts = {
        "floors": PartResult("Floors", "", "done", 1.0, [rate]),
        "decode": PartResult("Decoding", "", "done", 1.0, [step]),
    }
    first.write(page)
    for command in ("second", "third"):
        later = Report(cpu, "a model", command, {"floors": PartResult("Floors", ""), command: PartResult(command, "")})
        later.adopt(page)
        later.write(page)
        assert later.parts["floors"].entries == []
        assert later.parts["decode"].entries[0] == step
    notes = [entry["note"] for entry in later.parts["decode"].entries if "note" in entry]
    assert notes == ["Of an earlier run, in which the device did: copy 45.0 (40.0 to 50.0) GB/s."]
    assert list(later.parts) == ["floors", "third", "second", "decode"]
    with pytest.raises(ValueError, match="another scale"):
        Report(cpu, "another model", "fourth").adopt(page)


def test_kernels_are_counted_by_what_they_do() -> None:
    times = [
        ("nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT", 1.0),
        ("void cublasLt::splitKreduce_kernel<32, 16>", 2.0),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<true>", 4.0),
        ("void flashinfer::AppendPagedKVCacheKernel<128u>", 8.0),
        ("_add_and_norm", 16.0),
        ("Memcpy HtoD (Pinned -> Device)", 32.0),
    ]
    assert by_kind(times) == {"products": 3.0, "attention": 12.0, "others": 48.0}
