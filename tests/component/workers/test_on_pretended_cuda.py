"""Prefill and decode workers whose pools lie on CUDA devices, which are pretended: tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.load.causal_model import load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.protocol.sampling import Sampling
from tests.component.workers.rig import fleet
from tests.fakes.pretended_cuda import NO_PRETENCE, Machine, pretend_cuda
from tests.gpu.reference import greedy, prompts, read_model
from tests.tiny_models import build_model

pytestmark = [pytest.mark.component, pytest.mark.skipif(bool(NO_PRETENCE), reason=NO_PRETENCE)]
NUM_OUTPUT = 16


@pytest.fixture(params=["late", "any time"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    torch.set_num_threads(1)
    with pretend_cuda(Machine(3, random=None if request.param == "late" else Random(0))) as found:
        yield found


class Runner(TransformersRunner):
    """With what the rig asks of one."""

    def go_on(self) -> None: ...

    @property
    def num_sequences(self) -> int:
        return len(self._sampler._state._slots)


def make_runner(directory: Path, device: str) -> Runner:
    model = load_model(open_source(str(directory), "float32", device, 256), 16, TorchBackend())
    return Runner(model, 40, num_host_slots=10)


@pytest.mark.slow
@pytest.mark.parametrize("checksum", [False, True])
async def test_blocks_go_from_one_device_to_another(
    redis_url: str, machine: Machine, tmp_path: Path, checksum: bool
) -> None:
    directory = build_model("qwen3", tmp_path)
    given = [[7] * 16, *prompts(6, 90)]
    reference = read_model(directory, torch.float32, torch.device("cpu"))
    expected = [greedy(reference, prompt, NUM_OUTPUT) for prompt in given]
    sampling = Sampling(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    ends = [make_runner(directory, device) for device in ("cuda:1", "cuda:2")]
    settings = {"token_budget": 48, "max_running": 4, "peer_timeout_s": 60.0, "transfer_checksums": checksum}
    async with fleet(redis_url, ends[:1], ends[1:], **settings) as f:  # type: ignore[arg-type]
        for attempt in (1, 2):  # then with what was cached
            started = [
                f.router.prefill(f.prefill[0].me, f.decode[0].me, f"{number}", prompt, sampling, attempt=attempt)
                for number, prompt in enumerate(given)
            ]
            assert [(await each.finished()).output for each in started] == expected
        for worker in (*f.prefill, *f.decode):
            assert worker.context.steps.totals.num_steps_launched_ahead > 0
        await f.until_clean()
    assert not any(gpu.default_stream.submitted for gpu in machine.gpus[:1]), "a device that is nobody's"
