"""Every scheduler in real prefill and decode services: pools too small, tokens exact, nothing left behind. And workers
whose devices have a queue: steps are launched while others run, beside cancels, stops and handoffs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from kvrelay.protocol.messages import AnyBody, Cancel
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.policies import BUILT_IN
from tests.component.workers.rig import Fleet, fleet, prompt_of
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.queued_runner import QueuedRunner
from tests.fakes.workers import Received

pytestmark = pytest.mark.component
NUM_REQUESTS = 40
MAX_MODEL_LEN = 224
Policy = tuple[str, str, dict[str, object]]
POLICIES: list[Policy] = [
    *((name, "fcfs", {}) for name in BUILT_IN),
    ("sarathi", "lpm", {"chunking": "dynamic"}),
    ("vllm", "sjf", {"retraction": "least_progress", "new_token_ratio": 0.5}),
    ("orca", "dfs_weight", {}),
]


@pytest.mark.everyday(6)
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize(("scheduler", "order", "more"), POLICIES, ids=lambda value: str(value))
async def test_handed_over_and_local_prompts_end_with_their_own_tokens(
    redis_url: str, scheduler: str, order: str, more: dict[str, object], overlap: str
) -> None:
    """Two thirds are handed over, a third is decode's own; every prompt shares its beginning with some others."""
    small = [HashRunner(num_blocks=14, max_model_len=MAX_MODEL_LEN) for _ in range(2)]
    settings = {
        "token_budget": 48,
        "max_running": 8,
        "scheduler": scheduler,
        "queue_order": order,
        "overlap": overlap,
    }
    settings |= more
    async with fleet(redis_url, small[:1], small[1:], **settings) as f:
        rng = random.Random(5)
        jobs: list[tuple[list[int], Sampling, Received]] = []
        for number in range(NUM_REQUESTS):
            prompt = prompt_of(48, number % 3)[: rng.randint(1, 48)] + prompt_of(rng.randint(1, 100), number)
            sampling = Sampling(temperature=rng.choice([0.0, 1.0]), seed=number, max_tokens=rng.randint(2, 60))
            if number % 3:
                got = f.router.prefill(f.prefill[0].me, f.decode[0].me, f"r{number}", prompt, sampling)
            else:
                got = f.router.generate(f.decode[0].me, f"r{number}", prompt, sampling)
            jobs.append((prompt, sampling, got))
        for prompt, sampling, got in jobs:
            await got.finished()
            assert got.failed is None
            assert got.output == expected_tokens(prompt, sampling, MAX_MODEL_LEN)
        await f.until_clean()


async def test_a_decode_worker_with_a_prefill_delayer_delays_prompts_and_serves_all(redis_url: str) -> None:
    runner = HashRunner(num_blocks=64, max_model_len=MAX_MODEL_LEN)
    async with fleet(redis_url, [], [runner], max_running=4, token_budget=64, prefill_delayer=True) as f:
        jobs = []
        for number in range(24):
            prompt = prompt_of(20, number)
            sampling = Sampling(temperature=0.0, seed=number, max_tokens=5 + 7 * (number % 5))
            jobs.append((prompt, sampling, f.router.generate(f.decode[0].me, f"r{number}", prompt, sampling)))
        for prompt, sampling, got in jobs:
            await got.finished()
            assert got.output == expected_tokens(prompt, sampling, MAX_MODEL_LEN)
        await f.until_clean()
        totals = f.decode[0].started.reports.status().totals
        assert totals["prefill_delayed_passes"] > 0
        assert totals["prefill_delay_s"] > 0
        assert totals["prefill_allowed_ran"] > 1


# -- devices with a queue ---------------------------------------------------------------------------------------------


async def cancel_and_stop_at_any_moment(f: Fleet, num_requests: int, max_tokens: int) -> None:
    """All but every fifth of so many requests; those get their tokens, and nothing is left behind."""
    rng = random.Random(11)
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    kept: list[tuple[list[int], Received]] = []
    for number in range(num_requests):
        name, prompt = f"r{number}", prompt_of(rng.randint(1, 120), number)
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, name, prompt, sampling)
        if number % 5 == 0:
            kept.append((prompt, got))
            continue
        await asyncio.sleep(rng.random() * 0.02)
        bodies: list[AnyBody] = [Cancel(reason="the client is gone"), Cancel(reason="a stop string matched")]
        body = rng.choice(bodies)
        for worker in rng.sample([f.prefill[0].me, f.decode[0].me], 2):
            f.router.send(worker, name, body)
    for prompt, got in kept:
        assert (await got.finished()).output == expected_tokens(prompt, sampling, 512)
    await f.until_clean()


@pytest.fixture
def runners() -> Iterator[list[HashRunner]]:
    """Of a prefill and a decode worker, whose devices run what they are asked for; some draws change on landing."""
    made = [QueuedRunner(64, 16, 512, mistakes=9) for _ in range(2)]
    for runner in made:
        runner.let_run.release(1_000_000)
    yield list(made)
    for runner in made:
        runner.close()


async def test_cancels_and_stops_at_any_moment_leave_nothing_behind(redis_url: str, runners: list[HashRunner]) -> None:
    async with fleet(redis_url, runners[:1], runners[1:], token_budget=32, max_running=16) as f:
        await cancel_and_stop_at_any_moment(f, num_requests=100, max_tokens=40)


async def test_prompts_that_share_prefixes_are_handed_over(redis_url: str, runners: list[HashRunner]) -> None:
    """A prompt of several chunks is launched chunk behind chunk, and its blocks are sent as each lands."""
    rng, shared = random.Random(1), prompt_of(60)
    prompts = [shared[: rng.randint(0, 60)] + prompt_of(rng.randint(1, 90), number) for number in range(20)]
    sampling = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
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
