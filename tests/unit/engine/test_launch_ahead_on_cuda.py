"""Steps launched ahead on a CUDA device, which is pretended: what runs there runs as late as can be, or at any time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvrelay.backends import flashinfer_kernels
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.make import make_runner
from kvrelay.engine.run.graphs import GraphSettings
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.engine.sample import random_sampling, sampler
from kvrelay.protocol.sampling import Sampling
from kvrelay.step.batch import WorkerBatch, WorkerRow
from tests.fakes import pretended_flashinfer
from tests.fakes.pretended_cuda import NO_PRETENCE, Machine, Stream
from tests.unit.engine.driving import Driven, run, start_each
from tests.unit.engine.driving_ahead import AheadDriver

pytestmark = [pytest.mark.unit, pytest.mark.skipif(bool(NO_PRETENCE), reason=NO_PRETENCE)]
GPU = "cuda:1"
NUM_BLOCKS, NUM_OUTPUT = 96, 8
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.0, logprobs=3, min_tokens=5, stop_token_ids=tuple(range(30))),
    Sampling(temperature=0.7, seed=1, presence_penalty=0.8, repetition_penalty=1.2),
    Sampling(temperature=1.5, seed=2, top_p=0.9, logprobs=0),
    Sampling(temperature=1.0, seed=3, top_k=20, min_p=0.02),
    Sampling(temperature=1.0, seed=5, prompt_logprobs=1),
)


@pytest.fixture(autouse=True)
def _with_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", pretended_flashinfer)
    monkeypatch.setattr(flashinfer_kernels, "_LEAST_WORKSPACE_BYTES", 1 << 20)
    monkeypatch.setattr(flashinfer_kernels, "workspace_bytes", lambda *_: 1 << 20)


def started(runner: TransformersRunner, samplings: tuple[Sampling, ...], seed: int = 0) -> list[Driven]:
    return start_each(runner, samplings, NUM_OUTPUT, seed)


def sixteen_bit(directory: Path, sizes: tuple[int, ...] = ()) -> TransformersRunner:
    graphs = GraphSettings(sizes) if sizes else None
    return make_runner(
        str(directory), dtype="bfloat16", device=GPU, max_model_len=256, num_blocks=NUM_BLOCKS, graphs=graphs
    )


@pytest.mark.everyday(2)
@pytest.mark.parametrize("resamples", [False, True])
def test_tokens_and_logprobs_are_those_of_the_cpu(
    resamples: bool, model_dir: Callable[[str], Path], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through plain torch in float32; also where what lies on the device is often not what is drawn in the end."""
    outputs: list[list[Driven]] = []
    for device in ("cpu", GPU):
        runner = make_runner(
            str(model_dir("qwen3")), dtype="float32", device=device, num_blocks=NUM_BLOCKS, backend=TorchBackend()
        )
        sequences = started(runner, SAMPLINGS)
        if device == "cpu":
            run(runner, sequences)
        else:
            if resamples:
                monkeypatch.setattr(random_sampling, "_BEST_ON_GPU", (2, 1000))
                monkeypatch.setattr(sampler, "_WORTH_IT", 1.0)
            assert AheadDriver(runner, sequences).run().num_launched_ahead > 5
        outputs.append(sequences)
    for mine, other in zip(*outputs, strict=True):
        assert mine.output == other.output
        for got, wanted in zip(mine.logprobs, other.logprobs, strict=True):
            assert (got is None) == (wanted is None)
            if got is not None and wanted is not None:
                assert got.top_ids == wanted.top_ids and got.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    assert not machine.faults


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8)])
def test_through_flashinfer_tokens_are_those_of_one_step_after_the_other(
    sizes: tuple[int, ...], architecture: str, model_dir: Callable[[str], Path], machine: Machine
) -> None:
    """Two kinds of layers in the one model. Plans and staged numbers of two steps are under way at a time."""
    runner = sixteen_bit(model_dir(architecture), sizes)
    for seed in range(2):
        ahead = started(runner, SAMPLINGS, seed)
        driver = AheadDriver(runner, ahead, seed).run()
        assert driver.num_launched_ahead > 5
        for sequence in ahead:
            runner.drop_sequence(sequence.key)
        again = AheadDriver(runner, alone := started(runner, SAMPLINGS, seed), seed, waits=True).run()
        assert again.num_launched_ahead == 0
        for sequence in alone:
            runner.drop_sequence(sequence.key)
        assert [each.output for each in ahead] == [each.output for each in alone]
    assert not machine.faults


def note_forwards(runner: TransformersRunner, stream: Stream) -> list[int]:
    """What lay in the stream when the forward of each step was put there, its uploads among it."""
    begins = [0]
    graphs = {} if runner._graphs is None else runner._graphs._graphs

    def noted(replay: Callable[[], None]) -> Callable[[], None]:
        def note() -> None:
            begins.append(stream.submitted)
            replay()

        return note

    for size, graph in graphs.items():
        graphs[size] = replace(graph, replay=noted(graph.replay))
    return begins


@pytest.mark.parametrize("dtype_and_sizes", [("bfloat16", (8,)), ("bfloat16", ()), ("float32", ())])
def test_a_launch_runs_nothing_of_the_step_before_but_what_was_sent_for_it(
    dtype_and_sizes: tuple[str, tuple[int, ...]], model_dir: Callable[[str], Path], late: Machine
) -> None:
    """The device does what somebody waits for, and nothing else. A launch waits for uploads of the plans before; these
    lie before a graph's replay, and kernel by kernel behind the layer that is the first of its kind."""
    dtype, sizes = dtype_and_sizes
    runner = make_runner(
        str(model_dir("mistral")),
        dtype=dtype,
        device=GPU,
        max_model_len=256,
        num_blocks=NUM_BLOCKS,
        graphs=GraphSettings(sizes) if sizes else None,
    )
    sequences = started(runner, SAMPLINGS[:2] + SAMPLINGS[3:5])
    stream = late.gpu(GPU).default_stream
    begins = note_forwards(runner, stream)
    before = runner.launch(WorkerBatch(0, [sequence.row(60) for sequence in sequences]))
    for step in range(1, NUM_OUTPUT):
        began, ends, forward_begins = stream.done, stream.submitted, begins[-1]
        rows = [
            WorkerRow(each.key, np.zeros(1, np.int32), len(each.prompt) + step - 1, each.blocks, True, False, True)
            for each in sequences
        ]
        batch = WorkerBatch(step, rows)
        assert runner.can_launch_behind(batch)
        late.waits.clear()
        behind = runner.launch(batch)
        assert stream.done < ends, "the step before has ended"
        if dtype == "float32":
            assert stream.done == began
        elif sizes and step > 1:  # the first one computed prompts
            assert stream.done <= forward_begins, "the step before runs"
        assert {wait.where for wait in late.waits} <= {"kvrelay.backends.flashinfer_kernels:await_planned"}
        late.waits.clear()
        before.land()
        # For its tokens, and for its end: where it began behind another step, the device's clock tells what it took.
        assert {wait.where for wait in late.waits} == {"kvrelay.engine.run.device:wait"}
        assert len(late.waits) <= 2
        assert ends - 1 <= stream.done < stream.submitted, "it waited for the step behind"
        before = behind
    before.land()
    assert not late.faults
