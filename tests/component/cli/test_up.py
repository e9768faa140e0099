"""`kvrelay up` with real processes and the real Redis; the services are real in all but the model."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvrelay.cli.stacks import InstanceLock
from kvrelay.config.common import demo_model_path
from kvrelay.flag_parser import CommandFailed
from kvrelay.fleet.embedded import EmbeddedRedis
from tests.fakes.command import command
from tests.fakes.up import GREETING, Up
from tests.fakes.waiting import PATIENCE_S, wait_until

run_up = command("up")

Start = Callable[..., Up]


@dataclass(frozen=True, slots=True)
class Stack:
    """A running `kvrelay up`, and what its services had logged when it was ready, by file."""

    up: Up
    logs: Mapping[str, str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Up] = []

    def starter(*flags: str, port: int = 0, **environ: str) -> Up:
        started.append(Up([f"--port={port}", *flags], tmp_path / "state", environ))
        return started[-1]

    yield starter
    for up in started:
        up.end()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack for tests that only look at it."""
    state_dir = tmp_path_factory.mktemp("up") / "state"
    flags = ("--token-budget=1024", "--no-prefix-cache", "--max-attempts=7", "--threads=1")
    running = Up(["--port=0", "--prefill=2", *flags], state_dir, {})
    try:
        running.wait_ready()
        yield Stack(running, {path.name: path.read_text() for path in state_dir.glob("*/*.log")})
    finally:
        running.end()


def test_says_what_starts_and_is_ready_then_the_url_and_a_request_to_paste(stack: Stack) -> None:
    output = stack.up.output
    for name in ("redis", "prefill-0", "prefill-1", "decode-0", "router"):
        assert re.search(rf"^{name} +ready", output, re.M), output
    (url,) = set(re.findall(r"http://[\d.:]+", output))
    assert f"curl {url}/v1/chat/completions" in output
    assert '"What is an otter?"' in output
    port = int(url.rsplit(":", 1)[1])
    socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()


def test_flags_reach_the_services_and_passwords_do_not_show(stack: Stack) -> None:
    logs = stack.logs
    assert "'token_budget': 1024" in logs["prefill-0.log"]
    assert "'prefix_cache': False" in logs["decode-0.log"]
    assert "'threads': 1" in logs["decode-0.log"]
    assert "'max_attempts': 7" in logs["router.log"]
    (password,) = re.findall(r"redis://:(\w+)@", stack.up.child("kvrelay_router").environ()["KVRELAY_REDIS_URL"])
    commands = " ".join(" ".join(child.cmdline()) for child in stack.up.family)
    assert password not in stack.up.output + "".join(logs.values()) + commands


def test_logs_go_to_files(stack: Stack) -> None:
    assert "decode runs with" in stack.logs["decode-0.log"]
    assert "decode runs with" not in stack.up.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_router_then_the_workers_and_leaves_nothing(start: Start, number: signal.Signals) -> None:
    up = start()
    up.wait_ready()
    assert len(up.family) == 4  # redis, prefill, decode, router
    up.process.send_signal(number)
    assert up.wait_exit() == 0
    assert up.survivors() == []
    stops = re.findall(r"^(\S+) +(stopping|stopped)", up.output, re.M)
    assert stops[:2] == [("router", "stopping"), ("router", "stopped")]
    assert {name for name, state in stops if state == "stopped"} == {"router", "prefill-0", "decode-0"}


def test_kill_9_leaves_no_process_behind(start: Start) -> None:
    up = start()
    up.wait_ready()
    up.process.kill()
    assert up.survivors() == []


def test_a_second_interrupt_does_not_wait_for_a_worker_that_keeps_draining(start: Start) -> None:
    up = start("--drain-timeout-s=300", FAKE_STUBBORN="decode")
    up.wait_ready()
    up.process.send_signal(signal.SIGINT)
    up.wait_for(r"^decode-0 +stopping")
    up.process.send_signal(signal.SIGINT)
    assert up.wait_exit() == 0
    assert up.survivors() == []


@pytest.mark.slow
def test_a_worker_that_outlasts_its_drain_timeout_is_killed(start: Start) -> None:
    up = start("--drain-timeout-s=0", FAKE_STUBBORN="decode")
    up.wait_ready()
    up.process.send_signal(signal.SIGINT)
    assert up.wait_exit() == 0
    assert up.survivors() == []


