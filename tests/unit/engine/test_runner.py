"""The runner against transformers' own generate, over chunks, mixed steps and scattered blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.make import make_runner
from kvrelay.engine.run import step_forward
from kvrelay.engine.run.device import Moment
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.engine.sample.logprobs import BadLogits
from kvrelay.protocol.sampling import Sampling
from kvrelay.step.batch import BlockCopy, CandidatesWanted, DeviceLost, WorkerBatch, WorkerRow
from tests.fakes.late_copies import LateCopies
from tests.fakes.reference_model import generate, load_reference
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE
from tests.unit.engine.driving import failing_logits, run, start

RunnerOf = Callable[[str], TransformersRunner]
GREEDY = Sampling(temperature=0)
BLOCK = 16
PROMPT_LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 100, 37)


def make_prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


@pytest.fixture(scope="session")
def reference_of(model_dir: Callable[[str], Path]) -> Callable[[str], PreTrainedModel]:
    return lambda name: load_reference(model_dir(name))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_generate(
    architecture: str, runner_of: RunnerOf, reference_of: Callable[[str], PreTrainedModel]
) -> None:
    runner, model = runner_of(architecture), reference_of(architecture)
    sequences = start(runner, make_prompts(), GREEDY, num_output=20)
    run(runner, sequences)
    for sequence in sequences:
        assert sequence.output == generate(model, sequence.prompt, 20)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_logprobs_of_prompt_and_output_are_those_of_one_forward(
    architecture: str, runner_of: RunnerOf, reference_of: Callable[[str], PreTrainedModel]
) -> None:
    runner, model = runner_of(architecture), reference_of(architecture)
    sampling = Sampling(temperature=1.0, seed=5, logprobs=3, prompt_logprobs=2, frequency_penalty=0.5)
    sequences = start(runner, make_prompts(), sampling, num_output=5, seed=1)
    run(runner, sequences, seed=1)
    for sequence in sequences:
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.tokens])).logits[0]
        expected = torch.log_softmax(logits, -1)
        entries = [(entry, 2) for entry in sequence.prompt_logprobs] + [(entry, 3) for entry in sequence.logprobs]
        assert len(entries) == len(sequence.tokens) - 1
        for position, (entry, num_top) in enumerate(entries):
            assert entry is not None and entry.token_id == sequence.tokens[position + 1]
            assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
            assert entry.top_ids == expected[position].topk(num_top).indices.tolist()
            assert entry.top_logprobs == pytest.approx(expected[position].topk(num_top).values.tolist(), abs=1e-4)


def test_a_prompt_is_scored_from_the_requested_position_on(
    runner_of: RunnerOf, reference_of: Callable[[str], PreTrainedModel]
) -> None:
    """Whatever the chunks, of which some end before that position and some behind it."""
    runner, model = runner_of("llama"), reference_of("llama")
    for start_len in (1, 2, 8, 17, 38, 39):
        sampling = Sampling(temperature=0, prompt_logprobs=0, logprob_start_len=start_len)
        sequences = start(runner, make_prompts((40, 40)), sampling, num_output=2, seed=start_len)
        run(runner, sequences, seed=start_len, max_chunk=9)
        for sequence in sequences:
            with torch.inference_mode():
                expected = torch.log_softmax(model(torch.tensor([sequence.prompt])).logits[0], -1)
            assert [entry.token_id for entry in sequence.prompt_logprobs] == sequence.prompt[start_len:]
            for position, entry in enumerate(sequence.prompt_logprobs, start=start_len - 1):
                assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
            runner.drop_sequence(sequence.key)


def test_prompt_logprobs_are_the_same_in_slices(runner_of: RunnerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("llama")
    sampling = Sampling(temperature=0, prompt_logprobs=0)
    results = []
    for seed, positions in ((0, 512), (1, 7)):
        monkeypatch.setattr(step_forward, "_PROMPT_SLICE", positions)
        sequences = start(runner, make_prompts((100,)), sampling, num_output=1, seed=seed)
        run(runner, sequences, max_chunk=100)
        results.append([entry.logprob for entry in sequences[0].prompt_logprobs])
        runner.drop_sequence(sequences[0].key)
    assert results[0] == pytest.approx(results[1], abs=1e-5)


def test_blocks_copied_to_another_runner_carry_the_sequence_on(
    runner_of: RunnerOf, model_dir: Callable[[str], Path]
) -> None:
    prefill = runner_of("qwen3")
    decode = make_runner(str(model_dir("qwen3")), dtype="float32", num_blocks=32)
    assert prefill.spec.fingerprint == decode.spec.fingerprint
    sequences = start(prefill, make_prompts((45,)), GREEDY, num_output=10, seed=5)
    moved = start(decode, make_prompts((45,)), GREEDY, num_output=10, seed=6)[0]
    run(prefill, sequences)
    moved.tokens, moved.computed = sequences[0].tokens[:46], 45
    decode.pool_bytes[moved.blocks[:3]] = prefill.pool_bytes[sequences[0].blocks[:3]]
    run(decode, [moved])
    assert moved.output == sequences[0].output


def test_pool_bytes_are_the_pool(runner_of: RunnerOf) -> None:
    runner = runner_of("llama")
    spec = runner.spec
    assert runner.pool_bytes.shape == (spec.num_blocks, spec.block_bytes)
    assert spec.block_bytes == spec.num_layers * 2 * spec.block_size * spec.num_kv_heads * spec.head_dim * 4
    runner.pool_bytes[5] = 0
    assert not runner.pool[5].any()


def test_rows_that_do_not_sample_get_no_token(runner_of: RunnerOf) -> None:
    runner = runner_of("llama")
    sequence = start(runner, make_prompts((20,)), GREEDY, num_output=1, seed=7)[0]
    result = runner.execute(WorkerBatch(3, [sequence.row(5)]))
    assert result.step == 3 and result.forward_s > 0
    assert not result.rows[0].token_ids and not result.rows[0].prompt_logprobs


def test_an_unknown_sequence_is_named(runner_of: RunnerOf) -> None:
    row = WorkerRow(("nobody", 0, 0), np.array([1], np.int32), 0, np.array([0], np.int32), True, True)
    with pytest.raises(KeyError, match="nobody"):
        runner_of("llama").execute(WorkerBatch(0, [row]))


def test_a_sequence_dropped_during_the_step_gets_no_token(runner_of: RunnerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("llama")
    stays, goes = start(runner, make_prompts((9, 9)), GREEDY, num_output=1, seed=8)
    logits = runner._model.logits

    def drop_then_compute(hidden: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=runner.drop_sequence, args=(goes.key,))
        thread.start()
        thread.join()
        return logits(hidden)

    monkeypatch.setattr(runner._model, "logits", drop_then_compute)
    result = runner.execute(WorkerBatch(0, [goes.row(9), stays.row(9)]))
    assert not result.rows[0].token_ids and result.rows[1].token_ids


def test_sequences_are_added_while_a_step_waits_for_the_device(
    runner_of: RunnerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that wait is nearly all of a step, and the event loop would stand still for it."""
    runner = runner_of("llama")
    free: list[bool] = []

    LateCopies(monkeypatch, lambda: free.append(not runner._lock.locked()))
    sampled = start(runner, make_prompts((9,)), Sampling(temperature=0.7, logprobs=1), num_output=1, seed=94)[0]
    searched = start(runner, make_prompts((7,)), GREEDY, num_output=1, seed=95)[0]
    row = msgspec.structs.replace(searched.row(7), wanted=CandidatesWanted(2, np.array(searched.tokens, np.int32), 7))
    runner.execute(WorkerBatch(0, [sampled.row(9), row]))
    assert free == [True] * 3


