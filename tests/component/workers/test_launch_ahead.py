"""Workers whose devices have a queue: steps are launched while others run, beside cancels, stops and handoffs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.plan import PlanDraft, PlannedRow
from kvrelay.scheduling.queue import decode_turns
from kvrelay.scheduling.scheduler import BatchScheduler
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.step_planner import StepPlanner
from tests.component.workers.rig import cancel_and_stop_at_any_moment, fleet, prompt_of, run
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.queued_runner import QueuedRunner
from tests.fakes.waiting import until

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


def test_decodes_of_a_flood_that_pause_for_light_prompts_go_on_with_their_own_tokens(
    redis_url: str, runners: list[HashRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of up to three steps, one after another, beside decodes of another tenant, which also take turns."""
    num_paused: list[int] = []
    return_paused = StepPlanner._return_paused

    def count(planner: StepPlanner, sequence: Sequence, paused: list[PlannedRow], draft: PlanDraft) -> None:
        return_paused(planner, sequence, paused, draft)
        num_paused.append(len(paused) if sequence in draft.prompts else 0)

    monkeypatch.setattr(StepPlanner, "_return_paused", count)
    monkeypatch.setattr(decode_turns, "PROBE_EVERY_STEPS", 8)
    sampling = Sampling(temperature=0.0, max_tokens=100, ignore_eos=True)

    async def test() -> None:
        async with fleet(redis_url, [], runners[1:], token_budget=32, max_running=10) as f:
            decode, prompts = f.decode[0], [prompt_of(4 + number, number) for number in range(14)]
            scheduler = decode.context.scheduler
            assert isinstance(scheduler, BatchScheduler)
            scheduler.shares.reclaim_lag, scheduler.turns.least_turns = 2.0, 2
            flood = [
                f.router.generate(decode.me, f"flood-{number}", prompt, sampling, tenant="flood")
                for number, prompt in enumerate(prompts)
            ]
            await until(lambda: len(flood[5].output) > 0)
            for number in range(6):
                prompt, few = prompt_of(25 + 12 * number, 100 + number), Sampling(temperature=0.0, max_tokens=3)
                got = f.router.generate(decode.me, f"light-{number}", prompt, few, tenant="light")
                assert (await got.finished()).output == expected_tokens(prompt, few, 512)
            for prompt, got in zip(prompts, flood, strict=True):
                assert (await got.finished()).output == expected_tokens(prompt, sampling, 512)
            await f.until_clean()
            assert max(num_paused) > 0, "decodes were paused"

    run(test)
