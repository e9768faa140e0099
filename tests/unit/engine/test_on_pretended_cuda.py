"""The engine as it is on a CUDA device, which is pretended: tokens are the CPU's, and nothing waits in secret."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.backends import flashinfer_graphs, flashinfer_kernels
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.config import WorkerConfig
from kvrelay.engine.make import PoolSizing, make_runner
from kvrelay.engine.pool_size import turn_on
from kvrelay.engine.run.device import to_device, to_host
from kvrelay.engine.run.graphs import GraphSettings
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.protocol.sampling import BeamSpec, Sampling
from kvrelay.step.batch import (
    NO_COPIES,
    BlockCopy,
    CandidatesWanted,
    DeviceLost,
    HostCopies,
    RowResult,
    WorkerBatch,
    WorkerRow,
)
from kvrelay.worker.speeds import measure_costs
from kvrelay.worker.worker_main import load_runner
from tests.fakes import pretended_flashinfer
from tests.fakes.pretended_cuda import NO_PRETENCE, Machine
from tests.tiny_models import ARCHITECTURES
from tests.unit.engine.driving import Driven, run, start_each

pytestmark = [pytest.mark.unit, pytest.mark.skipif(bool(NO_PRETENCE), reason=NO_PRETENCE)]
GPU = "cuda:1"  # the thread's own is another one until kvrelay takes it
NUM_BLOCKS = 96
NUM_OUTPUT = 6
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.0, logprobs=3, prompt_logprobs=2, min_tokens=5, stop_token_ids=tuple(range(30))),
    Sampling(temperature=0.7, seed=1, presence_penalty=0.8, frequency_penalty=0.3, repetition_penalty=1.2),
    Sampling(temperature=1.5, seed=2, top_p=0.9, logprobs=0),
    Sampling(temperature=1.0, seed=3, top_k=20, min_p=0.02),
    Sampling(temperature=2.0, seed=4, top_p=0.999, top_k=300),
    Sampling(temperature=0.0, logit_bias={7: 4.0, 250: -90.0}, repetition_penalty=1.5),
    Sampling(temperature=1.0, seed=5),
)


LIMITED = (
    Sampling(temperature=1.0, seed=6, allowed_token_ids=tuple(range(3, 90)), min_tokens=3),
    Sampling(temperature=0.0, allowed_token_ids=(4, 5, 6), bad_words=((4, 5), (6, 6), (4, 4, 4))),
    Sampling(temperature=1.0, seed=7),
)


@pytest.fixture
def with_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", pretended_flashinfer)
    monkeypatch.setattr(flashinfer_kernels, "workspace_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr(flashinfer_graphs, "fixed_workspace_bytes", lambda *_: 1 << 20)


def drive(runner: TransformersRunner, samplings: tuple[Sampling, ...] = SAMPLINGS, seed: int = 0) -> list[Driven]:
    """A sequence for each, in steps that mix chunks and single tokens."""
    sequences = start_each(runner, samplings, NUM_OUTPUT, seed)
    run(runner, sequences, seed)
    for sequence in sequences:
        runner.drop_sequence(sequence.key)
    return sequences


def test_limits_of_tokens_are_those_of_the_cpu(model_dir: Callable[[str], Path], late: Machine) -> None:
    directory = model_dir("qwen3")
    expected, got = (drive(plain(directory, device), LIMITED) for device in ("cpu", GPU))
    assert [each.output for each in got] == [each.output for each in expected]


def test_penalties_count_all_tokens_that_a_step_brought_a_sequence(machine: Machine) -> None:
    """The next step takes the newest token of each from device memory while they are pending."""
    sampling = Sampling(temperature=0.0, frequency_penalty=100.0)
    plain_sampling = Sampling(temperature=0.0)
    keys = [("a", 1, 0), ("a", 1, 0), ("a", 1, 0), ("b", 1, 0), ("b", 1, 0)]
    logits = torch.zeros(5, 20)
    logits[torch.arange(5), torch.tensor([3, 4, 3, 7, 8])] = 9.0
    following = torch.zeros(2, 20)
    following[0, [3, 4, 5]] = torch.tensor([9.0, 8.0, 1.0])
    following[1, 7] = 9.0
    found = []
    for device in (torch.device("cpu"), torch.device(GPU)):
        with turn_on(device):
            sampler = Sampler(20, (), device)
            sampler.add(keys[0], sampling, [1, 2], 2)
            sampler.add(keys[-1], plain_sampling, [1, 2], 2)
            pending = sampler.begin(keys, np.array([2, 3, 4, 2, 3]), to_device(logits.numpy(), device))
            newest = to_host(sampler.last_on_device([keys[-1], keys[0]]))[0].tolist()
            token_ids, _ = pending.land()
            after, _ = sampler.begin([keys[0], keys[-1]], np.array([5, 4]), to_device(following.numpy(), device)).land()
        found.append((newest, token_ids.tolist(), after.tolist()))
    assert found[0] == found[1] == ([8, 3], [3, 4, 3, 7, 8], [5, 7])


def plain(directory: Path, device: str) -> TransformersRunner:
    return make_runner(str(directory), dtype="float32", device=device, num_blocks=NUM_BLOCKS, backend=TorchBackend())


@pytest.mark.everyday(3)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_tokens_and_logprobs_are_those_of_the_cpu(
    architecture: str, model_dir: Callable[[str], Path], late: Machine
) -> None:
    directory = model_dir(architecture)
    expected, got = (drive(plain(directory, device)) for device in ("cpu", GPU))
    for mine, other in zip(got, expected, strict=True):
        assert mine.output == other.output
        assert mine.logprobs == other.logprobs
        assert mine.prompt_logprobs == other.prompt_logprobs


def test_draws_of_a_mixed_batch_are_those_of_the_cpu_whenever_things_run(
    model_dir: Callable[[str], Path], machine: Machine
) -> None:
    runners = [plain(model_dir("qwen3"), device) for device in ("cpu", GPU)]
    for seed in range(1, 3):
        expected, got = (drive(runner, SAMPLINGS, seed) for runner in runners)
        assert [each.output for each in got] == [each.output for each in expected]


def beam_steps(runner: TransformersRunner) -> list[RowResult]:
    """A prompt, then three beams of it with last blocks of their own, copied from the first one's."""
    sampling = Sampling(beams=BeamSpec(width=3, num_returned=3), repetition_penalty=1.3, min_tokens=3, max_tokens=8)
    key, prompt = ("beams", 0, 0), np.arange(5, 27, dtype=np.int32)
    runner.add_sequence(key, sampling, prompt.tolist(), len(prompt))

    def row(token_ids: np.ndarray, position: int, table: list[int], history: np.ndarray) -> WorkerRow:
        beam = CandidatesWanted(6, history, len(prompt))
        blocks = np.array(table, np.int32)
        return WorkerRow(key, token_ids, position, blocks, sample=True, is_prefill=position == 0, wanted=beam)

    results = list(runner.execute(WorkerBatch(0, [row(prompt, 0, [3, 4], prompt)])).rows)
    assert results[0].candidates is not None
    histories = [np.append(prompt, token) for token in results[0].candidates.token_ids[:3]]
    for step in range(1, 5):
        rows = [row(h[-1:], len(h) - 1, [3, 4 + number], h) for number, h in enumerate(histories)]
        copies = [BlockCopy(4, 5), BlockCopy(4, 6)] if step == 1 else []
        found = runner.execute(WorkerBatch(step, rows, copies=copies)).rows
        results += found
        best = [each.candidates.token_ids[0] for each in found if each.candidates is not None]
        histories = [np.append(history, token) for history, token in zip(histories, best, strict=True)]
    runner.drop_sequence(key)
    return results


