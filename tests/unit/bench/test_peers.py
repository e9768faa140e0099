"""Order, ratios, tables and loads of the comparison with other servers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.cases import Disaggregation, Throughput
from benchmarks.peers.nixl_proxy import prefill_body
from benchmarks.peers.order import turns
from benchmarks.peers.page import page
from benchmarks.peers.results import BadResults, Failure, Measurement, Result, ResultFile, Run, Started, read_run
from benchmarks.peers.servers import NotInstalled, Setting, Variant, make_server
from benchmarks.peers.statistics import Best, Statistic, best, ratio, statistic
from kvrelay_bench.answer_reader import Record
from kvrelay_bench.load_generator import LoadOutcome

ABOUT = {
    "case": "throughput",
    "load": "Some load.",
    "model": "a model",
    "servers": ["a", "b", "c"],
    "base": "b",
    "num_rounds": 2,
    "order": "abba",
    "date": "2030-01-01 00:00 UTC",
    "machine": {"CPU": "one", "cores": "4"},
    "load_average": 0.5,
    "command": "python -m benchmarks.peers",
    "commit": "abc",
}


def measured(server: str, number: int, rate: float, **more: float) -> Measurement:
    return Measurement(server, number, "concurrency 1", {"output_tokens_s": rate, **more}, 8, 0, 0.1)


def test_abba_reverses_every_second_round() -> None:
    assert turns(["a", "b", "c"], 3, "abba", 0) == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_a_random_order_has_every_server_once_and_repeats_with_its_seed() -> None:
    rounds = turns(list("abcdef"), 20, "random", 3)
    assert all(sorted(names) == list("abcdef") for names in rounds)
    assert rounds == turns(list("abcdef"), 20, "random", 3) != turns(list("abcdef"), 20, "random", 4)
    assert len({tuple(names) for names in rounds}) > 1


def test_ratios_pair_the_figures_of_a_round() -> None:
    """The machine is twice as slow in round 1; the ratio stays 2. Round 2 has no base."""
    assert ratio({0: 100.0, 1: 50.0}, {0: 200.0, 1: 100.0, 2: 10.0}) == Statistic(2.0, 2.0, 2.0)
    assert ratio({0: 100.0}, {1: 50.0}) is None
    assert ratio({0: 0.0}, {0: 50.0}) is None


def test_statistics_are_shown_with_their_spread() -> None:
    found = statistic([0.012, 0.010, 0.0201])
    assert found == Statistic(0.012, 0.010, 0.0201)
    assert found is not None
    assert found.text(1e3, 1) == "12.0 (10.0 to 20.1)"
    assert Statistic(1500.0, 1500.0, 1500.0).text() == "1,500"
    assert statistic([]) is None


@pytest.mark.parametrize(
    ("values", "higher", "expected"),
    [
        ({"a": Statistic(5, 4, 6), "b": Statistic(2, 1, 3)}, True, Best("a", is_clear=True)),
        ({"a": Statistic(5, 4, 6), "b": Statistic(2, 1, 3)}, False, Best("b", is_clear=True)),
        ({"a": Statistic(5, 2, 6), "b": Statistic(4, 1, 5)}, True, Best("a", is_clear=False)),
        ({"a": Statistic(5, 4, 6)}, True, None),
    ],
)
def test_the_best_is_clear_if_no_round_of_others_overlaps(
    values: dict[str, Statistic], higher: bool, expected: Best | None
) -> None:
    assert best(values, higher=higher) == expected


def test_the_page_has_medians_ratios_failures_and_commands() -> None:
    started = Started("a", 0, 3.0, "kvrelay, colocated", ["python -m x"], {"torch": "2"})
    results = [measured("a", 0, 100, gap_p99=0.02), measured("b", 0, 200), measured("b", 1, 100), measured("a", 1, 80)]
    text = page([Run(ABOUT, [started, *results, Failure("c", 0, "not ready within 3 s")])])
    assert "| server | rounds | output tok/s | / b | gap p99, ms | / b |" in text
    assert "| a | 2 | 90 (80 to 100) | 0.65 (0.50 to 0.80) | 20.0 |  |" in text
    assert "| b | 2 | 150 (100 to 200) |  | - |  |" in text
    assert "| c | 0 | failed |" in text
    assert "- c, round 1: not ready within 3 s" in text
    assert "| concurrency 1 | (b) |" in text
    assert "- **a**: kvrelay, colocated (torch 2), ready after 3 s\n  - `python -m x`" in text
    assert "busy" not in text


def test_servers_are_not_ranked_on_a_busy_machine() -> None:
    results = [measured("a", 0, 1), measured("b", 0, 2)]
    text = page([Run({**ABOUT, "load_average": 9.0}, list(results))])
    assert "load average 9.0 on 4 cores" in text
    assert "Who is best" not in text
    assert "Who is best" in page([Run(ABOUT, list(results))])


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results: list[Result] = [
        Started("a", 0, 1.0, "x", [], {}),
        measured("a", 0, 1.0),
        Failure("b", 0, "no", "concurrency 1"),
    ]
    file = ResultFile(tmp_path / "of" / "run.jsonl", ABOUT)
    for each in results:
        file.add(each)
    assert read_run(tmp_path / "of" / "run.jsonl") == Run(ABOUT, results)


@pytest.mark.parametrize("text", ["", "[]\n", "no JSON\n", json.dumps({"kind": "run", "version": 0, "about": {}})])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(BadResults):
        read_run(tmp_path / "run.jsonl")


def test_loads_have_their_own_prompts_in_each_round() -> None:
    case = Throughput(num_prompt=64, num_output=2, concurrency=[1, 8], rates=[], num_requests=[2, 3])
    points = [*case.loads(0), *case.loads(1), case.warm_up()]
    prompts = [tuple(ask.prompt) for point in points for ask in point.asks]
    assert len(set(prompts)) == len(prompts)
    assert [(point.name, point.concurrency, len(point.asks)) for point in points[:2]] == [
        ("concurrency 1", 1, 2),
        ("concurrency 8", 8, 3),
    ]
    assert [tuple(ask.prompt) for point in case.loads(0) for ask in point.asks] == prompts[:5]


def answered(intended_s: float, pieces_s: list[float]) -> Record:
    return Record(intended_s, intended_s, pieces_s[-1], pieces_s, num_prompt=1, num_output=len(pieces_s))


def test_gaps_count_while_long_prompts_are_computed() -> None:
    case = Disaggregation(num_decodes=2, num_output=4, long_lengths=[0, 100], num_long=1, interval_s=1.0)
    alone, among = case.loads(0)
    assert [len(ask.prompt) for ask in among.asks] == [32, 32, 100]
    assert [ask.arrival_s for ask in among.asks] == [0.0, 0.0, 1.0]
    records = [answered(0.0, [0.1, 0.6, 1.1, 1.9]), answered(0.0, [0.1, 0.2, 0.3, 2.5]), answered(1.0, [1.5, 1.6])]
    values = case.values(among, LoadOutcome(records, 0.1, [0.0]))
    # Only the gap that ended at 1.1 lies between the arrival at 1.0 and the first token at 1.5.
    assert values["gap_max"] == values["gap_p50"] == pytest.approx(0.5)
    assert values["ttft_p50"] == pytest.approx(0.5)
    assert values["still_running"] == 1.0
    values = case.values(alone, LoadOutcome(records[:2], 0.1, [0.0]))
    assert values["gap_max"] == pytest.approx(2.2)
    assert math.isnan(values["ttft_p50"])
    assert np.isfinite(values["output_tokens_s"])


def test_the_proxy_asks_prefill_for_one_token() -> None:
    body = {"prompt": [1], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    sent = prefill_body(body)
    assert (sent["max_tokens"], sent["stream"], sent["prompt"]) == (1, False, [1])
    assert "stream_options" not in sent
    assert sent["kv_transfer_params"]["do_remote_decode"] is True


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    program = tmp_path / "venv" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    return Setting(tmp_path / "some-model", [0, 1, 2, 3], venvs={"vllm": tmp_path / "venv"})


def test_kvrelay_divides_the_cores_by_itself(setting: Setting, tmp_path: Path) -> None:
    server = make_server(Variant("x", "kvrelay-pd", ("--token-budget", "1024")), setting, tmp_path / "state")
    (command,) = server.commands
    assert command.startswith("python -m kvrelay.cli.main up --port PORT --state-dir FOLDER --model MODEL")
    assert command.endswith("--prefill 1 --decode 1 --token-budget 1024")


def test_instances_of_vllm_have_halves_of_the_cores(setting: Setting, tmp_path: Path) -> None:
    (whole,) = make_server(Variant("x", "vllm"), setting, tmp_path).processes
    assert whole.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3"
    server = make_server(Variant("x", "vllm-pd"), setting, tmp_path)
    prefill, decode, proxy = server.processes
    assert prefill.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert decode.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert server.url == proxy.ready_url.removesuffix("/v1/models")
    assert server.commands[2] == (
        "python benchmarks/peers/nixl_proxy.py --port PROXY --prefill http://127.0.0.1:PREFILL "
        "--decode http://127.0.0.1:DECODE"
    )
    assert not any(str(tmp_path) in command for command in server.commands)


def test_a_missing_program_says_how_to_name_it(setting: Setting, tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="--venv vllm=FOLDER"):
        make_server(Variant("x", "vllm"), Setting(tmp_path, [0], venvs={"vllm": tmp_path}), tmp_path)
