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

from tests.component.transfer.transports import NO_NIXL
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
GROWN_OUTPUT = 250
"""With a prompt of 20 tokens 17 blocks: three such sequences do not fit into a pool, and are admitted with 2 each."""


Size = int | tuple[int, int]
"""Ranks, or stages and the ranks of each."""


def ranks_of(pid: int) -> list[int]:
    """The processes of a worker's other ranks."""
    children = psutil.Process(pid).children()
    flags = ("--engine=", "--data-parallel-rank=")
    return [child.pid for child in children if any(each.startswith(flags) for each in child.cmdline())]


def check_together(stack: Stack, model: Path, prompts: Sequence[list[int]], num_output: int = NUM_OUTPUT) -> None:
    """Sends all prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(stack.complete, each, num_output, ignore_eos=True) for each in prompts]
        for prompt, answer in zip(prompts, asked, strict=True):
            assert answer.result()["token_ids"] == reference.greedy(model, prompt, num_output)


def check_growth(stack: Stack, model: Path, num_pools: int = 1) -> int:
    """Sends so many sequences that grow that on some pool three of them, which do not fit, are preempted.

    Returns how many requests that were.
    """
    prompts = [prompt_of(20, VOCAB_SIZE, seed=1 + number) for number in range(2 * num_pools + 1)]
    check_together(stack, model, prompts, GROWN_OUTPUT)
    wait_until(lambda: sum(worker["totals"].get("preemptions", 0) for worker in stack.workers("decode")))
    return len(prompts)


def check_samples(stack: Stack, model: Path, prompt: list[int]) -> None:
    """Three samples, all greedy."""
    body = {"model": stack.model, "prompt": prompt, "max_tokens": NUM_OUTPUT, "n": 3, "temperature": 0}
    answer = stack.http.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    expected = reference.greedy(model, prompt, NUM_OUTPUT)
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == [expected] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divided", "architecture"),
    [
        pytest.param("decode-tensor", "llama", marks=pytest.mark.always),
        pytest.param("pipeline", "llama", marks=pytest.mark.always),
        ("pipeline", "qwen3"),
    ],
)
def test_one_role(divided: str, architecture: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Decode workers of two ranks or stages that compute prompts as well, one of which loses one of them."""
    model = tiny_model(architecture)
    flags = ("--prefill", "0", "--decode", "2", f"--{divided}-parallel-size", "2", *FLAGS)
    with Stack(model, tmp_path, *flags) as stack:
        prompts = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]
        for _ in range(2):  # the second time with what was cached
            check_together(stack, model, prompts)
        check_growth(stack, model, num_pools=2)
        check_samples(stack, model, prompts[-1])
        kill_a_rank(stack, model, prompts, "decode-0")
        check_together(stack, model, prompts)
        stack.wait_until_clean()
        every = [pid for pid in stack.children().values() for pid in ranks_of(pid)]
        assert len(every) == 2
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in every))


