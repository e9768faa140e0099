"""`kvrelay status`, `stop`, `drain` and `top` find a stack of `kvrelay up`; `up --detach` leaves one behind."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from kvrelay.cli.stacks import DEFAULT_URL, ProcessState, StackState, find_stack, running_stacks
from kvrelay.flag_parser import CommandFailed
from kvrelay.fleet import Registry, RegistryUnavailable, WorkerRecord
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process_identity import own_identity
from tests.fakes.command import command
from tests.fakes.records import worker_record
from tests.fakes.up import FAKE_SERVICES, ROOT, Up
from tests.fakes.waiting import PATIENCE_S

chat = command("chat")
drain = command("drain")
restart = command("restart")
status = command("status")
stop = command("stop")
top = command("top")

Start = Callable[..., Up]


@pytest.fixture(autouse=True)
def no_redis_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVRELAY_REDIS_URL", "KVRELAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Up] = []

    def starter(*flags: str, **environ: str) -> Up:
        started.append(Up(["--port=0", *flags], tmp_path / "state", environ))
        started[-1].wait_ready()
        return started[-1]

    yield starter
    for up in started:
        up.end()


def test_status_drain_and_stop_find_the_stack(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    up = start()
    state_dir = tmp_path / "state"
    here = ["--state-dir", str(state_dir)]
    (stack,) = running_stacks(state_dir)
    check_greeting(up, stack, state_dir)
    assert (stack.pid, stack.is_ready, stack.model) == (up.process.pid, True, "kvrelay-demo")
    assert (state_dir / str(stack.port) / "stack.json").stat().st_mode & 0o077 == 0  # it has the password of Redis
    check_status(up, stack, here, capsys)
    assert drain(["decode-0", *here]) == 0
    assert "decode-0 drains" in capsys.readouterr().out
    assert drain(["decode-0", "--undo", "--port", str(stack.port), *here]) == 0
    assert drain(["nobody", *here]) == 1
    assert re.search("there are: (decode-0, prefill-0|prefill-0, decode-0)$", capsys.readouterr().err, re.MULTILINE)
    for each in (drain, top, chat, stop):
        argv = ["decode-0"] if each is drain else []
        assert each([*argv, "--port=1", *here]) == 1
        assert f"no stack runs on port 1 in {state_dir}; there are: {stack.port}" in capsys.readouterr().err
    assert stop(here) == 0
    assert capsys.readouterr().out == f"stopped {stack.url}\n"
    assert up.wait_exit() == 0 and up.survivors() == []
    assert status(here) == 1
    assert stop(here) == 1
    assert "no stack of kvrelay up runs in" in capsys.readouterr().err
    assert list(state_dir.glob("*/stack.json")) == []


def check_status(up: Up, stack: StackState, here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(here) == 0
    shown = capsys.readouterr().out
    head, *lines = shown.splitlines()
    assert head == f"{stack.url}  ready  kvrelay-demo"
    redis = next(line.split()[1] for line in lines if line.startswith("  redis  redis:"))
    assert re.fullmatch(r"redis://:\*+@127\.0\.0\.1:\d+/0,", redis) and stack.redis_url.split("@")[1] in redis
    words = [line.split() for line in lines]
    for row, word in (("decode-0 decode", "decode"), ("router router", "router"), ("redis", "redis-s")):
        assert [*row.split(), "ready", str(up.child(word).pid)] in words, shown
    assert max(len(line) for line in lines if here[1] not in line) <= 80


def test_a_process_restarts_with_the_same_settings(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up = start("--token-budget=1024")
    here = ["--state-dir", str(tmp_path / "state")]
    (stack,) = running_stacks(tmp_path / "state")
    for name in ("nobody", "redis"):
        assert restart([name, *here]) == 1
        told = f"no worker or router {name} in the stack at {stack.url}; there are: prefill-0, decode-0, router"
        assert capsys.readouterr().err == f"kvrelay restart: {told}\n"
    before = up.child("kvrelay_decode").pid
    assert restart(["decode-0", *here]) == 0
    only, drains, ready = capsys.readouterr().out.splitlines()
    assert only.startswith("no other decode is ready: until decode-0 is ready again, requests wait")
    assert drains.startswith(f"decode-0 (process {before}) drains, for at most 35 s")
    after = up.child("kvrelay_decode").pid
    assert re.fullmatch(rf"decode-0 is ready again after [\d.]+ s \(process {after}\)", ready) and after != before
    (log,) = (tmp_path / "state").glob("*/decode-0.log")
    assert log.read_text().count("'token_budget': 1024") == 2


@pytest.mark.slow
def test_a_process_that_does_not_end_is_killed(start: Start, tmp_path: Path) -> None:
    up = start("--drain-timeout-s=0", FAKE_STUBBORN="decode")
    assert restart(["decode-0", "--state-dir", str(tmp_path / "state")]) == 0
    up.wait_for("^decode-0 +died +was killed by SIGKILL")


def check_greeting(up: Up, stack: StackState, state_dir: Path) -> None:
    """The commands that it names are found. (The services are no real ones; `test_wheel` runs `top`.)"""
    up.wait_for("logs       ")
    for line in (f"dashboard  {stack.url}/dashboard", f"logs       {state_dir / str(stack.port)}"):
        assert line in up.output
    named = dict(re.findall(r"^  (terminal|chat|benchmark) +(.+)$", up.output, re.MULTILINE))
    for name in ("terminal", "chat", "benchmark"):
        shown = [*shlex.split(named[name]), "--help"]
        done = subprocess.run(shown, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0 and done.stdout, (shown, done.stderr)


@pytest.mark.slow
def test_a_stack_that_was_killed_is_not_found(start: Start, tmp_path: Path) -> None:
    up = start()
    up.process.kill()
    up.wait_exit()
    assert list((tmp_path / "state").glob("*/stack.json"))
    assert running_stacks(tmp_path / "state") == []


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_up_returns_when_the_stack_is_ready_or_with_the_failure(tmp_path: Path, fails: bool) -> None:
    state_dir = tmp_path / "state"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FAKE_SERVICES), str(ROOT)])}
    detached = [sys.executable, "-m", "kvrelay", "up", "--detach", "--port=0", f"--state-dir={state_dir}"]
    done = subprocess.run(
        detached,
        env=environ | ({"FAKE_FAIL": "decode"} if fails else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if fails:
        assert done.returncode == 1
        assert "decode-0 exited with status 1 before it was ready" in done.stdout
        assert running_stacks(state_dir) == [] and list(state_dir.glob("up-*.log")) == []
        return
    (stack,) = running_stacks(state_dir)
    family = psutil.Process(stack.pid).children(recursive=True)
    try:
        assert done.returncode == 0, done.stdout
        assert (
            f"Runs in the background (process {stack.pid}, log {state_dir / str(stack.port) / 'up.log'})" in done.stdout
        )
        assert len(family) == 4
    finally:
        assert stop([f"--state-dir={state_dir}"]) == 0
    _, alive = psutil.wait_procs(family, PATIENCE_S)
    assert alive == []


def own_stack(port: int, *processes: ProcessState) -> StackState:
    """As this process would write it."""
    return StackState(
        pid=os.getpid(),
        identity=own_identity(),
        port=port,
        url=f"http://127.0.0.1:{port}",
        model="m",
        redis_url="redis://h",
        redis_prefix="p",
        is_ready=True,
        processes=processes,
    )


def test_a_process_that_starts_is_not_restarted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_stack(1, ProcessState("decode-0", "decode", None, "starting")).write(tmp_path / "1")
    here = ["--state-dir", str(tmp_path)]
    assert restart(["decode-0", *here]) == 1
    log = tmp_path / "1" / "decode-0.log"
    told = f"decode-0 is not ready (starting): kvrelay up starts it by itself; its log is {log}"
    assert capsys.readouterr().err == f"kvrelay restart: {told}\n"
    assert status(here) == 1 and "  not all ready  m\n" in capsys.readouterr().out


def test_one_of_several_stacks_must_be_chosen(tmp_path: Path) -> None:
    for port in (1, 2):
        own_stack(port).write(tmp_path / str(port))
    with pytest.raises(CommandFailed, match=r"several stacks run in .*, on ports 1, 2: choose one with --port"):
        find_stack(tmp_path, None)
    assert find_stack(tmp_path, 2).port == 2
    (tmp_path / "1" / "stack.json").write_text("{}")  # of another version
    assert find_stack(tmp_path, None).port == 2


def test_drain_without_a_stack_or_redis_says_how_to_name_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> int:
        raise RegistryUnavailable("Redis does not answer: Connection refused.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvrelay.cli.drain._drain", refused)
    message = "kvrelay drain: Redis does not answer: Connection refused"
    assert drain(["decode-0"]) == 1
    hint = "; no stack of kvrelay up runs in .kvrelay: name its --state-dir, or --redis"
    assert capsys.readouterr().err == f"{message}{hint}\n"
    assert drain(["decode-0", "--redis=redis://h"]) == 1
    assert capsys.readouterr().err == f"{message}\n"


def test_without_a_stack_top_asks_the_default_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvrelay.cli.top.ask", lambda url, *_, **__: (_ for _ in ()).throw(OSError(f"asked {url}")))
    assert top(["--once"]) == 1
    assert f"asked {DEFAULT_URL}" in capsys.readouterr().err


HELD = {"worker_id": "w0", "role": "decode"}


def test_drain_marks_waits_and_takes_back(redis_server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = f"test-{secrets.token_hex(4)}"
    flags = ["--redis", redis_server.url, "--redis-prefix", prefix, "--served-model-name", "m"]

    async def publish(num_open: float) -> list[WorkerRecord]:
        registry = Registry(redis_server.url, prefix)
        joined = await registry.join(worker_record(**HELD, load={"open": num_open}), 60)
        await registry.renew(msgspec.structs.replace(joined, load={"open": num_open}), 60)
        workers = await registry.list_workers("m")
        await registry.close()
        return workers

    async def publish_of_an_older_version() -> None:
        registry = Registry(redis_server.url, prefix)
        await registry.join(worker_record(**HELD, load={}), 60)
        await registry.close()

    asyncio.run(publish_of_an_older_version())
    assert drain(["w0", *flags, "--wait", "0"]) == 1 and "does not say" in capsys.readouterr().err
    assert drain(["w0", *flags, "--undo"]) == 0
    assert not asyncio.run(publish(1))[0].draining
    assert drain(["nobody", *flags]) == 1 and "there are: w0" in capsys.readouterr().err
    assert drain(["w0", *flags, "--wait", "0.1"]) == 1 and "still has 1 requests" in capsys.readouterr().err
    assert asyncio.run(publish(0))[0].draining
    assert drain(["w0", *flags, "--wait", "10"]) == 0 and "idle" in capsys.readouterr().out
    assert drain(["w0", *flags, "--undo"]) == 0
    assert not asyncio.run(publish(0))[0].draining


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "soon"])
def test_the_wait_must_be_a_time(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        drain(["w0", f"--wait={text}"])
    assert error.value.code == 2 and "must be a number from 0 to 86400" in capsys.readouterr().err
