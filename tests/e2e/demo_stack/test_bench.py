"""`kvrelay bench` against the whole system: what it counts is what was served."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(400)


def bench(*flags: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvrelay", "bench", *flags, "--json", str(out), "--save-requests"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content: dict[str, Any] = json.loads(out.read_text())
    return content


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_tokens_and_requests_are_counted_as_the_system_counts_them(demo_stack: Stack, api: str, tmp_path: Path) -> None:
    flags = ["--api", api, "--rate", "40", "--requests", "8", "--prompt-tokens", "40", "--output-tokens", "12"]
    before = demo_stack.fleet()["requests"]["finished"]
    content = bench(demo_stack.base_url, *flags, "--warm-up", "2", out=tmp_path / "out.json")
    assert demo_stack.fleet()["requests"]["finished"] - before == 10
    (load,) = content["loads"]
    assert load["figures"]["num_failed"] == 0 and load["figures"]["tokens_counted"] == 1
    assert {request["num_output"] for request in load["requests"]} == {12}
    if api == "completions":
        assert {request["num_prompt"] for request in load["requests"]} == {40}
    for request in load["requests"]:
        times = [request["intended_s"], request["started_s"], *request["pieces_s"], request["ended_s"]]
        assert times == sorted(times) and 1 <= len(request["pieces_s"]) <= 12


def test_traces_run_scaled_to_the_model(demo_stack: Stack, tmp_path: Path) -> None:
    mooncake, azure = tmp_path / "mooncake.jsonl", tmp_path / "azure.csv"
    entry = {"input_length": 1024, "output_length": 128}
    lines = [json.dumps(entry | {"timestamp": 20 * n, "hash_ids": [7, n]}) for n in range(6)]
    mooncake.write_text("\n".join(lines))
    with azure.open("w", newline="") as file:
        rows = [(f"2023-11-16 18:15:46.{n}000000", 640 + n, 64) for n in range(4)]
        csv.writer(file).writerows([("TIMESTAMP", "ContextTokens", "GeneratedTokens"), *rows])
    flags = ["--scale", "0.0625", "--speed", "10", "--warm-up", "0"]
    (load,) = bench(demo_stack.base_url, "--trace", str(mooncake), *flags, out=tmp_path / "a.json")["loads"]
    assert [(r["num_prompt"], r["num_output"], r["error"]) for r in load["requests"]] == [(64, 8, "")] * 6
    assert load["figures"]["cached_share"] is not None
    (load,) = bench(demo_stack.base_url, "--trace", str(azure), *flags, out=tmp_path / "b.json")["loads"]
    assert [(r["num_prompt"], r["num_output"]) for r in load["requests"]] == [(40, 4)] * 4


def test_programs_are_measured_with_and_without_what_the_language_adds(demo_stack: Stack, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--workload", "judge,react", "--programs", "1", "--rounds", "2", "--without", "fork-hint,parallel"]
    command = [sys.executable, "-m", "kvrelay", "bench", demo_stack.base_url, *flags, "--json", str(out)]
    before = demo_stack.fleet()["requests"]["finished"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())["programs"]
    variants = ["all on", "without fork-hint", "without parallel", "without all of these"]
    # A hint is a call, and only `judge` forks.
    for workload, with_hint, without_hint in (("judge", 7, 6), ("react", 9, 9)):
        rows = [each for each in results if each["workload"] == workload]
        assert [row["variant"] for row in rows] == variants + variants[::-1], "in turns"
        assert all(row["num_failed"] == 0 and row["programs_per_s"] > 0 for row in rows)
        calls = [with_hint, without_hint, with_hint, without_hint]
        assert [row["calls"] for row in rows] == calls + calls[::-1]
    assert "judge" in done.stdout and "hit rate" in done.stdout
    assert demo_stack.fleet()["requests"]["finished"] > before


def test_an_unknown_workload_or_switch_is_refused() -> None:
    for flags, reason in ((["--workload", "x"], "no workload 'x'"), (["--workload=json", "--without", "y"], "not 'y'")):
        command = [sys.executable, "-m", "kvrelay", "bench", "http://127.0.0.1:1", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 2 and reason in done.stderr
