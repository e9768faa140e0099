"""Steps launched while the one before runs on a GPU: tokens in float32, and launches that wait for nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.engine.make import make_runner
from kvrelay.engine.run.graphs import GraphSettings
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.engine.sample import random_sampling, sampler
from kvrelay.protocol.sampling import Sampling
from kvrelay.step.batch import WorkerBatch, WorkerRow
from tests.fakes import fake_cuda_graphs
from tests.gpu.conftest import KERNELS_TIMEOUT_S, skip_without_flashinfer
from tests.gpu.reference import prompts
from tests.gpu.test_graphs import SIZES, DenseBackend, no_waits, recorder_of
from tests.tiny_models import build_model
from tests.unit.engine import driving
from tests.unit.engine.driving_ahead import AheadDriver

NUM_OUTPUT = 24
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=1, logprobs=2),
    Sampling(temperature=1.2, top_p=0.9, seed=2),
    Sampling(temperature=0.8, seed=3, frequency_penalty=0.5, min_tokens=5),
)


def make(directory: Path, device: torch.device, dtype: str, *, captured: bool, **options: object) -> TransformersRunner:
    graphs = GraphSettings(SIZES, recorder_of) if captured else None
    settings: dict[str, object] = {"num_blocks": 96, "max_model_len": 192, "graphs": graphs, **options}
    runner = make_runner(str(directory), dtype=dtype, device=device, **settings)  # type: ignore[arg-type]
    assert runner.launches_ahead == (device.type == "cuda")
    runner.launches_ahead = True
    return runner


def started(runner: TransformersRunner) -> list[driving.Driven]:
    """Eight sequences, two of each kind of sampling."""
    sequences = driving.start(runner, prompts(8, 60), SAMPLINGS[0], NUM_OUTPUT)
    for index, sequence in enumerate(sequences):
        runner.drop_sequence(sequence.key)
        runner.add_sequence(sequence.key, SAMPLINGS[index % len(SAMPLINGS)], sequence.prompt, len(sequence.prompt))
    return sequences


@pytest.mark.everyday(1)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("resamples", [False, True])
def test_float32_tokens_are_those_of_one_step_after_the_other(
    device: torch.device, captured: bool, resamples: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few tokens to look at first, what lies on the device is often not what is drawn in the end."""
    if resamples:
        monkeypatch.setattr(random_sampling, "_BEST", (2, 1000))
        monkeypatch.setattr(random_sampling, "_BEST_ON_GPU", (2, 1000))
        monkeypatch.setattr(sampler, "_WORTH_IT", 1.0)
    runner = make(build_model("qwen3", tmp_path), device, "float32", captured=captured, backend=DenseBackend())
    ahead = started(runner)
    driver = AheadDriver(runner, ahead).run()
    assert driver.num_launched_ahead > 10
    for sequence in ahead:
        runner.drop_sequence(sequence.key)
    alone = started(runner)
    driving.run(runner, alone)
    assert [sequence.output for sequence in ahead] == [sequence.output for sequence in alone]


@pytest.mark.timeout(KERNELS_TIMEOUT_S)
@pytest.mark.parametrize("captured", [False, True])
def test_a_launch_behind_another_step_waits_for_nothing(device: torch.device, captured: bool, tmp_path: Path) -> None:
    skip_without_flashinfer(device)
    directory = build_model("mistral", tmp_path, dtype=torch.bfloat16)
    backend = FlashInferBackend(device, fake_cuda_graphs if device.type == "cpu" else None)
    runner = make(directory, device, "bfloat16", captured=captured, backend=backend)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=2)
    sequences = driving.start(runner, prompts(4, 40), sampling, NUM_OUTPUT)
    launched = runner.launch(WorkerBatch(0, [sequence.row(60) for sequence in sequences]))
    for step in range(1, NUM_OUTPUT):
        rows = [
            WorkerRow(
                each.key,
                np.zeros(1, np.int32),
                len(each.prompt) + step - 1,
                each.blocks,
                True,
                False,
                has_placeholder=True,
            )
            for each in sequences
        ]
        batch = WorkerBatch(step, rows)
        assert runner.can_launch_behind(batch)
        if step < NUM_OUTPUT // 2:  # the allocators, and the kernels, have what they need afterwards
            following = runner.launch(batch)
        else:
            with no_waits(device):
                following = runner.launch(batch)
        launched.land()
        launched = following
    launched.land()
