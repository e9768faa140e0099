"""Whole systems on one device, prefill and decode as two processes of it: tokens are those of transformers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from kvrelay.engine.load.causal_model import load_model
from kvrelay.engine.load.model_source import open_source
from tests.component.transfer.transports import NO_NIXL
from tests.fakes.stack import Stack
from tests.fakes.waiting import wait_until
from tests.gpu.conftest import KERNELS_TIMEOUT_S, skip_without_flashinfer
from tests.gpu.reference import bfloat16_tolerance, greedy, own_logits, prompts, read_model, sixteen_bit_backend
from tests.tiny_models import build_model

NUM_OUTPUT = 30
LONG_OUTPUT = 1500
KILLED_OUTPUT = 300
over_nixl = pytest.param("nixl", marks=pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL))
transport = pytest.mark.parametrize("transport", [over_nixl, "zmq"])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen3", tmp_path_factory.mktemp("float32"))


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("wide-qwen3", tmp_path_factory.mktemp("bfloat16"), dtype=torch.bfloat16)


StartStack = Callable[..., Stack]


@pytest.fixture
def start(device: torch.device, tmp_path: Path) -> Iterator[StartStack]:
    """Starts `kvrelay up` on the device with small steps, so that prompts take several."""
    with ExitStack() as running:

        def started(model: Path, dtype: str, transport: str, *flags: str) -> Stack:
            kind = "cuda" if device.type == "cuda" else "cpu"
            small = (
                "--device",
                kind,
                "--dtype",
                dtype,
                "--transfer",
                transport,
                "--token-budget",
                "64",
                "--max-running",
                "64",
            )
            threads = ("--threads", "1") if kind == "cpu" else ()
            return running.enter_context(Stack(model, tmp_path / "stack", *small, *threads, *flags))

        yield started


def complete_all(stack: Stack, given: list[list[int]], max_tokens: int) -> list[list[int]]:
    with ThreadPoolExecutor(len(given)) as pool:
        choices = pool.map(lambda prompt: stack.complete(prompt, max_tokens, ignore_eos=True), given)
        return [choice["token_ids"] for choice in choices]


def total(stack: Stack, role: str, name: str) -> int:
    return int(sum(worker["totals"][name] for worker in stack.workers(role)))


@pytest.mark.slow
@transport
def test_float32_tokens_are_those_of_transformers(
    device: torch.device, start: StartStack, model_dir: Path, transport: str
) -> None:
    stack = start(model_dir, "float32", transport, "--num-blocks", "400")
    given = [[5], *prompts(6, 400), [7] * 16, [7] * 17]
    reference = read_model(model_dir, torch.float32, device)
    expected = [greedy(reference, prompt, NUM_OUTPUT) for prompt in given]
    assert complete_all(stack, given, NUM_OUTPUT) == expected
    assert complete_all(stack, given, NUM_OUTPUT) == expected, "with what was cached"
    assert total(stack, "decode", "handoffs_committed") == 2 * len(given)
    stack.wait_until_clean()


@pytest.mark.slow
@pytest.mark.parametrize("transport", [over_nixl])
def test_workers_killed_under_streams_change_no_token(
    device: torch.device, start: StartStack, model_dir: Path, transport: str
) -> None:
    """Each once it has handed over or taken over some of the requests; `kvrelay up` starts it again."""
    stack = start(model_dir, "float32", transport, "--num-blocks", "1000")
    given = prompts(8, 400, seed=4)
    reference = read_model(model_dir, torch.float32, device)
    expected = [greedy(reference, prompt, KILLED_OUTPUT) for prompt in given]
    for victim in ("decode-0", "prefill-0"):
        assert outputs_while_killing(stack, victim, given) == expected, victim
        stack.wait_until_clean()


def outputs_while_killing(stack: Stack, victim: str, given: list[list[int]]) -> list[list[int]]:
    """Returns when the worker is there again."""
    before, pid = total(stack, "decode", "handoffs_committed"), stack.children()[victim]
    with ThreadPoolExecutor(1) as load:
        outputs = load.submit(complete_all, stack, given, KILLED_OUTPUT)
        wait_until(lambda: total(stack, "decode", "handoffs_committed") > before)
        os.kill(pid, signal.SIGKILL)
        found = outputs.result()
    wait_until(lambda: stack.children().get(victim, pid) != pid)
    wait_until(lambda: {"ready"} == {worker["state"] for worker in stack.workers()})
    return found


@pytest.mark.slow
@pytest.mark.timeout(KERNELS_TIMEOUT_S)
@transport
def test_bfloat16_tokens_are_the_best_by_float32_or_nearly_so(
    device: torch.device, start: StartStack, wide_model_dir: Path, transport: str
) -> None:
    """Where two tokens nearly tie, rounding may choose either. How near: a logit is off by `bfloat16_tolerance` of the
    logits' size, and a token is chosen for being above another, both off; eight times one error covers the worst pair
    of a few hundred. A token that a wrong block brought is some three times their size below the best."""
    skip_without_flashinfer(device)
    # Compiles the kernels where they are not there yet; the services then find them.
    load_model(open_source(str(wide_model_dir), "bfloat16", device), 16, sixteen_bit_backend(device))
    stack = start(wide_model_dir, "bfloat16", transport, "--num-blocks", "400")
    given = prompts(6, 300, seed=1)
    reference = read_model(wide_model_dir, torch.float32, device)
    limit = 8 * bfloat16_tolerance(reference.config.num_hidden_layers)
    for prompt, output in zip(given, complete_all(stack, given, NUM_OUTPUT), strict=True):
        logits = own_logits(reference, prompt + output)[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(NUM_OUTPUT), torch.tensor(output)]
        gaps = (logits.amax(-1) - chosen) / logits.square().mean(-1).sqrt()
        assert gaps.max().item() <= limit
    stack.wait_until_clean()


@pytest.mark.slow
@transport
def test_clients_that_leave_free_everything(
    device: torch.device, start: StartStack, model_dir: Path, transport: str
) -> None:
    stack = start(model_dir, "float32", transport, "--num-blocks", "1000")
    body = {"model": stack.model, "max_tokens": LONG_OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}

    def leave(numbered: tuple[int, list[int]]) -> None:
        num_events, prompt = numbered
        with stack.http.stream("POST", "/v1/completions", json=body | {"prompt": prompt}) as answer:
            events = (line for line in answer.iter_lines() if line)
            for _ in range(num_events):
                next(events)

    leavers = prompts(6, 300, seed=2)
    with ThreadPoolExecutor(len(leavers)) as pool:
        list(pool.map(leave, enumerate(leavers)))
    stack.wait_until_clean()
    assert total(stack, "decode", "cancelled") > 0
    stayer = prompts(1, 200, seed=3)
    expected = greedy(read_model(model_dir, torch.float32, device), stayer[0], NUM_OUTPUT)
    assert complete_all(stack, stayer, NUM_OUTPUT) == [expected]
