"""Every scheduler in real prefill and decode services: pools too small, tokens exact, nothing left behind."""

from __future__ import annotations

import random

import pytest

from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.policies.scheduler_registry import BUILT_IN
from tests.component.workers.rig import fleet, prompt_of, run
from tests.fakes.hash_runner import HashRunner, expected_tokens
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
def test_handed_over_and_local_prompts_end_with_their_own_tokens(
    redis_url: str, scheduler: str, order: str, more: dict[str, object], overlap: str
) -> None:
    """Two thirds are handed over, a third is decode's own; every prompt shares its beginning with some others."""

    async def test() -> None:
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

    run(test)


def test_a_decode_worker_with_a_prefill_delayer_delays_prompts_and_serves_all(redis_url: str) -> None:
    async def test() -> None:
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

    run(test)
