"""Models divided among processes, against transformers' own generate."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from kvrelay.engine.make import PoolSizing, make_runner
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.engine.sample.logprobs import BadLogits
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import BlockCopy, CandidatesWanted, DeviceLost, HostCopies, WorkerBatch, WorkerRow
from tests.component.engine.tensor_parallel_ranks import DividedRunner, RankProcesses
from tests.fakes.reference_model import generate, load_reference
from tests.tiny_models import DIVIDED, VOCAB_SIZE, build_model
from tests.unit.engine.driving import run, start

GREEDY = Sampling(temperature=0)
NUM_BLOCKS = 96
PROMPT_LENGTHS = (1, 15, 16, 17, 100, 37)
NUM_OUTPUT = 12
SIZES = (2, 4)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses()
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda name: root / name if (root / name).exists() else build_model(name, root / name)


@pytest.fixture
def divide(ranks: RankProcesses) -> Iterator[Callable[..., DividedRunner]]:
    made: list[DividedRunner] = []

    def divided(size: int, path: Path, **options: Any) -> DividedRunner:
        changed: dict[str, Any] = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "num_threads": 1} | options
        made.append(ranks.divide(size, model=str(path), **changed))
        return made[-1]

    yield divided
    for runner in made:
        runner.close()


def prompts_of(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE - 1, length).tolist() for length in lengths]


DIVISIONS = [
    pytest.param(2, 1, id="heads"),
    pytest.param(2, 2, id="layers"),
    pytest.param(4, 2, id="both", marks=pytest.mark.slow),
]
FAST = {("llama", 2), ("qwen3-moe", 2)}
CASES = [
    pytest.param(name, size, id=f"{name}-{size}", marks=() if (name, size) in FAST else pytest.mark.slow)
    for name in DIVIDED
    for size in SIZES
]


@pytest.mark.parametrize(("architecture", "size"), CASES)
def test_greedy_tokens_are_those_of_generate(
    architecture: str, size: int, divide: Callable[..., DividedRunner], model_dir: Callable[[str], Path]
) -> None:
    path = model_dir(architecture)
    runner, model = divide(size, path), load_reference(path)
    for seed in range(2):
        sequences = start(runner, prompts_of(seed=seed), GREEDY, num_output=NUM_OUTPUT, seed=seed)
        run(runner, sequences, seed=seed)
        for sequence in sequences:
            assert sequence.output == generate(model, sequence.prompt, NUM_OUTPUT)
            runner.drop_sequence(sequence.key)


def test_what_ranks_hold_and_say_of_themselves(
    divide: Callable[..., DividedRunner], model_dir: Callable[[str], Path]
) -> None:
    path = model_dir("llama")
    whole = make_runner(str(path), dtype="float32", num_blocks=NUM_BLOCKS).spec
    specs = divide(2, path).specs
    spec = specs[0]
    assert all(replace(each, host_block_s=spec.host_block_s) == spec for each in specs)
    assert (spec.num_kv_heads, spec.total_kv_heads, spec.tensor_parallel_size) == (1, 2, 2)
    assert spec.block_bytes * 2 == whole.block_bytes
    assert spec.model_identity == whole.model_identity == whole.fingerprint != spec.fingerprint
    assert spec.numerics != whole.numerics


@pytest.mark.parametrize(
    ("architecture", "size", "num_stages", "options", "expected"),
    [
        ("llama", 2, 1, {}, "fused"),
        ("llama", 2, 1, {"without_shared_memory": True}, "fused"),
        ("tied-llama", 2, 2, {}, "fused"),
        ("qwen3", 2, 2, {"fused_layers": False}, "eager"),
        pytest.param("tied-llama", 4, 2, {"without_shared_memory": True}, "fused", marks=pytest.mark.slow),
        pytest.param("gemma", 2, 1, {}, "eager", marks=pytest.mark.slow),
    ],
)
def test_ranks_run_fused_layers_where_one_process_would(
    architecture: str,
    size: int,
    num_stages: int,
    options: dict[str, Any],
    expected: str,
    divide: Callable[..., DividedRunner],
    model_dir: Callable[[str], Path],
) -> None:
    path = model_dir(architecture)
    runner, model = divide(size, path, num_stages=num_stages, **options), load_reference(path)
    assert runner.runner._model.forward.name == expected
    sequences = start(runner, prompts_of(), GREEDY, num_output=NUM_OUTPUT)
    run(runner, sequences)
    for sequence in sequences:
        assert sequence.output == generate(model, sequence.prompt, NUM_OUTPUT)


STAGES = [
    pytest.param(
        *(name, stages, size),
        id=f"{name}-{stages}x{size}",
        marks=() if (name, stages) == ("qwen3", 2) else pytest.mark.slow,
    )
    for name in DIVIDED
    for stages, size in ((2, 1), (2, 2), (3, 1))
    if stages <= DIVIDED[name]().num_hidden_layers
]


@pytest.mark.parametrize(("architecture", "num_stages", "size"), STAGES)
def test_greedy_tokens_of_stages_are_those_of_generate(
    architecture: str,
    num_stages: int,
    size: int,
    divide: Callable[..., DividedRunner],
    model_dir: Callable[[str], Path],
) -> None:
    """Stages of one rank, and of several."""
    path = model_dir(architecture)
    runner, model = divide(num_stages * size, path, num_stages=num_stages), load_reference(path)
    spec = runner.spec
    assert (spec.pipeline_parallel_size, spec.total_layers) == (num_stages, DIVIDED[architecture]().num_hidden_layers)
    assert spec.tensor_parallel_size == size
    assert spec.num_layers == 1, "rank 0 is in the last stage"
    sequences = start(runner, prompts_of(), GREEDY, num_output=NUM_OUTPUT)
    run(runner, sequences)
    for sequence in sequences:
        assert sequence.output == generate(model, sequence.prompt, NUM_OUTPUT)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_stages"), [(4, 1), (2, 2), (4, 2)], ids=["heads", "layers", "both"])
def test_a_divided_model_with_random_weights_is_the_whole_one(
    size: int, num_stages: int, divide: Callable[..., DividedRunner], model_dir: Callable[[str], Path]
) -> None:
    path = model_dir("tied-llama")
    runners: list[Any] = [
        make_runner(str(path), dtype="float32", num_blocks=NUM_BLOCKS, load_format="dummy"),
        divide(size, path, load_format="dummy", num_stages=num_stages),
    ]
    outputs = []
    for runner in runners:
        sequences = start(runner, prompts_of(), GREEDY, num_output=NUM_OUTPUT)
        run(runner, sequences)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert runners[0].spec.model_identity == runners[1].spec.model_identity


@pytest.mark.parametrize(("size", "num_stages"), DIVISIONS)
def test_scores_beams_and_drafts_keep_the_ranks_in_step(
    size: int,
    num_stages: int,
    divide: Callable[..., DividedRunner],
    model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other ranks know of these only what is in the batch."""
    path = model_dir("llama")
    whole, divided = (
        make_runner(str(path), dtype="float32", num_blocks=NUM_BLOCKS),
        divide(size, path, num_stages=num_stages),
    )
    steps = list(_mixed_steps())
    for runner in (whole, divided):
        for key, sampling, prompt in _MIXED:
            runner.add_sequence(key, sampling, prompt, len(prompt))
    for batch in steps:
        ours, theirs = divided.execute(batch), whole.execute(batch)
        for our, their in zip(ours.rows, theirs.rows, strict=True):
            assert our.token_ids == their.token_ids
            assert [entry.token_id for entry in our.prompt_logprobs] == [
                entry.token_id for entry in their.prompt_logprobs
            ]
            expected = [entry.logprob for entry in their.prompt_logprobs]
            assert [entry.logprob for entry in our.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
            assert (our.candidates is None) == (their.candidates is None)
            if our.candidates is not None and their.candidates is not None:
                assert our.candidates.token_ids.tolist() == their.candidates.token_ids.tolist()


_PROMPT = prompts_of((600,))[0]
_MIXED = [
    (("scored", 0, 0), Sampling(temperature=0, prompt_logprobs=2, max_tokens=4), _PROMPT),
    (("partly", 0, 0), Sampling(temperature=0, prompt_logprobs=1, logprob_start_len=12, max_tokens=4), _PROMPT[:40]),
    (("plain", 0, 0), GREEDY, _PROMPT[:40]),
    (("beam", 0, 0), GREEDY, _PROMPT[:20]),
]


def _mixed_steps() -> Iterator[WorkerBatch]:
    tables = np.arange(NUM_BLOCKS, dtype=np.int32)[::-1]
    scored, partly, plain, beam = (key for key, _, _ in _MIXED)
    tokens = np.array(_PROMPT, np.int32)

    def row(key: SequenceKey, blocks: slice, start: int, stop: int, **changes: Any) -> WorkerRow:
        row = WorkerRow(key, tokens[start:stop], start, tables[blocks], sample=False, is_prefill=True)
        return structs.replace(row, **changes)

    history = CandidatesWanted(3, tokens[:20], 20)
    yield WorkerBatch(
        0,
        [
            row(scored, slice(0, 40), 0, 570),
            row(beam, slice(40, 44), 0, 20, sample=True, wanted=history),
            row(partly, slice(50, 54), 0, 20),
        ],
    )
    yield WorkerBatch(
        1,
        [
            row(scored, slice(0, 40), 570, 600, sample=True),
            row(plain, slice(44, 50), 0, 40, sample=True),
            row(partly, slice(50, 54), 20, 40, sample=True),
        ],
    )
    yield WorkerBatch(
        2,
        [row(plain, slice(44, 50), 40, 44, sample=True, num_drafts=3), row(beam, slice(40, 44), 0, 20)],
        copies=[BlockCopy(0, 60)],
    )


@pytest.mark.parametrize(("size", "num_stages"), DIVISIONS)
def test_copies_and_swaps_reach_the_blocks_of_all_ranks(
    size: int, num_stages: int, divide: Callable[..., DividedRunner], model_dir: Callable[[str], Path]
) -> None:
    path = model_dir("gemma2")
    runner, model = divide(size, path, swap_bytes=1 << 20, num_stages=num_stages), load_reference(path)
    (sequence,) = start(runner, prompts_of((50,)), GREEDY, num_output=8)
    sequence.num_output = 4
    run(runner, [sequence])
    blocks = sequence.blocks.tolist()
    others = sorted(set(range(NUM_BLOCKS)) - set(blocks))
    slots, targets = tuple(range(len(blocks))), others[: len(blocks)]
    runner.execute(WorkerBatch(90, [], to_host=HostCopies(tuple(blocks), slots)))
    runner.execute(WorkerBatch(91, [], from_host=HostCopies(tuple(targets), slots)))
    copies = [BlockCopy(source, target) for source, target in zip(targets, others[len(blocks) :], strict=False)]
    runner.execute(WorkerBatch(92, [], copies=copies))
    sequence.blocks, sequence.num_output = np.array([copy.target for copy in copies], np.int32), 8
    run(runner, [sequence])
    assert sequence.output == generate(model, sequence.prompt, 8)


@pytest.mark.parametrize(("size", "num_stages"), DIVISIONS)
def test_ranks_stay_in_step_behind_steps_that_fail(
    size: int,
    num_stages: int,
    divide: Callable[..., DividedRunner],
    model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = model_dir("llama")
    runner, model = divide(size, path, num_stages=num_stages), load_reference(path)
    (sequence,) = start(runner, prompts_of((30,)), GREEDY, num_output=6)
    row = sequence.row(30)
    with pytest.raises(KeyError, match="never added"):
        runner.execute(WorkerBatch(0, [structs.replace(row, key=("nobody", 0, 0))]))
    for method in ("begin", "can_sample_all"):
        with monkeypatch.context() as patch:
            patch.setattr(runner.runner._sampler, method, _fail)
            with pytest.raises(RuntimeError, match="sampler"):
                runner.execute(WorkerBatch(0, [row]))
    logits = runner.runner._model.logits
    with monkeypatch.context() as patch:
        patch.setattr(runner.runner._model, "logits", lambda hidden: logits(hidden) * torch.nan)
        with pytest.raises(BadLogits):
            runner.execute(WorkerBatch(0, [row]))
    runner.expects_errors = True
    with pytest.raises(IndexError):
        runner.execute(WorkerBatch(0, [row], copies=[BlockCopy(0, NUM_BLOCKS)]))
    assert all("IndexError" in str(answer) for answer in runner.answers)
    runner.expects_errors = False
    run(runner, [sequence])
    assert sequence.output == generate(model, sequence.prompt, 6)


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("the sampler failed")


@pytest.mark.parametrize(("size", "num_stages"), DIVISIONS)
def test_pools_have_as_many_blocks_as_fit_on_every_rank(
    size: int, num_stages: int, divide: Callable[..., DividedRunner], model_dir: Callable[[str], Path]
) -> None:
    sizing = PoolSizing(memory_utilization=0.5, token_budget=64, max_running=4)
    runner = divide(
        size, model_dir("llama"), num_blocks=None, size_pool=sizing, max_model_len=64, num_stages=num_stages
    )
    assert len({spec.num_blocks for spec in runner.specs}) == 1
    (sequence,) = start(runner, prompts_of((30,)), GREEDY, num_output=6)
    run(runner, [sequence])


@pytest.mark.slow
def test_a_killed_rank_is_a_lost_device(model_dir: Callable[[str], Path]) -> None:
    processes = RankProcesses()
    try:
        runner = processes.divide(2, model=str(model_dir("llama")), dtype="float32", num_blocks=NUM_BLOCKS)
        (sequence,) = start(runner, prompts_of((30,)), GREEDY, num_output=6)
        processes.processes[0].kill()
        with pytest.raises(DeviceLost, match="lost"):
            runner.runner.execute(WorkerBatch(0, [sequence.row(30)]))
    finally:
        processes.stop()


def test_a_rank_that_is_killed_within_the_layers_is_a_lost_device(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for it in C."""
    processes = RankProcesses()
    try:
        runner = processes.divide(2, model=str(model_dir("llama")), dtype="float32", num_blocks=NUM_BLOCKS)
        (sequence,) = start(runner, prompts_of((30,)), GREEDY, num_output=6)
        batch = WorkerBatch(0, [sequence.row(30)])
        kernel = runner.runner._model.forward._kernel  # type: ignore[attr-defined]
        layers = kernel.layers

        def kill_and_run(*args: Any) -> None:
            processes.processes[0].kill()
            processes.processes[0].join()
            layers(*args)

        monkeypatch.setattr(kernel, "layers", kill_and_run)
        # The other rank computes no step here, and would be missed in the sum of the embeddings otherwise.
        hidden_size = load_reference(model_dir("llama")).config.hidden_size
        monkeypatch.setattr(runner.runner._model.forward, "_enter", lambda ids: torch.zeros(len(ids), hidden_size))
        with pytest.raises(DeviceLost, match="the process of rank 1 has ended"):
            runner.runner.execute(batch)
    finally:
        processes.stop()


def test_a_rank_that_cannot_load_fails_all(
    ranks: RankProcesses, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = shutil.copytree(model_dir("llama"), tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"rank 1 of 2: .* has no model.safetensors"):
        ranks.divide(2, own={"model": str(model_dir("llama"))}, model=str(broken), dtype="float32", num_blocks=8)
    assert "OSError" in str(ranks.answers)
