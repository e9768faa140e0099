"""Ranks with their own sequences and parts of each MLP, against transformers' own generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.load.checkpoint import read_config
from kvrelay.engine.make import make_runner
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.model_part import RankGroups
from kvrelay.engine.parallel.shard_plan import check_data_parallel
from kvrelay.engine.run.attention import UnsupportedModel
from tests.component.engine.data_parallel_ranks import Task, flattened, prompts_of, run_ranks
from tests.component.engine.tensor_parallel_ranks import free_address
from tests.fakes.reference_model import generate, load_reference
from tests.tiny_models import DIVIDED, VOCAB_SIZE, build_model

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_blocks": 64}
NUM_OUTPUT = 10
FAST = {("llama", 2), ("qwen3-moe", 2)}
FUSED = {"llama", "tied-llama", "mistral", "qwen2", "qwen3"}
"""Families whose layers the C kernels compute."""
CASES = [
    pytest.param(name, size, id=f"{name}-{size}", marks=() if (name, size) in FAST else pytest.mark.slow)
    for name in DIVIDED
    for size in ((2, 4) if name in ("llama", "qwen3-moe") else (2,))
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda name: root / name if (root / name).exists() else build_model(name, root / name)


def tasks_of(size: int, **changes: Any) -> list[Task]:
    """The last rank has no sequences, and the one before it begins late."""
    lengths = [(1, 15, 16, 60), (37, 2), (20,)][: size - 1]
    tasks = [
        Task(prompts_of(each, VOCAB_SIZE, rank), NUM_OUTPUT, seed=rank, begins_at=7 if rank == size - 2 > 0 else 0)
        for rank, each in enumerate(lengths)
    ]
    return [replace(each, **changes) for each in (*tasks, Task([], 0))]


@pytest.mark.parametrize(("architecture", "size"), CASES)
def test_greedy_tokens_are_those_of_generate(architecture: str, size: int, model_dir: Callable[[str], Path]) -> None:
    path = model_dir(architecture)
    tasks = tasks_of(size, forward="fused" if architecture in FUSED else "")
    if size == 2:
        tasks[1] = Task(prompts_of((5, 33), VOCAB_SIZE, 9), NUM_OUTPUT, begins_at=4, seed=9)
    model = load_reference(path)
    for prompt, output in flattened(tasks, run_ranks(tasks, model=str(path), **OPTIONS)):
        assert output == generate(model, prompt, NUM_OUTPUT)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("how", "fused_layers"),
    [("unknown", False), ("layer", False), ("logits", False), ("unknown", True), ("angles", True), ("logits", True)],
)
def test_the_group_stays_in_step_behind_steps_that_fail_on_one_rank(
    how: str, fused_layers: bool, model_dir: Callable[[str], Path]
) -> None:
    """`layer` fails in a module, and `angles` between the exchange of a fused step and its layers."""
    path = model_dir("llama")
    forward = "fused" if fused_layers else "eager"
    tasks = [
        Task(prompts_of((30, 12), VOCAB_SIZE, 1), NUM_OUTPUT, fails=how, seed=1, forward=forward),
        Task(prompts_of((9, 40), VOCAB_SIZE, 2), NUM_OUTPUT, seed=2, forward=forward),
    ]
    model = load_reference(path)
    answers = run_ranks(tasks, model=str(path), fused_layers=fused_layers, **OPTIONS)
    for prompt, output in flattened(tasks, answers):
        assert output == generate(model, prompt, NUM_OUTPUT)


def test_a_rank_that_fails_within_a_collective_is_lost_to_all(model_dir: Callable[[str], Path]) -> None:
    tasks = [
        Task(prompts_of((30,), VOCAB_SIZE, 1), NUM_OUTPUT, fails="mlp", seed=1),
        Task(prompts_of((30,), VOCAB_SIZE, 2), NUM_OUTPUT, seed=2),
    ]
    answers = run_ranks(tasks, model=str(model_dir("llama")), fused_layers=False, **OPTIONS)
    assert "out of step" in answers[0]
    assert answers[1].startswith("lost: ")


@pytest.mark.slow
@pytest.mark.parametrize("fused_layers", [True, False])
def test_ranks_of_several_machines_use_gloo(fused_layers: bool, model_dir: Callable[[str], Path]) -> None:
    path, tasks = model_dir("qwen3"), tasks_of(3, forward="fused" if fused_layers else "eager")
    model, how = load_reference(path), {"without_shared_memory": True, "fused_layers": fused_layers}
    for prompt, output in flattened(tasks, run_ranks(tasks, model=str(path), **how, **OPTIONS)):
        assert output == generate(model, prompt, NUM_OUTPUT)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_modules_give_the_same_tokens(architecture: str, model_dir: Callable[[str], Path]) -> None:
    path, tasks = model_dir(architecture), tasks_of(2, forward="eager")
    model = load_reference(path)
    for prompt, output in flattened(tasks, run_ranks(tasks, model=str(path), fused_layers=False, **OPTIONS)):
        assert output == generate(model, prompt, NUM_OUTPUT)


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_fused_layers_take_bfloat16_and_kv_in_8_bits(kv_cache_dtype: str, model_dir: Callable[[str], Path]) -> None:
    """The check at load compares logits, by the CPU's instructions for bfloat16. Tokens may differ from float32's."""
    path, options = model_dir("qwen2"), OPTIONS | {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    tasks = tasks_of(3, forward="fused")
    for each in run_ranks(tasks, model=str(path), **options):
        assert isinstance(each, list) and all(len(output) == NUM_OUTPUT for output in each), each


@pytest.mark.slow
def test_random_weights_are_those_of_the_whole_model(model_dir: Callable[[str], Path]) -> None:
    path = model_dir("tied-llama")
    tasks = [Task(prompts_of((30, 12), VOCAB_SIZE, 1), NUM_OUTPUT, seed=1), Task([], 0)]
    whole = run_ranks([tasks[0]], model=str(path), load_format="dummy", **OPTIONS)
    assert run_ranks(tasks, model=str(path), load_format="dummy", **OPTIONS)[0] == whole[0]


def test_what_a_rank_says_of_itself_is_what_one_process_does(model_dir: Callable[[str], Path]) -> None:
    """KV can be handed over between them."""
    path = model_dir("llama")
    whole = make_runner(str(path), **OPTIONS)
    group = GroupCoordinator.connect(0, 1, free_address(), 60)
    rank = make_runner(str(path), ranks=RankGroups(data_parallel=group), **OPTIONS)
    assert rank.spec.fingerprint == whole.spec.fingerprint
    assert (rank.spec.block_bytes, rank.follows, rank.launches_ahead) == (whole.spec.block_bytes, False, False)
    group.close()


def test_mlps_that_do_not_divide_are_refused(model_dir: Callable[[str], Path]) -> None:
    config = read_config(str(model_dir("llama")))
    with pytest.raises(UnsupportedModel, match=r"data_parallel_size = 7: .* columns, which do not divide by"):
        check_data_parallel(config, 7)
