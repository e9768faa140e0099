"""The GPU benchmark's own code: its flags, and what it makes of a trace."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.idle import Activity, device_activities, idleness, make_profiler
from benchmarks.gpu.parts.kernels import by_kind


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "decode,sleep"], "unknown: sleep (allowed: check, floors,"),
        (["--kept", "/no/such/file"], "--kept: there is no file /no/such/file"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_bad_flags_are_refused_with_what_is_allowed(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", "unused", *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


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
