"""Ranks with data-parallel attention that do not fit together, or whose processes end."""

from __future__ import annotations

import json
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.config.loader import load_config
from kvrelay.config.worker import WorkerConfig
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.process import HeldPort
from kvrelay.ranks import launch
from kvrelay.ranks.launch import load_data_parallel
from kvrelay.ranks.local_ranks import LocalRanks, RankCommand, RanksFailed
from tests.fakes.waiting import PATIENCE_S, wait_until
from tests.tiny_models import build_model

pytestmark = pytest.mark.component


def config(*flags: str) -> WorkerConfig:
    return load_config(WorkerConfig, ["--data-parallel-size=2", *flags], environ={}, role="decode")


def of_others(**changes: Any) -> Any:
    """The others say the same as this rank but for the changes."""

    def all_texts(text: str) -> list[str]:
        return [text, json.dumps(json.loads(text) | changes)]

    return SimpleNamespace(all_texts=all_texts, size=2)


def test_ranks_that_say_the_same_fit_together() -> None:
    launch._check_equal(of_others(), launch._versions())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version of kvrelay": "9.9"}, r"rank 0 has version of kvrelay = \S+, and rank 1 of 2 has 9.9: all ranks"),
        ({"version of torch": "9.9"}, "version of torch"),
    ],
)
def test_what_differs_between_ranks_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RanksFailed, match=message):
        launch._check_equal(of_others(**changes), launch._versions())


# -- whole starts, up to the load -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("llama"))


def start(model: Path, *flags: str) -> object:
    return load_data_parallel(config(f"--model={model}", "--device=cpu", "--dtype=float32", "--local-ranks=0", *flags))


def test_sizes_that_do_not_divide_mlps_are_refused(model: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"size = 7: model\.layers\.0\.mlp\.gate_proj\.weight has"):
        start(model, "--data-parallel-size=7", "--rank-port=1")  # it does not get as far as to listen


def test_a_rank_that_never_comes_is_named(model: Path) -> None:
    with HeldPort() as held:
        message = f"of 2 ranks, 1 did not come to 127.0.0.1:{held.port} within 1 s"
        with pytest.raises(RanksFailed, match=re.escape(message)):
            start(model, f"--rank-port={held.port}", "--rank-timeout-s=1")


def test_an_address_that_is_taken_is_named(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = f"cannot listen for ranks on 127.0.0.1 port {port}: Address already in use"
        with pytest.raises(RanksFailed, match=re.escape(message)):
            start(model, f"--rank-port={port}")


def test_ranks_with_other_settings_are_refused_on_both(model: Path) -> None:
    message = "rank 0 has token_budget = 512, and rank 1 of 2 has 256: all ranks of a group need the same"
    with HeldPort() as held, ThreadPoolExecutor(1) as pool:
        port = f"--rank-port={held.port}"
        first = pool.submit(start, model, port, "--token-budget=512")
        with pytest.raises(RanksFailed, match=re.escape(message)):
            start(model, port, "--data-parallel-rank=1", "--token-budget=256", "--worker-id=other")
        with pytest.raises(RanksFailed, match=re.escape(message)):
            first.result(PATIENCE_S)


# -- processes --------------------------------------------------------------------------------------------------------


def workers_of(*programs: str) -> LocalRanks:
    commands = [RankCommand(rank, [sys.executable, "-c", text]) for rank, text in enumerate(programs, start=1)]
    return LocalRanks(commands)


SLEEP = "import time; time.sleep(600)"
HANDLE = "import pathlib, signal, sys, time; signal.signal(15, {}); pathlib.Path({!r}).touch(); time.sleep(600)"


def test_a_process_that_ends_is_named() -> None:
    workers = workers_of("raise SystemExit(3)", SLEEP)
    assert workers.why_lost("the connection closed") == "rank 1 exited with status 3"
    with pytest.raises(RanksFailed, match="rank 1 exited with status 3"):
        workers.check()
    workers.close(0.0)
    assert all(process.poll() is not None for process in workers.processes.values())


def test_without_an_end_the_error_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.ranks.local_ranks.END_SOON_S", 0.01)
    workers = workers_of(SLEEP)
    assert workers.why_lost("the connection closed") == "the connection closed"
    workers.check()
    workers.close(0.0)
    workers.close()


def test_processes_that_obey_are_waited_for_and_others_killed(tmp_path: Path) -> None:
    ready = [tmp_path / "obeys", tmp_path / "does not"]
    handlers = ("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    workers = workers_of(*(HANDLE.format(how, str(path)) for how, path in zip(handlers, ready, strict=True)))
    wait_until(lambda: all(path.exists() for path in ready))
    workers.terminate()
    workers.first_end.result(PATIENCE_S)
    workers.close(0.0)
    assert [process.poll() for process in workers.processes.values()] == [0, -9]


def test_a_command_that_cannot_run_leaves_no_process() -> None:
    commands = [RankCommand(1, [sys.executable, "-c", SLEEP]), RankCommand(2, ["/nowhere/python"])]
    with pytest.raises(RanksFailed, match="cannot start a rank"):
        LocalRanks(commands)
