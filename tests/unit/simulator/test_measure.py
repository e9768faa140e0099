"""Measuring a profile, on an engine whose steps take what the test says."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from kvrelay.device_profiles import StepLoad
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.step_cost import pairs
from kvrelay.step.batch import ModelSpec, RowResult, StepResult, WorkerBatch
from kvrelay_simulator.measure_command import measured_profile
from tests.fakes.command import command

main = command("measure")


class Engine:
    """A step takes 2 ms, 50 us a token of a prompt, 300 us a decode, and 10 ns a pair."""

    def __init__(self, num_blocks: int) -> None:
        self.spec = ModelSpec("m", 100, 4096, (0,), 1, 1, 1, 16, num_blocks, 640, "float32", "f")
        self.pool_memory = np.zeros((num_blocks, 640), np.uint8)
        self.known: set[object] = set()

    def add_sequence(self, key: object, sampling: Sampling, token_ids: object, num_prompt: int) -> None:
        self.known.add(key)

    def drop_sequence(self, key: object) -> None:
        self.known.discard(key)

    def execute(self, batch: WorkerBatch) -> StepResult:
        num_pairs, own_s = 0.0, 0.0
        for row in batch.rows:
            assert row.key in self.known and row.position + len(row.token_ids) <= 16 * len(row.block_ids)
            assert row.block_ids.max() < self.spec.num_blocks
            assert row.sample
            num_pairs += pairs(row.position, len(row.token_ids))
            own_s += 5e-5 * len(row.token_ids) if row.is_prefill else 3e-4
        seconds = 2e-3 + own_s + 1e-8 * num_pairs
        return StepResult(batch.step, [RowResult() for _ in batch.rows], seconds)


@pytest.mark.parametrize("num_blocks", [40, 4096])
def test_the_coefficients_come_out_and_nothing_is_left_in_the_engine(num_blocks: int) -> None:
    engine = Engine(num_blocks)
    profile = measured_profile(cast(ModelRunner, engine), "own")
    assert not engine.known
    assert profile.fixed_s == pytest.approx(2e-3, rel=0.2)
    assert profile.token_s == pytest.approx(5e-5, rel=0.2)
    assert profile.decode_s == pytest.approx(3e-4, rel=0.2)
    assert profile.step_s(StepLoad(100, 0.0, 10, 0)) == pytest.approx(2e-3 + 5e-3 + 3e-3, rel=0.2)
    assert (profile.kv_bytes_per_token, profile.kv_tokens) == (40, 16 * num_blocks)
    assert profile.transfer_bytes_s > 0


def test_a_worker_of_several_ranks_is_measured_as_a_whole() -> None:
    """Each stage has one of three layers, and each of its two ranks half of the heads. It takes as long as above."""
    engine = Engine(200)
    engine.spec = replace(engine.spec, tensor_parallel_size=2, pipeline_parallel_size=3, total_layers=3)
    profile = measured_profile(cast(ModelRunner, engine), "own")
    assert (profile.num_devices, profile.pipeline_depth) == (6, 3)
    assert profile.kv_bytes_per_token == 6 * 40
    assert profile.step_s(StepLoad(100, 0.0, 10, 0)) == pytest.approx(3 * (2e-3 + 5e-3 + 3e-3), rel=0.2)


def test_bad_flags_end_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["out.json", "--model", "m", "--data-parallel-size", "2"]) == 2
    assert "data_parallel_size = 2: measure one of the workers alone" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert "kvrelay measure: needs FILE (kvrelay measure --help lists the flags)" in capsys.readouterr().err
    assert main(["out.json", "--block-size", "7"]) == 2
    assert "block-size" in capsys.readouterr().err
