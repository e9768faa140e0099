"""LoadFigures out of records whose times are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from benchmarks.cpu_kernels_steps import StepCase, Work, attended_keys, read_keys
from kvrelay_bench.answer_reader import Record
from kvrelay_bench.load_figures import BenchSlo, LoadFigures, Ratio, Spread, figures
from kvrelay_bench.load_generator import LoadOutcome
from kvrelay_bench.report import MAX_COLUMNS, comparison_table, load_table
from kvrelay_bench.traces import TracedRequest
from kvrelay_bench.workload import Shape, Wire, arrival_times, synthetic, traced


def record(
    intended_s: float, *pieces_s: float, ended_s: float, num_output: int | None = None, error: str = ""
) -> Record:
    return Record(intended_s, intended_s + 0.001, ended_s, list(pieces_s), 10, num_output, None, error)


def test_figures_count_from_the_intended_time() -> None:
    records = [
        record(0.0, 0.5, 1.0, 1.5, ended_s=1.6, num_output=11),
        record(1.0, 1.2, ended_s=1.2, num_output=1),
        record(2.0, ended_s=4.0, error="status 500: no"),
    ]
    found = figures(LoadOutcome(records, 0.1, [0.0, 0.002]), BenchSlo(ttft_s=0.3))
    assert (found.num_requests, found.num_failed, found.errors) == (3, 1, {"status 500: no": 1})
    assert found.seconds == 4.0 and found.requests_s == 0.5
    assert found.output_tokens_s == 3.0 and found.prompt_tokens_s == 5.0
    assert found.ttft_s.max == 0.5 and math.isclose(found.ttft_s.p50, 0.35)
    assert found.tpot_s.p50 == 0.1  # of the one answer that has a second token
    assert found.itl_s.mean == 0.5 and found.e2e_s.max == 1.6
    assert (found.good_share, found.goodput) == (1 / 3, 0.25)
    assert math.isclose(found.lag_s.max, 0.001)
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["errors"] == {"status 500: no": 1}


def test_nothing_that_succeeded_is_no_figure() -> None:
    found = figures(LoadOutcome([record(0.0, ended_s=1.0, error="no")], 0.0, []), BenchSlo())
    assert math.isnan(found.ttft_s.p50) and found.as_json()["ttft_s"]["p50"] is None
    assert found.requests_s == 0


def test_a_slo_holds_all_its_bounds() -> None:
    good = record(0.0, 0.1, 0.2, ended_s=0.3, num_output=2)
    assert BenchSlo().is_met(good) and BenchSlo(0.2, 0.2, 0.4).is_met(good)
    assert (
        not BenchSlo(ttft_s=0.05).is_met(good)
        and not BenchSlo(tpot_s=0.05).is_met(good)
        and not BenchSlo(e2e_s=0.2).is_met(good)
    )
    assert not BenchSlo().is_met(record(0.0, 0.1, ended_s=0.1, error="no"))


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_a_spread_is_ordered_and_within_its_values(values: list[float]) -> None:
    spread = Spread.of(values)
    assert min(values) <= spread.p50 <= spread.p90 <= spread.p95 <= spread.p99 <= spread.max == max(values)


def test_ratios_are_taken_round_by_round() -> None:
    ratio = Ratio.of([(1.0, 2.0), (10.0, 10.0), (4.0, 2.0)])
    assert (ratio.median, ratio.least, ratio.most) == (1.0, 0.5, 2.0)


def test_doubts_are_told() -> None:
    late = Record(0.0, 1.0, 2.0, [1.5], None, None)
    found = figures(LoadOutcome([late], 0.95, [0.5] * 9), BenchSlo())
    assert len(found.doubts) == 4


def test_a_late_generator_is_told_only_if_it_matters() -> None:
    """A delay counts against the same quantile of the figure that it is part of."""
    records = [Record(t := 0.1 * n, t + 0.004, t + 1, [t + 0.2 + 0.1 * i for i in range(5)], 4, 5) for n in range(50)]
    assert figures(LoadOutcome(records, 0.1, [0.004] * 99), BenchSlo()).doubts == []  # 4 ms of 200 and of 100
    stalls = [0.0] * 90 + [0.02] * 10
    (doubt,) = figures(LoadOutcome(records, 0.1, stalls), BenchSlo()).doubts
    assert doubt == "the generator's time stamps were 20.0 ms (p99) late, which matters for ITL"


def test_prompts_of_an_earlier_run_are_told() -> None:
    answers = [Record(0.0, 0.001, 1.0, [0.5, 0.6], 10, 2, cached) for cached in (10, 9)]
    (doubt,) = figures(LoadOutcome(answers, 0.1, [], is_distinct=True), BenchSlo()).doubts
    assert doubt.startswith("95% of the prompt tokens were cached") and "--seed" in doubt
    assert figures(LoadOutcome(answers, 0.1, []), BenchSlo()).doubts == [], "they share beginnings"
    cold = [replace(answer, num_cached=0) for answer in answers]
    assert figures(LoadOutcome(cold, 0.1, [], is_distinct=True), BenchSlo()).doubts == []


def test_goodput_is_a_figure_only_with_an_slo() -> None:
    good = record(0.0, 0.1, 0.2, ended_s=0.3, num_output=2)
    without = figures(LoadOutcome([good], 0.0, []), BenchSlo())
    assert (without.goodput, without.as_json()["good_share"]) == (None, None)
    bounded = BenchSlo(ttft_s=1.0)
    with_bound = figures(LoadOutcome([good], 0.0, []), bounded)
    assert with_bound.good_share == 1
    for table, slo, is_there in ((without, BenchSlo(), False), (with_bound, bounded, True)):
        assert ("goodput" in shown(load_table([("x", table)], slo))) is is_there
        assert ("goodput" in shown(comparison_table("x", [table], [table], slo))) is is_there


def test_the_ratio_column_says_what_it_is_and_explains_itself() -> None:
    """Medians of A and B may say one thing and the ratios within rounds another."""
    a = [of_speed(1.0), of_speed(10.0), of_speed(11.0)]
    b = [of_speed(2.0), of_speed(9.0), of_speed(12.0)]
    told = shown(comparison_table("x", a, b))
    assert "B / A, median of rounds" in told
    assert "1.091*" in told and "Each round is compared with itself" in " ".join(told.split())
    assert "*" not in shown(comparison_table("x", a, a))
    alone = shown(comparison_table("x", a[:1], b[:1]))
    assert "median" not in alone and "2.000" in alone


@given(st.lists(st.floats(1e-5, 5e4), min_size=12, max_size=12), st.integers(1, 12))
def test_tables_fit(seconds: list[float], num_loads: int) -> None:
    ttft, tpot, itl, e2e = (Spread.of(seconds[n : n + 3]) for n in range(0, 12, 3))
    found = figures(LoadOutcome([record(0.0, 0.1, ended_s=0.3, num_output=2)], 0.0, []), BenchSlo(ttft_s=1.0))
    found = replace(found, ttft_s=ttft, tpot_s=tpot, itl_s=itl, e2e_s=e2e)
    found = replace(found, output_tokens_s=1234567.0, prompt_tokens_s=12345678.0)
    results = [(f"http://a-host.example.com:8000: load {n}, round 2", found) for n in range(num_loads)]
    told = shown(load_table(results, BenchSlo(ttft_s=1.0)))
    assert max(map(len, told.splitlines())) <= MAX_COLUMNS
    assert "…" not in told


def of_speed(seconds: float) -> LoadFigures:
    return figures(LoadOutcome([record(0.0, seconds, ended_s=seconds, num_output=1)], 0.0, []), BenchSlo())


def shown(table: RenderableType) -> str:
    console = Console(width=MAX_COLUMNS, file=StringIO())
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_arrivals() -> None:
    assert arrival_times(3, 2.0, "fixed", 1).tolist() == [0.0, 0.5, 1.0]
    times = arrival_times(20_000, 50.0, "poisson", 1)
    assert times[0] == 0 and (times[1:] >= times[:-1]).all()
    assert times[-1] == pytest.approx(400, rel=0.05)
    assert arrival_times(5, 2.0, "poisson", 1).tolist() == arrival_times(5, 2.0, "poisson", 1).tolist()


def test_synthetic_prompts_share_what_they_should() -> None:
    shape = Shape(num_prompt=20, num_output=9, num_prefix_tokens=8, num_prefixes=1)
    first, second = synthetic(shape, [0.0, 1.0], seed=3)
    assert len(first.prompt) == 28 and first.num_output == 9
    assert (first.prompt[:8] == second.prompt[:8]).all() and (first.prompt[8:] != second.prompt[8:]).any()
    (other, _) = synthetic(shape, [0.0, 1.0], seed=4)
    assert (other.prompt[:8] != first.prompt[:8]).any()


def test_a_trace_keeps_its_sharing_at_every_scale() -> None:
    requests = [TracedRequest(0.0, 1000, 64, (1, 2)), TracedRequest(1.5, 700, 1, (1, 9))]
    one, other = traced(requests, 1 / 16, seed=1)
    assert (len(one.prompt), one.num_output, len(other.prompt), other.num_output) == (62, 4, 44, 1)
    assert (one.prompt[:32] == other.prompt[:32]).all() and (one.prompt[32:44] != other.prompt[32:]).any()
    assert other.arrival_s == 1.5


def test_bodies() -> None:
    (ask,) = synthetic(Shape(4, 3), [0.0], seed=1)
    ids = json.loads(Wire(token_ids=(100, 110)).body("m", ask))
    assert len(ids["prompt"]) == 4 and all(100 <= each < 110 for each in ids["prompt"])
    assert ids["max_tokens"] == 3 and ids["stream"] and ids["ignore_eos"] and ids["stream_options"]
    chat = json.loads(
        Wire("chat", "text", ignore_eos=False, include_usage=False, extra={"top_k": 1}).body("m", ask),
    )
    assert len(chat["messages"][0]["content"].split()) == 4 and chat["top_k"] == 1
    assert not {"ignore_eos", "stream_options", "prompt"} & set(chat)


# -- the work by which benchmarks/cpu_kernels judges a step ----------------------------------------------------------


rows = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=4)


@given(rows, st.none() | st.integers(1, 25))
def test_keys_of_a_step_are_those_that_its_masks_leave(rows: list[tuple[int, int]], window: int | None) -> None:
    pairs, read = 0, 0
    for query_len, position in rows:
        seen = [
            {key for key in range(at + 1) if window is None or key > at - window}
            for at in range(position, position + query_len)
        ]
        pairs += sum(map(len, seen))
        read += len(set().union(*seen))
    case = StepCase("", [query_len for query_len, _ in rows], [position for _, position in rows])
    assert attended_keys(case, window) == pairs
    assert read_keys(case, window) == read


def test_the_floor_counts_products_and_attention_and_names_what_takes_it() -> None:
    work = Work(read_bytes=30 * 10**9, weight_flops=400 * 10**9, attention_flops=200 * 10**9)
    assert work.floor_s(read_gb_s=10, gflop_s=400) == (3.0, "read")
    assert work.floor_s(read_gb_s=60, gflop_s=400) == (1.5, "GEMM")
