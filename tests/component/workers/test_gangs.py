"""The samples of a request over real workers, where not all of them have room beside others."""

from __future__ import annotations

import pytest

from kvrelay.protocol.sampling import Sampling
from tests.component.workers.rig import fleet, prompt_of, run
from tests.fakes.hash_runner import HashRunner, expected_tokens

pytestmark = pytest.mark.component
NUM_SAMPLES = 3


def test_samples_draw_what_each_draws_alone_and_leave_nothing_behind(redis_url: str) -> None:
    """A decode worker with four places; two of them are wanted by others, three by the samples."""

    async def test() -> None:
        sampling = Sampling(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
        long = Sampling(temperature=0.0, max_tokens=100, ignore_eos=True)
        async with fleet(redis_url, [HashRunner()], [HashRunner()], max_running=4, token_budget=64) as f:
            prefill, decode = f.prefill[0].me, f.decode[0].me
            others = [f.router.prefill(prefill, decode, f"other {i}", prompt_of(20, i), long) for i in range(2)]
            prompt = prompt_of(40, 9)
            samples = [
                f.router.prefill(prefill, decode, "group", prompt, sampling, sample=(index, NUM_SAMPLES))
                for index in range(NUM_SAMPLES)
            ]
            for received in (*others, *samples):
                await received.finished()
            for index, sample in enumerate(samples):
                assert sample.output == expected_tokens(prompt, sampling, 512, index)
            await f.until_clean()

    run(test)