@pytest.mark.parametrize("settles", [True, False])
def test_a_step_that_fails_leaves_nothing_under_way(
    settles: bool, runner_of: RunnerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks may be others' next. Where the device never ends what it was asked for, only a new process goes on."""
    runner = runner_of("llama")
    (sequence,) = start(runner, make_prompts((9,)), GREEDY, num_output=1, seed=8)
    raised = pytest.raises(RuntimeError if settles else DeviceLost, match="an illegal memory access")
    with failing_logits(runner, "an illegal memory access was encountered", settles=settles) as order, raised:
        runner.execute(WorkerBatch(0, [sequence.row(9)]))
    assert order == ["failed", "waited"]
    assert runner.execute(WorkerBatch(1, [sequence.row(9)])).rows[0].token_ids


@pytest.mark.parametrize("num_output", [0, 1])
def test_nan_at_a_scored_position_of_a_prompt_names_the_sequence(runner_of: RunnerOf, num_output: int) -> None:
    """A prompt that is only scored is sampled nowhere, so nothing else looks at its logits."""
    runner = runner_of("llama")
    scored = Sampling(temperature=0, max_tokens=num_output, prompt_logprobs=2)
    good, bad = start(runner, make_prompts((33, 33)), scored, num_output, seed=10)
    runner.execute(WorkerBatch(0, [good.row(16), bad.row(16)]))
    good.computed = bad.computed = 16
    runner.pool[int(bad.blocks[0])] = float("nan")
    with pytest.raises(BadLogits) as caught:
        runner.execute(WorkerBatch(1, [good.row(8), bad.row(8)]))
    assert caught.value.keys == {bad.key}
    runner.pool[int(bad.blocks[0])] = 0
    assert len(runner.execute(WorkerBatch(1, [good.row(8)])).rows[0].prompt_logprobs) == 8


def test_a_step_whose_draws_are_all_dropped_meanwhile_has_copied_its_blocks_when_it_lands(
    runner_of: RunnerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may get the blocks then, and write to them from other streams."""
    runner, (prompt,) = runner_of("llama"), make_prompts((5,))
    first, second = start(runner, [prompt] * 2, GREEDY, 1, seed=93)
    runner.execute(WorkerBatch(1, [first.row(5)]))
    row = second.row(5)
    events: list[str] = []
    copy, logits = runner._host.copy, runner._model.logits

    def copy_noted(batch: WorkerBatch) -> float:
        events.append("copies")
        return copy(batch)

    def logits_and_drop(hidden: torch.Tensor) -> torch.Tensor:
        runner.drop_sequence(second.key)
        return logits(hidden)

    monkeypatch.setattr(runner._host, "copy", copy_noted)
    monkeypatch.setattr(runner._model, "logits", logits_and_drop)
    monkeypatch.setattr(Moment, "wait", lambda _: events.append("wait"))
    copies = [BlockCopy(int(first.blocks[0]), int(second.blocks[0]))]
    assert not runner.execute(WorkerBatch(2, [row], copies=copies)).rows[0].token_ids
    assert events == ["copies", "wait"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_types_run_and_stay_near(dtype: str, model_dir: Callable[[str], Path], runner_of: RunnerOf) -> None:
    sampling = Sampling(temperature=0, prompt_logprobs=0)
    results = []
    for runner in (make_runner(str(model_dir("qwen3")), dtype=dtype, num_blocks=16), runner_of("qwen3")):
        sequence = start(runner, make_prompts((60,)), sampling, num_output=1, seed=10)[0]
        run(runner, [sequence])
        results.append(np.array([entry.logprob for entry in sequence.prompt_logprobs]))
    assert np.abs(results[0] - results[1]).mean() < 0.1


@pytest.mark.parametrize("block_size", [8, 128])
def test_other_block_sizes_and_the_fallback_give_the_same_tokens(
    block_size: int, model_dir: Callable[[str], Path], runner_of: RunnerOf
) -> None:
    expected = start(runner_of("mistral"), make_prompts((70, 5)), GREEDY, num_output=10, seed=11)
    run(runner_of("mistral"), expected)
    for backend in (None, TorchBackend()):
        runner = make_runner(str(model_dir("mistral")), block_size=block_size, num_blocks=20, backend=backend)
        sequences = start(runner, make_prompts((70, 5)), GREEDY, num_output=10, seed=11)
        run(runner, sequences, seed=3)
        assert [sequence.output for sequence in sequences] == [sequence.output for sequence in expected]


def test_the_pool_is_sized_by_memory(model_dir: Callable[[str], Path]) -> None:
    runner = make_runner(str(model_dir("llama")), memory_bytes=10 * 16384 + 5, max_model_len=100)
    assert (runner.spec.block_bytes, runner.spec.num_blocks, runner.spec.max_model_len) == (16384, 10, 100)
    with pytest.raises(ValueError, match="more than"):
        make_runner(str(model_dir("llama")), memory_bytes=100)


def test_adding_and_dropping_from_another_thread_disturbs_no_step(runner_of: RunnerOf) -> None:
    runner = runner_of("llama")
    sampling = Sampling(temperature=1.0, seed=1, frequency_penalty=0.3)
    stop = threading.Event()

    def churn() -> None:
        index = 0
        while not stop.is_set():
            runner.add_sequence(("churn", index, 0), sampling, [1, 2, 3], 3)
            runner.drop_sequence(("churn", index - 3, 0))
            index += 1

    outputs = []
    for busy in (False, True):
        thread = threading.Thread(target=churn)
        if busy:
            thread.start()
        sequences = start(runner, make_prompts((9, 20)), sampling, num_output=25, seed=12)
        run(runner, sequences)
        outputs.append([sequence.output for sequence in sequences])
        for sequence in sequences:
            runner.drop_sequence(sequence.key)
    stop.set()
    thread.join()
    assert outputs[0] == outputs[1]
