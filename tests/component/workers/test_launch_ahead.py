"""Workers whose devices have a queue: steps are launched while others run, beside cancels, stops and handoffs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvrelay.protocol.sampling import Sampling
from tests.component.workers.rig import cancel_and_stop_at_any_moment, fleet, prompt_of, run
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.queued_runner import QueuedRunner

pytestmark = pytest.mark.component


@pytest.fixture
def runners() -> Iterator[list[HashRunner]]:
    """Of a prefill and a decode worker, whose devices run what they are asked for; some draws change on landing."""
    made = [QueuedRunner(64, 16, 512, mistakes=9) for _ in range(2)]
    for runner in made:
        runner.let_run.release(1_000_000)
    yield list(made)
    for runner in made:
        runner.close()


def test_cancels_and_stops_at_any_moment_leave_nothing_behind(redis_url: str, runners: list[HashRunner]) -> None:
    async def test() -> None:
        async with fleet(redis_url, runners[:1], runners[1:], token_budget=32, max_running=16) as f:
            await cancel_and_stop_at_any_moment(f, num_requests=100, max_tokens=40)

    run(test)


def test_prompts_that_share_prefixes_are_handed_over(redis_url: str, runners: list[HashRunner]) -> None:
    """A prompt of several chunks is launched chunk behind chunk, and its blocks are sent as each lands."""
    rng, shared = random.Random(1), prompt_of(60)
    prompts = [shared[: rng.randint(0, 60)] + prompt_of(rng.randint(1, 90), number) for number in range(20)]
    sampling = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)

    async def test() -> None:
        async with fleet(redis_url, runners[:1], runners[1:], token_budget=32, max_running=8) as f:
            started = [
                f.router.prefill(f.prefill[0].me, f.decode[0].me, f"{number}", prompt, sampling)
                for number, prompt in enumerate(prompts)
            ]
            for prompt, got in zip(prompts, started, strict=True):
                assert (await got.finished()).output == expected_tokens(prompt, sampling, 512)
            await f.until_clean()
            for worker in (*f.prefill, *f.decode):
                assert worker.context.steps.totals.num_steps_launched_ahead > 0

    run(test)
