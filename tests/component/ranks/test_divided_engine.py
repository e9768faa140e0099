"""A model divided among processes, inside a program: the tokens of transformers, and clear errors."""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvrelay import LLM, Engine, SamplingParams
from kvrelay.process import HeldPort
from kvrelay.ranks.ranked_runner import RankedRunner
from kvrelay.step.batch import DeviceLost
from tests.e2e import reference
from tests.fakes.waiting import PATIENCE_S, wait_until
from tests.tiny_models import VOCAB_SIZE, build_model

pytestmark = pytest.mark.component
SMALL: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_blocks": 24, "token_budget": 32, "max_running": 8}
"""A pool of 384 tokens, so that requests wait and are preempted."""
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SMALL, max_model_len=256, tensor_parallel_size=2) as llm:
        yield llm


def ranks_of_this_process() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        if child.status() != psutil.STATUS_ZOMBIE and "--engine=" in " ".join(child.cmdline()):
            found.append(child)
    return found


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Some begin alike. Without token 0, which is padding to the reference."""
    rng, start = random.Random(seed), list(range(1, 41))
    return [
        (start if rng.random() < 0.5 else []) + [rng.randrange(1, VOCAB_SIZE - 5) for _ in range(rng.randint(1, 100))]
        for _ in range(count)
    ]


def check_greedy(model: Path, llm: LLM) -> None:
    prompts = prompts_of(1, 8)
    for _ in range(2):  # the second time from the cache
        answers = llm.generate(prompts, GREEDY, progress=False)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.outputs[0].token_ids == reference.greedy(model, prompt, 24)
    assert any(answer.usage.cached_tokens for answer in answers)
    assert llm.engine._scheduler.num_preemptions > 0, "the pool was too large to test preemption"
    assert llm.engine._scheduler.blocks.pool.num_available == 24, "free or only cached"


def check_samples(model: Path, llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, temperature=0.8, max_tokens=10, logprobs=2, prompt_logprobs=1)
    prompts = prompts_of(2, 4)
    with LLM(str(model), **SMALL, max_model_len=256) as whole:
        expected = whole.generate(prompts, params, progress=False)
    for answer, other in zip(llm.generate(prompts, params, progress=False), expected, strict=True):
        for ours, theirs in zip(answer.outputs, other.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
        assert answer.prompt_logprobs is not None and other.prompt_logprobs is not None
        for mine, its in zip(answer.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine is not None and its is not None
            assert math.isclose(mine.logprob, its.logprob, abs_tol=1e-4)


def test_outputs_are_those_of_transformers_and_of_one_process(model: Path, llm: LLM) -> None:
    check_greedy(model, llm)
    check_samples(model, llm)


@pytest.mark.parametrize(
    ("divided", "size", "victim"),
    [
        ("tensor", 2, 1),
        ("pipeline", 2, 1),
        pytest.param("pipeline", 3, 1, marks=pytest.mark.slow),
        pytest.param("pipeline", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_a_lost_device(divided: str, size: int, victim: int, model: Path) -> None:
    engine = Engine(str(model), **SMALL, **{f"{divided}_parallel_size": size})
    pids = pids_of(engine)
    for number, prompt in enumerate(prompts_of(4, 6)):
        engine.add_request(f"{number}", prompt, GREEDY)
    engine.step()
    os.kill(pids[victim - 1], signal.SIGKILL)
    with pytest.raises(DeviceLost, match=f"rank {victim} was killed by SIGKILL"):
        step_on(engine)
    engine.close()
    wait_until(lambda: not {each.pid for each in ranks_of_this_process()} & set(pids))


def step_on(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def pids_of(engine: Engine) -> list[int]:
    """Of the ranks that are processes of their own."""
    assert isinstance(engine._runner, RankedRunner)
    return [each.pid for each in engine._runner.group._local.processes.values()]


@pytest.mark.slow
def test_ranks_end_with_an_engine_that_is_never_closed(model: Path) -> None:
    engine = Engine(str(model), **SMALL, tensor_parallel_size=2)
    (pid,) = pids_of(engine)
    assert psutil.pid_exists(pid)
    del engine
    wait_until(lambda: pid not in {each.pid for each in ranks_of_this_process()})


def test_a_rank_that_is_started_by_hand_joins(model: Path) -> None:
    with HeldPort() as held:
        port = held.port
    command = [
        sys.executable,
        "-m",
        "kvrelay.cli.main",
        "rank",
        f"--engine=127.0.0.1:{port}",
        "--rank=1",
        "--threads=1",
    ]
    with subprocess.Popen(command) as process:
        try:
            given = {"tensor_parallel_size": 2, "local_ranks": 0, "rank_port": port, "rank_timeout_s": PATIENCE_S}
            with LLM(str(model), **SMALL, **given) as llm:
                [prompt] = prompts_of(3, 1)
                [answer] = llm.generate([prompt], GREEDY, progress=False)
                assert answer.outputs[0].token_ids == reference.greedy(model, prompt, 24)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


# -- what cannot start --------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = {each.pid for each in ranks_of_this_process()}
    yield
    assert {each.pid for each in ranks_of_this_process()} <= before


@pytest.mark.usefixtures("nothing_left")
def test_heads_that_do_not_divide(model: Path) -> None:
    with pytest.raises(ValueError, match=r"4 attention heads.*3|3.*4 attention heads"):
        Engine(str(model), **SMALL, tensor_parallel_size=3)


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_never_comes(model: Path) -> None:
    with HeldPort() as held:
        port = held.port
    with pytest.raises(ValueError, match=r"of 2 ranks, 1 did not come to .* within 1 s \(rank_timeout_s\)"):
        Engine(str(model), **SMALL, tensor_parallel_size=2, local_ranks=0, rank_port=port, rank_timeout_s=1)


@pytest.mark.usefixtures("nothing_left")
def test_an_address_that_is_taken(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen for ranks on 127.0.0.1 port {port}: Address already"):
            Engine(str(model), **SMALL, tensor_parallel_size=2, rank_port=port)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_dies_while_it_loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-m", "tests.component.ranks.dying_rank")
    monkeypatch.setattr("kvrelay.ranks.launch.RANK_COMMAND", command)
    with pytest.raises(ValueError, match="rank 1 exited with status 7"):
        Engine(str(model), **SMALL, tensor_parallel_size=2)