def test_beams_and_copies_of_blocks(model_dir: Callable[[str], Path], machine: Machine) -> None:
    expected, got = (beam_steps(plain(model_dir("llama"), device)) for device in ("cpu", GPU))
    for mine, other in zip(got, expected, strict=True):
        assert mine.candidates is not None and other.candidates is not None
        assert mine.candidates.token_ids.tolist() == other.candidates.token_ids.tolist()
        assert mine.candidates.logprobs.tolist() == other.candidates.logprobs.tolist()


def test_a_sequence_goes_on_behind_its_swap_out_and_in(model_dir: Callable[[str], Path], machine: Machine) -> None:
    """In one step with rows of others, and in steps without any."""
    outputs = []
    for device in ("cpu", GPU):
        runner = make_runner(
            str(model_dir("llama")),
            dtype="float32",
            device=device,
            num_blocks=NUM_BLOCKS,
            backend=TorchBackend(),
            swap_bytes=20 * 32768,
        )
        assert runner.spec.num_host_slots >= 8
        prompts = [list(range(4, 60)), list(range(100, 120))]
        sequences = [
            Driven(("s", 0, i), prompt, Sampling(temperature=0.0), 12, np.arange(first, first + 6, dtype=np.int32))
            for i, (prompt, first) in enumerate(zip(prompts, (10, 30), strict=True))
        ]
        for sequence in sequences:
            runner.add_sequence(sequence.key, sequence.sampling, sequence.prompt, len(sequence.prompt))

        def step(
            *rows_of: Driven,
            runner: TransformersRunner = runner,
            out: HostCopies = NO_COPIES,
            back: HostCopies = NO_COPIES,
        ) -> None:
            rows = [sequence.row(100) for sequence in rows_of]
            result = runner.execute(WorkerBatch(0, rows, out, back))
            for sequence, row, found in zip(rows_of, rows, result.rows, strict=True):
                sequence.take(row, found)

        mover, other = sequences
        step(mover)
        step(mover, other)
        step(other, out=HostCopies(tuple(range(10, 16)), (5, 2, 3, 4, 0, 1)))
        step(other)
        step(out=HostCopies((30, 31), (6, 7)))
        mover.blocks = np.array([50, 70, 60, 61, 52, 51], np.int32)
        step(other, back=HostCopies((50, 70, 60, 61, 52, 51), (5, 2, 3, 4, 0, 1)))
        step(mover, back=HostCopies((30, 31), (6, 7)))
        for _ in range(6):
            step(mover, other)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]


