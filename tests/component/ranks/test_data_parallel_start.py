"""Ranks with data-parallel attention that do not fit together, or whose processes end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.config.loader import load_config
from kvrelay.config.worker import WorkerConfig
from kvrelay.ranks.rank_group import RankCommand, RanksFailed
from kvrelay.worker import data_parallel
from kvrelay.worker.group_workers import GroupWorkers
from tests.fakes.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.component


def config(*flags: str) -> WorkerConfig:
    return load_config(WorkerConfig, ["--data-parallel-size=2", *flags], environ={}, role="decode")


def of_others(**changes: Any) -> Any:
    """The others say the same as this rank but for the changes."""

    def all_texts(text: str) -> list[str]:
        return [text, json.dumps(json.loads(text) | changes)]

    return SimpleNamespace(all_texts=all_texts, size=2)


def test_ranks_that_say_the_same_fit_together() -> None:
    data_parallel._check_equal(of_others(), config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version of kvrelay": "9.9"}, r"rank 0 has version of kvrelay = \S+, and rank 1 of 2 has 9.9: all ranks"),
        ({"version of torch": "9.9"}, "version of torch"),
        ({"data_parallel_size": 3}, "rank 0 has data_parallel_size = 2, and rank 1 of 2 has 3"),
        ({"prefill_delayer": True}, "rank 0 has prefill_delayer = False, and rank 1 of 2 has True"),
    ],
)
def test_ranks_of_other_versions_or_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RanksFailed, match=message):
        data_parallel._check_equal(of_others(**changes), config())


def test_ranks_with_other_weights_are_named() -> None:
    other = SimpleNamespace(all_texts=lambda text: [text, "other"], size=2)
    with pytest.raises(RanksFailed, match="rank 1 of 2 has other weights than rank 0"):
        data_parallel._check_same_model(other, "one")  # type: ignore[arg-type]


def workers_of(*programs: str) -> GroupWorkers:
    commands = [RankCommand(rank, [sys.executable, "-c", text]) for rank, text in enumerate(programs, start=1)]
    return GroupWorkers(commands)


SLEEP = "import time; time.sleep(600)"
HANDLE = "import pathlib, signal, sys, time; signal.signal(15, {}); pathlib.Path({!r}).touch(); time.sleep(600)"


def test_a_process_that_ends_is_named() -> None:
    workers = workers_of("raise SystemExit(3)", SLEEP)
    assert workers.why_lost(RuntimeError("the connection closed")) == "rank 1 exited with status 3"
    with pytest.raises(RanksFailed, match="rank 1 exited with status 3"):
        workers.check()
    workers.close(within_s=0.0)
    assert all(process.exit_status() is not None for process in workers._processes)


def test_without_an_end_the_error_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.worker.group_workers.END_SOON_S", 0.01)
    workers = workers_of(SLEEP)
    assert workers.why_lost(RuntimeError("the connection closed")) == "the connection closed"
    workers.check()
    workers.close(within_s=0.0)
    workers.close()


def test_processes_that_obey_are_waited_for_and_others_killed(tmp_path: Path) -> None:
    ready = [tmp_path / "obeys", tmp_path / "does not"]
    handlers = ("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    workers = workers_of(*(HANDLE.format(how, str(path)) for how, path in zip(handlers, ready, strict=True)))
    wait_until(lambda: all(path.exists() for path in ready))
    workers.terminate()
    workers.first_end.result(PATIENCE_S)
    workers.close(within_s=0.0)
    assert [process.exit_status() for process in workers._processes] == [0, -9]


def test_a_command_that_cannot_run_leaves_no_process() -> None:
    commands = [RankCommand(1, [sys.executable, "-c", SLEEP]), RankCommand(2, ["/nowhere/python"])]
    with pytest.raises(RanksFailed, match="cannot start a rank"):
        GroupWorkers(commands)
