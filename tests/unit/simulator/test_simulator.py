"""The simulated fleet: nothing gets lost in it, and what it says follows from its profile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.device_profiles import BUILT_IN, MeasuredProfile, StepLoad, UnknownProfile, find_profile
from kvrelay_bench.traces import (
    HASH_TOKENS,
    TracedRequest,
    agent_sessions,
    cold_starts,
)
from kvrelay_router.dispatch.placement import Placement
from kvrelay_router.routing.policy import PolicyName
from kvrelay_simulator.fleet import CannotServe, FleetSettings, SimulatedFleet
from kvrelay_simulator.results import RunSlo, best_possible_hit_rate, figures
from kvrelay_simulator.workers import Request, WorkerSettings
from tests.fakes.command import command
from tests.thoroughness import examples
from tests.unit.bench.test_conversations import mooncake

main = command("simulate")

PROFILE = MeasuredProfile(
    name="plain",
    fixed_s=0.01,
    token_s=1e-4,
    pair_s=0.0,
    kv_bytes_per_token=1000,
    kv_tokens=64 * 1024,
    transfer_bytes_s=1e9,
)


def fleet_of(num_prefill: int, num_decode: int, **options: object) -> SimulatedFleet:
    values: dict[str, Any] = {"profile": PROFILE, "policy": "cost", "local_prefill_tokens": 0} | options
    return SimulatedFleet(FleetSettings(num_prefill=num_prefill, num_decode=num_decode, **values))


def ran(fleet: SimulatedFleet, trace: list[TracedRequest]) -> list[Request]:
    requests = fleet.run(trace)
    fleet.check_integrity()
    assert len(requests) == len(trace)
    assert all(request.finished_s is not None for request in requests)
    return requests


def test_one_request_takes_what_its_profile_says() -> None:
    (request,) = ran(fleet_of(1, 1), [TracedRequest(0.0, 4096, 11, tuple(range(8)))])
    prefill_s = 2 * (0.01 + 2048 * 1e-4)
    assert request.first_token_s == pytest.approx(0.0005 + prefill_s)
    assert request.first_token_s is not None and request.finished_s is not None
    transfer_s = 2048 * 1000 / 1e9 + 0.001  # the last chunk's blocks and the messages; the others left before
    decode_s = 10 * (0.01 + 1e-4)
    assert request.finished_s - request.first_token_s == pytest.approx(transfer_s + decode_s)


def test_the_next_turn_finds_its_prefix() -> None:
    turns = [TracedRequest(0.0, 2048, 4, (0, 1, 2, 3)), TracedRequest(5.0, 3072, 4, (0, 1, 2, 3, 4, 5))]
    for fleet in (fleet_of(4, 2), fleet_of(4, 2, has_index=False), fleet_of(0, 2)):
        first, second = ran(fleet, turns)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 2048)
        assert first.computed_by == second.computed_by


def test_decode_helps_out_when_prompts_arrive_faster_than_prefill_computes_them() -> None:
    # A prompt takes prefill 0.43 s; one arrives every 0.3 s.
    trace = [TracedRequest(0.3 * n, 4096, 50, tuple(range(8 * n, 8 * n + 8))) for n in range(40)]
    helped, divided = (ran(fleet_of(1, 1, local_prefill_tokens=limit), trace) for limit in (None, 0))

    def worst_s(requests: list[Request]) -> float:
        return max(request.first_token_s - request.arrival_s for request in requests if request.first_token_s)

    assert worst_s(helped) < worst_s(divided) / 2
    assert 0 < sum(request.computed_by == "decode-0" for request in helped) < len(trace) / 2


def test_a_fleet_that_has_no_prefill_workers_is_meant_so_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trace = [TracedRequest(float(at), 2048, 4, (0, 1, 2, 3)) for at in range(3)]
    ran(fleet_of(0, 2), trace)
    assert caplog.messages == []
    fleet = fleet_of(0, 2)
    fleet.placement = Placement(fleet.view, "cost", 0, clock=fleet.clock.now)
    ran(fleet, trace)
    assert caplog.messages == ["nothing is disaggregated at the moment: no prefill worker is ready: decode alone"]


TRACES = st.lists(
    st.builds(
        lambda at, ids, cut, output: TracedRequest(at, len(ids) * HASH_TOKENS - cut, output, tuple(ids)),
        at=st.floats(0, 3),
        ids=st.integers(0, 3).flatmap(lambda tree: st.integers(1, 8).map(lambda n: [tree * 8 + i for i in range(n)])),
        cut=st.integers(0, HASH_TOKENS - 1),
        output=st.integers(1, 60),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=examples(40), deadline=None)
@given(
    TRACES,
    st.sampled_from(get_args(PolicyName)),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([5000, 20_000]),
    st.sampled_from([None, 0, 1000]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_every_request_ends_and_nothing_is_left(
    trace: list[TracedRequest],
    policy: PolicyName,
    num_prefill: int,
    num_decode: int,
    kv_tokens: int,
    local_prefill_tokens: int | None,
    stages: tuple[int, int],
) -> None:
    if not num_prefill + num_decode:
        num_decode = 1
    trace = sorted(trace, key=lambda request: request.arrival_s)
    fleet = fleet_of(
        num_prefill,
        num_decode,
        profile=pipeline(stages[0]),
        decode_profile=pipeline(stages[1]),
        policy=policy,
        local_prefill_tokens=local_prefill_tokens,
        workers=WorkerSettings(kv_tokens=kv_tokens, decode_token_budget=256),
    )
    for request, traced in zip(ran(fleet, trace), trace, strict=True):
        assert request.first_token_s is not None and request.finished_s is not None
        assert traced.arrival_s < request.first_token_s <= request.finished_s
        assert 0 <= request.num_cached_tokens < traced.num_prompt_tokens


def test_the_same_run_gives_the_same_figures() -> None:
    trace = agent_sessions(10, 2.0, num_turns=4)
    runs = []
    for _ in range(2):
        fleet = fleet_of(2, 2)
        requests = ran(fleet, trace)
        runs.append(figures(fleet, requests, RunSlo(), 0.5))
    assert runs[0] == runs[1]
    assert 0 < runs[0].prefill_utilisation < 1 and runs[0].hit_rate > 0


def test_a_request_that_fits_nowhere_is_refused_by_number() -> None:
    with pytest.raises(CannotServe, match="request 0 needs"):
        fleet_of(1, 1).run([TracedRequest(0.0, 100_000, 10, tuple(range(200)))])


# -- the best possible ------------------------------------------------------------------------------------------------


def test_the_best_possible_counts_what_came_before_and_a_bounded_cache_forgets() -> None:
    trace = [TracedRequest(float(i), 1024, 1, ids) for i, ids in enumerate([(0, 1), (2, 3), (0, 1), (0, 1)])]
    prompts = [request.tokens() for request in trace]
    for without_end in (1000, None):  # one block is always computed
        assert best_possible_hit_rate(prompts, 64, without_end) == pytest.approx(2 * 960 / 4096)
    assert best_possible_hit_rate(prompts, 64, 16) == pytest.approx(960 / 4096)
    assert best_possible_hit_rate((request.tokens() for request in cold_starts(20, 1.0)), 64) == 0


# -- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_profiles_are_plausible(name: str) -> None:
    profile = find_profile(name)
    decode, batch = (profile.step_s(StepLoad(0, 0.0, n, n * 1000)) for n in (1, 64))
    prompt = profile.step_s(StepLoad(4096, 4096**2 / 2, 0, 0))
    assert 2e-3 < decode < batch < 2 * decode, "decode is bound by reading the weights"
    assert prompt > 4 * decode, "prefill is bound by arithmetic"
    assert profile.kv_tokens > 50_000


SIZED = [
    "llama3-70b-h100-tp8",
    "llama3-70b-h100-tp2-pp2",
    "llama3-8b-l40s-pp4",
    "qwen3-32b-h200",
    "llama3-8b-h100-tp16",
]


@pytest.mark.parametrize("name", SIZED)
def test_a_model_may_be_divided_among_other_numbers_of_devices(name: str) -> None:
    profile = find_profile(name)
    assert profile.name == name
    sizes = dict(re.findall(r"-(tp|pp)(\d+)", name))
    assert profile.pipeline_depth == int(sizes.get("pp", 1))
    assert profile.num_devices == profile.pipeline_depth * int(sizes.get("tp", 1))


LOADS = [StepLoad(2048, 2048**2 / 2, 0, 0), StepLoad(0, 0.0, 32, 64_000), StepLoad(512, 1e6, 64, 10_000)]


@pytest.mark.parametrize("load", LOADS)
def test_heads_divide_a_step_and_stages_divide_its_throughput(load: StepLoad) -> None:
    one, heads, stages = (find_profile(f"llama3-8b-h100{size}") for size in ("", "-tp4", "-pp4"))
    alone_s, tp_s, pp_s = (profile.step_s(load) for profile in (one, heads, stages))
    assert alone_s / 4 < tp_s < alone_s
    assert alone_s < pp_s < 1.2 * alone_s, "a single step gains nothing from stages"
    assert heads.kv_tokens == stages.kv_tokens > 4 * one.kv_tokens
    assert heads.transfer_bytes_s == stages.transfer_bytes_s == 4 * one.transfer_bytes_s
    # More devices than KV heads: heads are there twice.
    assert find_profile("llama3-8b-h100-tp16").kv_tokens < 1.2 * find_profile("llama3-8b-h100-tp8").kv_tokens


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "llama3-70b-h100",
            "the weights of llama3-70b \\(141 GB\\) leave no memory for KV on 1 h100 \\(add -tpN or -ppN\\)",
        ),
        ("llama3-8b-h100-tp3", "32 query heads and 8 KV heads, which do not divide among 3 devices"),
        ("llama3-8b-h100-pp33", "has 32 layers, too few for 33 stages"),
        ("llama3-8b-h100-tp0", "as in llama3-70b-h100-tp4-pp2, or a JSON file"),
        ("llama3-8b-h100-pp2-tp2", "as in llama3-70b-h100-tp4-pp2, or a JSON file"),
    ],
)
def test_divisions_that_do_not_fit_are_refused(name: str, words: str) -> None:
    with pytest.raises(UnknownProfile, match=words):
        find_profile(name)


def pipeline(pipeline_depth: int) -> MeasuredProfile:
    return msgspec.structs.replace(PROFILE, pipeline_depth=pipeline_depth, num_devices=pipeline_depth)


def test_stages_of_a_worker_compute_chunks_at_the_same_time() -> None:
    """A prompt of 4 chunks, each of which takes 0.2148 s alone."""
    for pipeline_depth in (1, 2, 4):
        fleet = SimulatedFleet(FleetSettings(pipeline(pipeline_depth), 1, 0, local_prefill_tokens=0))
        (request,) = ran(fleet, [TracedRequest(0.0, 8192, 1, tuple(range(16)))])
        stage_s = 0.2148 / pipeline_depth
        assert request.first_token_s == pytest.approx(0.0005 + (4 + pipeline_depth - 1) * stage_s)
        assert fleet.prefill[0].busy_s == pytest.approx(4 * stage_s), "the part of each stage"


def test_decode_workers_may_have_other_devices() -> None:
    """The slower link limits the handoff, and a sequence alone decodes as fast with stages as without."""
    slow = msgspec.structs.replace(pipeline(2), transfer_bytes_s=1e8)
    (request,) = ran(fleet_of(1, 1, decode_profile=slow), [TracedRequest(0.0, 2048, 11, tuple(range(4)))])
    assert request.first_token_s is not None and request.finished_s is not None
    transfer_s, decode_s = 2048 * 1000 / 1e8 + 0.001, 10 * (0.01 + 1e-4)
    assert request.finished_s - request.first_token_s == pytest.approx(transfer_s + decode_s)


def test_a_profile_comes_from_a_file_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text('{"name": "x"}')
    with pytest.raises(UnknownProfile, match="fixed_s"):
        find_profile(str(path))
    with pytest.raises(UnknownProfile, match="llama3-8b-h100"):
        find_profile("nothing")


# -- traces and the command -------------------------------------------------------------------------------------------


def test_the_command_compares_sweeps_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [
        {"timestamp": 100 * i, "input_length": 1000, "output_length": 20, "hash_ids": [i % 3, i % 3 + 100]}
        for i in range(30)
    ]
    trace, out = mooncake(tmp_path / "m.jsonl", *entries), tmp_path / "figures.json"
    common = ["--trace", str(trace), "--prefill", "1", "--decode", "2"]
    assert main([*common, "--policy", "cost", "--policy", "random", "--colocated", "--json", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert list(runs) == ["cost", "random", "cost, colocated", "random, colocated"]
    assert all(run["num_requests"] == 30 and 0 < run["hit_share"] <= 1.05 for run in runs.values())
    capsys.readouterr()
    assert main([*common, "--sweep", "--colocated", "--json", str(out)]) == 0
    swept = json.loads(out.read_text())
    assert list(swept["runs"]) == ["1 prefill, 2 decode", "2 prefill, 1 decode", "colocated"]
    best = max(list(swept["runs"])[:2], key=lambda name: swept["runs"][name]["goodput"])
    assert f"Best ratio by goodput: {swept['best_ratio']}" in capsys.readouterr().out
    assert swept["runs"][swept["best_ratio"]]["goodput"] == swept["runs"][best]["goodput"]
    assert main([*common, "--slo", "ttft=1us", "--slo", "tpot=1us", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["runs"]["cost"]["good_share"] == 0
    assert "with TTFT <= 1e-06 s and TPOT <= 1e-06 s" in capsys.readouterr().out
    assert main([*common, "--slo", "tpot=1h", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["runs"]["cost"]["good_share"] == 1
    assert main(["--trace", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--sweep"], ["--colocated"]])
def test_the_command_draws_its_runs(tmp_path: Path, more: list[str]) -> None:
    pytest.importorskip("matplotlib")
    entries: list[dict[str, object]] = [
        {"timestamp": 100 * i, "input_length": 700, "output_length": 1 + i % 3} for i in range(10)
    ]
    picture = tmp_path / "runs.svg"
    trace = mooncake(tmp_path / "m.jsonl", *entries)
    assert main(["--trace", str(trace), "--prefill", "1", "--decode", "2", "--plot", str(picture), *more]) == 0
    drawn = picture.read_text()
    assert "</svg>" in drawn
    # matplotlib draws letters as paths and has the text in a comment beside them.
    workers = "3 workers" if "--sweep" in more else "1 prefill, 2 decode"
    assert f"<!-- m.jsonl, 10 requests; llama3-8b-h100; {workers} -->" in drawn


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill", "0", "--decode", "0"], "at least one worker"),
        (["--prefill", "1", "--decode", "0", "--sweep"], "--sweep needs two workers or more"),
        (["--sweep", "--policy", "cost", "--policy", "random"], "--sweep compares ratios"),
        (["--profile", "abacus"], "--profile abacus: must be one of llama3-8b-h100"),
        (
            ["--decode-profile", "llama3-8b-h100-tp3"],
            "--decode-profile llama3-8b-h100-tp3: llama3-8b has 32 query heads",
        ),
        (["--decode-profile", "qwen3-32b-h200"], "its KV is not that of --profile llama3-8b-h100: both need the same"),
        (["--plot", "runs.txt"], "must end in .svg, .png or .pdf"),
        (["--rate", "2"], "has its own arrivals: give --speed, not --rate"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    trace = mooncake(tmp_path / "m.jsonl", {"timestamp": 0, "input_length": 700, "output_length": 1})
    if "--plot" in flags:
        pytest.importorskip("matplotlib")
    assert main(["--trace", str(trace), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_trace_that_shares_nothing_says_that_no_hits_are_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries: list[dict[str, object]] = [{"timestamp": i, "input_length": 700, "output_length": 2} for i in range(3)]
    trace = mooncake(tmp_path / "m.jsonl", *entries)
    out = tmp_path / "out.json"
    assert main(["--trace", str(trace), "--prefill", "1", "--decode", "1", "--json", str(out)]) == 0
    told = capsys.readouterr().out
    assert "No hits are possible" in told and told.splitlines()[1].split()[-4:-2] == ["0.0%", "-"]
    assert json.loads(out.read_text())["runs"]["cost"]["hit_share"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rte", "2"], "unknown flag --rte; did you mean --rate?"),
        (["--slo", "ttft=2"], "must be a time with its unit"),
    ],
)
def test_flags_of_simulate_are_refused_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--trace", "x", *flags])
    told = capsys.readouterr().err
    assert raised.value.code == 2 and message in told and told.count("\n") == 1