def test_services_are_restarted_without_a_place_for_their_logs(start: Start, tmp_path: Path) -> None:
    up = start()
    up.wait_ready()
    (directory,) = (tmp_path / "state").iterdir()
    shutil.rmtree(directory)
    up.child("kvrelay_prefill").kill()
    up.wait_for(r"^prefill-0 +ready", count=2)
    assert "prefill runs with" in (directory / "prefill-0.log").read_text()  # the directory is made again
    shutil.rmtree(directory)
    directory.write_text("in the way")
    up.child("kvrelay_decode").kill()
    up.wait_for(r"^decode-0 +died +was killed by SIGKILL; restarts in 0.5 s")
    up.wait_for(r"^decode-0 runs without a log: .*File exists")
    up.wait_for(r"^decode-0 +ready", count=2)
    up.remember_children()
    up.process.send_signal(signal.SIGINT)
    assert up.wait_exit() == 0
    assert up.survivors() == []


def test_a_dead_redis_is_replaced_and_the_workers_come_back(start: Start) -> None:
    up = start()
    up.wait_ready()
    up.child("redis-server").kill()
    up.wait_for(r"^redis +died")
    up.wait_for(r"^redis +ready", count=2)
    up.child("kvrelay_prefill").kill()  # its successor can only be seen ready through the new Redis
    up.wait_for(r"^prefill-0 +ready", count=2)


def test_a_worker_that_fails_at_start_ends_it_with_its_last_words(start: Start) -> None:
    up = start(FAKE_FAIL="decode")
    assert up.wait_exit() == 1
    assert "decode-0 exited with status 1 before it was ready" in up.output
    assert "| decode cannot start: this is its last word" in up.output
    assert GREETING not in up.output


