"""Servers in turns: real processes that are started, measured and ended, some of which fail."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from benchmarks.peers.__main__ import main
from benchmarks.peers.cases import Throughput
from benchmarks.peers.order import turns
from benchmarks.peers.results import Failure, Measurement, Result, Started, read_run
from benchmarks.peers.runner import Limits, MakeServer, Runner
from benchmarks.peers.running_server import RunningServer
from benchmarks.peers.servers import Server, ServerProcess, free_port
from kvrelay_bench.workload import Wire
from tests.fakes.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.component

CASE = Throughput(num_prompt=7, num_output=5, concurrency=[1, 2], rates=[], num_requests=[2, 4])


def fake(manner: str, folder: Path) -> Server:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = (sys.executable, "-m", "tests.fakes.openai_process", str(port), manner)
    return Server(manner, "a fake", url, (ServerProcess(argv, f"{url}/v1/models"),), model="", wire=Wire())


def broken(folder: Path) -> Server:
    argv = (sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)")
    return Server("broken", "a fake", "http://127.0.0.1:9", (ServerProcess(argv, "http://127.0.0.1:9/health"),))


def children() -> list[str]:
    return [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]


def run(names: Sequence[str], rounds: int, limits: Limits | None = None) -> list[Result]:
    results: list[Result] = []
    servers: dict[str, MakeServer] = {name: broken if name == "broken" else partial(fake, name) for name in names}
    Runner(CASE, servers, limits or Limits(PATIENCE_S, PATIENCE_S), results.append).run(turns(names, rounds, "abba", 0))
    return results


def test_failures_stand_beside_the_measurements_of_the_others() -> None:
    results = run(["broken", "good", "refusing"], 2)
    measured = [each for each in results if isinstance(each, Measurement)]
    assert [(each.server, each.round, each.load) for each in measured] == [
        ("good", number, load) for number in (0, 1) for load in ("concurrency 1", "concurrency 2")
    ]
    assert all(each.num_failed == 0 and each.values["prompt_tokens"] == pytest.approx(7) for each in measured)
    failures = [each for each in results if isinstance(each, Failure)]
    assert [(each.server, each.round) for each in failures] == [
        ("broken", 0),
        ("refusing", 0),
        ("refusing", 1),
        ("broken", 1),
    ]
    assert "status 3" in failures[0].error
    assert "no such model" in failures[0].error
    assert "out of order" in failures[1].error
    assert not any("openai_process" in line for line in children())


def test_the_time_limit_ends_a_turn_and_the_run() -> None:
    results = run(["stalling", "good"], 1, Limits(PATIENCE_S, PATIENCE_S, ends_at=time.monotonic() + 2.0))
    assert any(isinstance(each, Failure) and "time limit" in each.error for each in results)
    assert not any("openai_process" in line for line in children())


def test_running_servers_and_a_page_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs elsewhere is given by its URL; the page can be made again from the JSON lines."""
    kept, page, again = tmp_path / "run.jsonl", tmp_path / "page.md", tmp_path / "again" / "page.md"
    good = fake("good", tmp_path)
    refusing = fake("refusing", tmp_path)
    with RunningServer(good, tmp_path, PATIENCE_S), RunningServer(refusing, tmp_path, PATIENCE_S):
        servers = f"one={good.url},other={good.url},bad={refusing.url}"
        flags = ["--servers", servers, "--rounds", "1", "--concurrency", "2", "--requests", "4"]
        assert main([*flags, "--json", str(kept), "--write", str(page)]) == 0
    assert main(["--from", str(kept), "--write", str(again)]) == 0
    text = page.read_text()
    assert again.read_text() == text
    assert "| one | 1 |" in text
    assert "| bad | 0 | failed |" in text
    assert "- bad, round 1: no request of the warm-up succeeded: status 500: out of order" in text


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    kept, page = tmp_path / "run.jsonl", tmp_path / "page.md"
    stalling = fake("stalling", tmp_path)
    with RunningServer(stalling, tmp_path, PATIENCE_S):
        flags = ["--servers", f"one={stalling.url}", "--rounds", "1", "--concurrency", "1,2", "--requests", "2,20"]
        command = [sys.executable, "-m", "benchmarks.peers", *flags, "--json", str(kept), "--write", str(page)]
        process = subprocess.Popen(command)
        try:
            wait_until(lambda: kept.exists() and '"measurement"' in kept.read_text())
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130
        finally:
            process.kill()
            process.wait()
    found = read_run(kept).results
    assert [type(each) for each in found] == [Started, Measurement]
    assert "| one | 1 |" in page.read_text()