def kill_a_rank(
    stack: Stack,
    model: Path,
    prompts: Sequence[list[int]],
    victim: str,
    rank: int = 1,
    number: signal.Signals = signal.SIGKILL,
) -> None:
    """Signals one of a worker's ranks while the prompts are served. Returns when its worker is ready again."""
    num_workers, before = len(stack.workers()), stack.children()[victim]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(check_together, stack, model, prompts)
        wait_until(lambda: stack.busy_blocks() or asked.done())
        os.kill([before, *ranks_of(before)][rank], number)
        asked.result()
    wait_until(lambda: stack.children().get(victim, before) != before)
    wait_until(lambda: [worker["state"] for worker in stack.workers()] == ["ready"] * num_workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "architecture", "transfer"),
    [
        *((2, 2, "llama", "auto"), (2, 1, "qwen3", "zmq"), (1, 2, "mistral", "auto"), (4, 1, "gemma", "auto")),
        *((1, 4, "qwen3-moe", "zmq"), (2, 2, "qwen2", "zmq"), (4, 1, "qwen2", "zmq"), (1, 4, "llama", "auto")),
        *((2, 1, "qwen3-moe", "auto"), (1, 2, "gemma", "zmq"), (1, 1, "llama", "zmq")),
        ((2, 1), (1, 1), "qwen3", "auto"),
        ((1, 1), (2, 2), "tied-llama", "zmq"),
        ((1, 2), (2, 1), "mistral", "auto"),
        ((2, 2), (1, 2), "gemma", "zmq"),
        ((2, 2), (2, 2), "qwen3-moe", "zmq"),
        ((3, 1), (2, 2), "gemma3", "auto"),
    ],
    ids=str,
)
def test_handoffs_between_sizes(
    prefill: Size, decode: Size, architecture: str, transfer: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, file = tiny_model(architecture), tmp_path / "kvrelay.toml"
    text = ""
    for role, size in (("prefill", prefill), ("decode", decode)):
        stages, ranks = size if isinstance(size, tuple) else (1, size)
        text += f"[{role}]\npipeline_parallel_size = {stages}\ntensor_parallel_size = {ranks}\n"
    file.write_text(text)
    flags = (f"--config={file}", f"--transfer={transfer}", "--transfer-checksums")
    with Stack(model, tmp_path, *flags, *FLAGS) as stack:
        check_handoffs(stack, model, transfer)


def check_handoffs(stack: Stack, model: Path, transfer: str) -> None:
    """All prompts are computed by the prefill worker and handed over, also with preemptions on the decode worker."""
    prompts = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]
    for _ in range(2):  # the second time with what was cached
        check_together(stack, model, prompts)
    num_handoffs = 2 * len(prompts) + check_growth(stack, model)
    check_samples(stack, model, prompts[-1])
    stack.wait_until_clean()
    totals: dict[str, Any] = stack.workers("decode")[0]["totals"]
    assert totals["handoffs_committed"] == num_handoffs + 3
    assert totals["computed_blocks"] == 0
    check_transport(stack, transfer)


def check_transport(stack: Stack, transfer: str) -> None:
    """All blocks came by the transport that this choice means on this machine."""
    taken = "zmq" if transfer == "zmq" or NO_NIXL else "nixl"
    logs = [path.read_text().splitlines() for path in stack.state_dir.glob("*/decode*.log")]
    lines = [line for log in logs for line in log if "KV blocks of" in line]
    assert lines and all(f" come by {taken}:" in line for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "killed", "architecture", "transfer"),
    [
        ({"prefill-tensor": 2, "decode-tensor": 2}, (("prefill-0", 0), ("decode-1", 1)), "llama", "auto"),
        pytest.param({"prefill-tensor": 2}, (("prefill-0", 1),), "qwen2", "zmq", marks=pytest.mark.always),
        ({"decode-tensor": 2}, (("decode-1", 0),), "qwen3-moe", "zmq"),
        ({"prefill-tensor": 4}, (("prefill-0", 1), ("prefill-0", 3)), "mistral", "auto"),
        ({"decode-tensor": 4}, (("decode-1", 2), ("decode-1", 0)), "qwen3", "auto"),
        ({"pipeline": 2}, (("prefill-0", 1), ("decode-1", 1)), "llama", "auto"),
        ({"pipeline": 2, "tensor": 2}, (("prefill-0", 1), ("decode-1", 1)), "llama", "zmq"),
    ],
    ids=str,
)
def test_handoffs_while_ranks_are_killed(
    sizes: dict[str, int],
    killed: Sequence[tuple[str, int]],
    architecture: str,
    transfer: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Rank 0 is the worker's own process."""
    model = tiny_model(architecture)
    flags = [f"--{name}-parallel-size={size}" for name, size in sizes.items()]
    with Stack(model, tmp_path, *flags, "--decode=2", f"--transfer={transfer}", *FLAGS) as stack:
        prompts = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]
        for victim, rank in killed:
            kill_a_rank(stack, model, prompts, victim, rank)
            check_together(stack, model, prompts)
        stack.wait_until_clean()
