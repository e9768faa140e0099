"""Groups of workers with data-parallel attention: tokens are those of transformers, also if a rank is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvrelay.process import HeldPort, die_with_parent
from tests.e2e import reference
from tests.e2e.prompts import prompt_of
from tests.e2e.test_ranks import FLAGS, LENGTHS, check_growth, check_samples, check_together, kill_a_rank, ranks_of
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S, wait_until
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.e2e


def total(stack: Stack, role: str, name: str) -> float:
    return float(sum(worker["totals"].get(name, 0) for worker in stack.workers(role)))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "number"), [("llama", signal.SIGKILL), ("qwen3-moe", signal.SIGSTOP)])
def test_decode_groups_that_compute_prompts(
    architecture: str, number: signal.Signals, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two groups of two, with the prefill delayer, one of which loses a rank, or has one that stands still."""
    model = tiny_model(architecture)
    flags = ("--prefill=0", "--decode=2", "--data-parallel-size=2", "--prefill-delayer", *FLAGS)
    with Stack(model, tmp_path, *flags) as stack:
        names = {worker["worker_id"] for worker in stack.workers()}
        assert names == {"decode-0", "decode-0-dp1", "decode-1", "decode-1-dp1"}
        prompts = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]
        for _ in range(2):  # the second time with what was cached
            check_together(stack, model, prompts)
        check_growth(stack, model, num_pools=4)
        check_samples(stack, model, prompts[-1])
        assert total(stack, "decode", "cached_blocks")
        stack.complete(prompts[0], 1)  # alone: the other rank of the group has no prompt
        wait_until(lambda: any("prefill_delayer.mixed" in key for each in stack.workers() for key in each["totals"]))
        kill_a_rank(stack, model, prompts, "decode-0", number=number)
        check_together(stack, model, prompts)
        stack.wait_until_clean()
        every = [pid for pid in stack.children().values() for pid in ranks_of(pid)]
        assert len(every) == 2
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in every))


@pytest.mark.slow
def test_a_group_that_drains_finishes_the_requests_of_all_its_ranks(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A rank that has drained takes part in the steps of the others."""
    model, length = tiny_model("llama"), 400
    flags = ("--prefill=0", "--data-parallel-size=2", "--dtype=float32", "--num-blocks=200")
    with Stack(model, tmp_path, *flags) as stack:
        prompts = [prompt_of(20 + number, VOCAB_SIZE) for number in range(6)]
        first = stack.children()["decode-0"]
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(stack.complete, each, length, ignore_eos=True) for each in prompts]
            wait_until(lambda: len(stack.busy_blocks()) == 2)
            os.kill(first, signal.SIGTERM)
            for prompt, answer in zip(prompts, asked, strict=True):
                assert answer.result()["token_ids"] == reference.greedy(model, prompt, length)
        wait_until(lambda: stack.children().get("decode-0", first) != first)
        log = next(stack.state_dir.glob("*/decode-0.log")).read_text()
    assert log.count("draining:") == 2
    assert "draining: 0 requests" not in log
    assert "did not finish" not in log
    assert " ERROR " not in log


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2)])
def test_handoffs_between_groups(prefill: int, decode: int, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("qwen3-moe" if prefill == 1 else "llama")
    file = tmp_path / "kvrelay.toml"
    file.write_text(f"[prefill]\ndata_parallel_size = {prefill}\n[decode]\ndata_parallel_size = {decode}\n")
    with Stack(model, tmp_path, "--config", str(file), "--transfer-checksums", *FLAGS) as stack:
        prompts = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]
        for _ in range(2):
            check_together(stack, model, prompts)
        stack.wait_until_clean()
        assert total(stack, "decode", "handoffs_committed") == 2 * len(prompts)


def start(model: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvrelay_decode", f"--model={model}", "--redis-url=none", "--http-port=0"]
    command += ["--dtype=float32", "--num-blocks=40", "--threads=1", *flags]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent()
    )


def last_words(process: subprocess.Popen[str]) -> str:
    """What a process that ends by itself has logged. Nothing that it started is left."""
    _, logged = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, logged
    return logged


def test_a_rank_that_cannot_start_ends_the_group(tiny_model: Callable[[str], Path]) -> None:
    """Its port is taken: http_port of rank 1 is the next one."""
    with port_before_a_taken_one() as port:
        logged = last_words(start(tiny_model("llama"), "--data-parallel-size=2", f"--http-port={port}"))
    assert "rank 1 exited with status 1" in logged


@contextmanager
def port_before_a_taken_one() -> Iterator[int]:
    """A port that a service may take, while another server has the next one."""
    while True:
        held = HeldPort()
        try:
            server = socket.create_server(("127.0.0.1", held.port + 1))
        except (OSError, OverflowError):
            held.release()
            continue
        with held, server:
            yield held.port
        return