def test_a_taken_port_is_found_before_anything_starts(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start(port=port)
        assert up.wait_exit() == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in up.output
    assert "--port" in up.output
    assert "starting" not in up.output


def test_a_second_one_on_a_port_whose_first_is_still_starting_is_refused(start: Start, tmp_path: Path) -> None:
    """Nothing listens yet, so only the first one itself can keep the port. Its logs stay as they are."""
    first = start(FAKE_SLOW_START="decode")
    first.wait_for(r"^decode-0 +starting")
    (log,) = (tmp_path / "state").glob("*/decode-0.log")
    port = int(log.parent.name)
    wait_until(lambda: "decode waits" in log.read_text())
    before = log.read_bytes()
    elsewhere = start("--state-dir", str(tmp_path / "elsewhere"), port=port)
    assert elsewhere.wait_exit() == 2
    assert f"another kvrelay up (process {first.process.pid}) uses port {port}; stop it, or name another port" in (
        elsewhere.output
    )
    assert "starting" not in elsewhere.output and not (tmp_path / "elsewhere").exists()
    assert log.read_bytes() == before
    first.process.kill()
    first.wait_exit()
    third = start(port=port)
    third.wait_ready()


def test_a_second_one_that_would_share_the_logs_is_refused(tmp_path: Path) -> None:
    """In another network namespace the port is free, but not the directory."""
    directory = tmp_path / "8000"
    with InstanceLock(20001, directory):
        with pytest.raises(CommandFailed, match=f"another kvrelay up writes its logs to {directory}"):
            InstanceLock(20002, directory)
        with InstanceLock(20002, None), pytest.raises(CommandFailed, match=r"another kvrelay up \(process \d+\) uses"):
            InstanceLock(20002, None)
    InstanceLock(20001, directory).close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--token-budget=0"], "--token-budget = '0': must be a whole number, 1 to 1048576"),
        (["--decode=0"], "--decode = '0'"),
        (["--max-attempts=x"], "--max-attempts = 'x'"),
        (["--max-running=1000"], "max_running (1000) must be at most token_budget (512)"),
        (["--model=/no/such/model"], "there is no directory /no/such/model"),
        (["--model=/"], "/ is not a model directory: it has no config.json"),
        (["--kv-memory-bytes=1TiB"], "take 2048.0 GiB and their swap spaces 256.0 GiB"),
        (["--host=192.0.2.1"], "192.0.2.1 is not an address of this machine"),
        (["--redis=http://127.0.0.1"], "redis://"),
        (["--prefil=2"], "unknown flag --prefil; did you mean --prefill?"),
    ],
)
def test_a_bad_value_for_any_service_is_found_before_anything_starts(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    children = psutil.Process().children()
    try:
        status: object = run_up(["--port=0", f"--state-dir={tmp_path}", *flags])
    except SystemExit as error:  # of the parser
        status = error.code
    told = capsys.readouterr()
    assert (status, told.out) == (2, "")
    assert told.err.startswith("kvrelay up: ") and message in told.err and told.err.count("\n") == 1
    assert set(psutil.Process().children()) <= set(children)  # some of other tests may end meanwhile


def test_without_prefill_workers_decode_serves_alone(start: Start) -> None:
    up = start("--prefill", "0", "--decode", "2")
    up.wait_ready()
    assert len([child for child in up.family if "kvrelay_decode" in " ".join(child.cmdline())]) == 2
    assert not any("kvrelay_prefill" in " ".join(child.cmdline()) for child in up.family)


def test_a_redis_of_others_is_used_and_left_alone(start: Start) -> None:
    with EmbeddedRedis() as server:
        first, second = start("--redis", server.url), start("--redis", server.url)
        for up in (first, second):
            up.wait_ready()
            assert not any("redis-server" in " ".join(child.cmdline()) for child in up.family)
        names = [set(re.findall(r"^((?:prefill|decode)-\S+) +ready", up.output, re.M)) for up in (first, second)]
        assert len(names[0]) == len(names[1]) == 2
        assert not names[0] & names[1]
        first.process.send_signal(signal.SIGINT)
        assert first.wait_exit() == 0
        assert server.poll() is None


def test_an_unreachable_redis_is_said(start: Start) -> None:
    up = start("--redis=redis://127.0.0.1:1")
    assert up.wait_exit() == 1
    assert "--redis redis://127.0.0.1:1: Redis does not answer: " in up.output
    assert "; start it, or leave --redis out" in up.output and up.output.count("\n") == 0


def test_logs_go_to_the_terminal(start: Start) -> None:
    loud = start("--verbose")
    loud.wait_ready()
    loud.wait_for("decode runs with")


def test_a_cached_model_of_the_hub_needs_no_network(start: Start, tmp_path: Path) -> None:
    """The hub is a port on which nothing listens."""
    repository = tmp_path / "hub" / "models--org--otter"
    snapshot = repository / "snapshots" / ("5" * 40)
    shutil.copytree(str(demo_model_path()), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("5" * 40)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hub = f"http://127.0.0.1:{unused.getsockname()[1]}"
        up = start("org/otter", HF_HUB_CACHE=str(tmp_path / "hub"), HF_ENDPOINT=hub, KVRELAY_MODEL="")
        up.wait_ready()
    assert "Serving org/otter at" in up.output
    for service in ("kvrelay_router", "kvrelay_prefill", "kvrelay_decode"):
        flags = up.child(service).cmdline()
        assert f"--model={snapshot}" in flags and "--served-model-name=org/otter" in flags


def test_workers_are_placed_on_gpus(start: Start, tmp_path: Path) -> None:
    """The GPUs are made up; how they reach the processes is not."""
    names = {number: f"GPU-{number}0000000-aaaa-bbbb-cccc-000000000000" for number in (0, 1)}
    smi = tmp_path / "nvidia-smi"
    listing = [f"echo 'GPU {number}: NVIDIA H100 (UUID: {uuid})'" for number, uuid in names.items()]
    smi.write_text("\n".join(["#!/bin/sh", *listing]))
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    up = start("--prefill-gpus=0", "--decode-gpus=0,1", "--decode=2", PATH=path, CUDA_VISIBLE_DEVICES="0,1")
    up.wait_ready()
    for worker, gpu, percent in (("prefill-0", 0, 45), ("decode-0", 0, 45), ("decode-1", 1, 90)):
        where = rf"on GPU {gpu} \(NVIDIA H100\), {percent}% of its memory"
        assert re.search(rf"^{worker} +starting +{where} \(log: ", up.output, re.M), up.output
        assert re.search(rf"^{worker} +ready +{where} after ", up.output, re.M), up.output
        child = up.child(f"--worker-id={worker}")
        assert child.environ()["CUDA_VISIBLE_DEVICES"] == names[gpu]
        (log,) = (tmp_path / "state").glob(f"*/{worker}.log")
        assert "'device': 'cuda'" in log.read_text()
        assert f"'memory_utilization': {percent / 100}," in log.read_text()
    refused = start("--gpus=0,2", PATH=path)
    assert refused.wait_exit() == 2
    assert "gpus: there is no GPU 2 here (allowed: 0, 1, or their UUIDs)" in refused.output
    assert "starting" not in refused.output


def test_stops_while_it_is_starting(start: Start) -> None:
    up = start()
    up.wait_for(r"^router +starting")
    up.remember_children()
    up.process.send_signal(signal.SIGINT)
    assert up.wait_exit() == 0
    assert up.survivors() == []