def sixteen_bit(directory: Path, sizes: tuple[int, ...] = (), **options: object) -> TransformersRunner:
    return make_runner(
        str(directory),
        device=GPU,
        max_model_len=256,
        graphs=GraphSettings(sizes) if sizes else None,
        **{"dtype": "bfloat16", "num_blocks": NUM_BLOCKS, **options},  # type: ignore[arg-type]
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mistral", "wide-qwen3"])
def test_captured_steps_through_flashinfer_give_the_tokens_of_launched_ones(
    architecture: str, model_dir: Callable[[str], Path], machine: Machine, with_flashinfer: None
) -> None:
    """One kind of layers has a window, the other many heads for a KV head. What captures are checked with holds."""
    directory = model_dir(architecture)
    launched, captured = sixteen_bit(directory), sixteen_bit(directory, (1, 2, 4, 8))
    for seed in range(2):
        expected, got = drive(launched, SAMPLINGS[:4], seed), drive(captured, SAMPLINGS[:4], seed)
        assert [each.output for each in got] == [each.output for each in expected]


@pytest.mark.slow
def test_the_pool_s_size_comes_from_a_profile(
    model_dir: Callable[[str], Path], late: Machine, with_flashinfer: None
) -> None:
    sizing = PoolSizing(0.1, 256, 8)
    runner = sixteen_bit(model_dir("mistral"), (1, 4, 8), num_blocks=None, size_pool=sizing)
    gpu = late.gpu(GPU)
    taken = runner.pool.nbytes
    assert 0.5 * 0.1 * gpu.total < taken < 0.1 * gpu.total
    assert measure_costs(runner, 64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_decoding_step_waits_once(
    dtype: str, model_dir: Callable[[str], Path], late: Machine, with_flashinfer: None
) -> None:
    """For what it drew; whatever its sequences ask for, through FlashInfer, its graphs, or plain torch."""
    for sizes in ((), (8,)) if dtype == "bfloat16" else ((),):
        runner = sixteen_bit(model_dir("mistral"), sizes, dtype=dtype)
        rows = []
        for number, sampling in enumerate(SAMPLINGS):
            key = ("waits", 0, number)
            runner.add_sequence(key, sampling, [number + 1] * 20, 20)
            blocks = np.array([2 * number, 2 * number + 1], np.int32)
            rows.append(WorkerRow(key, np.array([5], np.int32), 20, blocks, sample=True, is_prefill=False))
        runner.execute(WorkerBatch(0, rows))  # the first may allocate and wait
        for which in (rows[:1], rows[1:2], rows[2:4], rows[6:], rows):
            late.waits.clear()
            runner.execute(WorkerBatch(1, which))
            assert len(late.waits) == 1, late.waits


@pytest.mark.slow
def test_what_a_worker_loads_on_a_gpu(
    model_dir: Callable[[str], Path],
    late: Machine,
    with_flashinfer: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the configuration on: its turn, random weights made on the device, trials, the pool's size, graphs."""
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = WorkerConfig(
        model=str(model_dir("mistral")),
        role="decode",
        device=GPU,
        dtype="bfloat16",
        load_format="dummy",
        memory_utilization=0.02,
        token_budget=64,
        max_running=4,
        max_model_len=128,
    )
    runner = load_runner(config)
    assert isinstance(runner, TransformersRunner)
    assert runner.spec.device == "Pretended GPU (GPU-00000000-0000-0000-0000-000000000002)"
    assert runner.spec.num_host_slots > 0
    assert isinstance(runner._model.backend, FlashInferBackend)
    assert runner._graphs is not None and runner._graphs.sizes[:3] == (1, 2, 4)
    assert runner._graphs.sizes[-1] == 64, "of tokens: rows may have several"
    assert all(sequence.done for sequence in drive(runner, SAMPLINGS[:2]))


def test_a_kernel_that_fails_loses_the_device(model_dir: Callable[[str], Path], late: Machine) -> None:
    runner = plain(model_dir("llama"), GPU)
    key = ("fails", 0, 0)
    runner.add_sequence(key, SAMPLINGS[0], [1], 1)
    beyond = np.array([1 << 20], np.int32)  # no row of the embeddings
    row = WorkerRow(key, beyond, 0, np.array([1], np.int32), sample=True, is_prefill=True)
    with pytest.raises(DeviceLost, match=r"Pretended GPU .*device-side assert"):
        runner.execute(WorkerBatch(0, [row]))
