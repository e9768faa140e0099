"""Workers whose model is divided among processes: tokens are those of transformers, also if a rank is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import reference
from tests.e2e.prompts import prompt_of
from tests.fakes.stack import Stack
from tests.fakes.waiting import wait_until
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.e2e
FLAGS = ("--dtype", "float32", "--token-budget", "48", "--max-running", "16", "--num-blocks", "40")
"""Prompts are cut into chunks, and not all sequences fit at the same time."""
LENGTHS = (1, 16, 17, 130, 200, 64, 100, 33)
NUM_OUTPUT = 24


def ranks_of(pid: int) -> list[int]:
    """The processes of a worker's other ranks."""
    children = psutil.Process(pid).children()
    return [child.pid for child in children if any(each.startswith("--engine=") for each in child.cmdline())]


def check_together(stack: Stack, model: Path, prompts: Sequence[list[int]], **parameters: Any) -> None:
    """Sends all prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(stack.complete, each, NUM_OUTPUT, ignore_eos=True, **parameters) for each in prompts]
        for prompt, answer in zip(prompts, asked, strict=True):
            assert answer.result()["token_ids"] == reference.greedy(model, prompt, NUM_OUTPUT)


@pytest.mark.slow
def test_one_role(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Decode workers that compute prompts as well, one of which loses a rank."""
    model = tiny_model("llama")
    flags = ("--prefill", "0", "--decode", "2", "--decode-tensor-parallel-size", "2", *FLAGS)
    with Stack(model, tmp_path, *flags) as stack:
        workers = {name: pid for name, pid in stack.children().items() if name.startswith("decode")}
        ranks = {name: ranks_of(pid) for name, pid in workers.items()}
        assert [len(each) for each in ranks.values()] == [1, 1]
        prompts = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]
        for _ in range(2):  # the second time with what was cached
            check_together(stack, model, prompts)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(check_together, stack, model, prompts)
            wait_until(lambda: stack.busy_blocks() or asked.done())
            victim = "decode-0"
            os.kill(ranks[victim][0], signal.SIGKILL)
            asked.result()
        wait_until(lambda: stack.children().get(victim, workers[victim]) != workers[victim])
        wait_until(lambda: len([w for w in stack.workers("decode") if w["state"] == "ready"]) == 2)
        check_together(stack, model, prompts)
        stack.wait_until_clean()
        every = [pid for each in workers for pid in ranks_of(stack.children()[each])]
        assert len(every) == 2
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in every))
