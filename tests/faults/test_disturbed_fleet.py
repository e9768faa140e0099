"""Requests over workers that die, restart, and lose messages: every output is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import Sampling
from kvrelay_router.dispatch.interface import GenerateRequest, RequestFailed
from tests.fakes.delta_reader import read_batches
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.faults.local_fleet import PEER_TIMEOUT_S, LocalFleet, Role, local_fleet, make_job

Disturb = Callable[[LocalFleet, random.Random], Awaitable[None]]


def run_jobs(redis_url: str, seed: int, num_jobs: int, disturb: Disturb, *, num_blocks: int) -> None:
    """Runs jobs, a few dozen at a time, while `disturb` is called again and again."""
    print(f"seed {seed}")

    def make_runner() -> HashRunner:
        return HashRunner(num_blocks=num_blocks, max_model_len=224, step_s=0.01)

    async def scenario() -> None:
        async with local_fleet(redis_url, 2, 2, make_runner) as fleet:
            rng = random.Random(seed)
            jobs = [make_job(number, rng) for number in range(num_jobs)]
            room = asyncio.Semaphore(40)

            async def one(number: int) -> None:
                async with room:
                    await asyncio.sleep(random.Random(number).random() * 0.1)
                    await fleet.run(jobs[number])

            async def trouble() -> None:
                while True:
                    await disturb(fleet, rng)

            troubling = asyncio.create_task(trouble())
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(num_jobs):
                        group.create_task(one(number))
                    group.create_task(_end_with(troubling, num_jobs, fleet))
            except* AssertionError as failures:
                told = "\n".join(str(each) for each in failures.exceptions[:3])
                raise AssertionError(f"seed {seed}: {told}\nafter: {'; '.join(fleet.events)}") from failures
            finally:
                troubling.cancel()
                await asyncio.gather(troubling, return_exceptions=True)
            assert fleet.events, "nothing was disturbed"
            await fleet.until_clean()
            assert fleet.dispatcher._driver.num_illegal == 0, "a worker broke the protocol"

    asyncio.run(scenario())


async def _end_with(troubling: asyncio.Task[None], num_jobs: int, fleet: LocalFleet) -> None:
    """A worker that crashes, or trouble that fails, fails the test; both are watched until all requests have ended."""
    while True:
        await asyncio.wait([troubling], timeout=0.05)
        fleet.check_nobody_crashed()
        if troubling.done():
            troubling.result()
        counts = fleet.dispatcher._counts.of(None)
        if counts["finished"] + counts["cancelled"] + counts["failed"] >= num_jobs:
            return


async def kill_one(fleet: LocalFleet, rng: random.Random) -> None:
    """A worker of either role dies and comes back; one of each role is always left."""
    await asyncio.sleep(rng.uniform(0.05, 0.4))
    role: Role = rng.choice(["prefill", "decode"])
    name = rng.choice(fleet.living(role))
    fleet.kill(name)
    await asyncio.sleep(rng.uniform(0, 2 * PEER_TIMEOUT_S))
    await fleet.start_worker(role, name)
    await fleet.until_ready({name})


async def restart_one(fleet: LocalFleet, rng: random.Random) -> None:
    """A rolling restart; now and then the drain is cut short."""
    name = rng.choice(list(fleet.workers))
    await fleet.restart(name, hurried=rng.random() < 0.5)
    await fleet.until_ready({name})
    await asyncio.sleep(rng.uniform(0.0, 0.2))


async def cut_one_off(fleet: LocalFleet, rng: random.Random) -> None:
    """One direction of a worker's links, or some messages, are lost; at times for longer than the peer timeout."""
    await asyncio.sleep(rng.uniform(0.0, 0.3))
    name = rng.choice(list(fleet.workers))
    for_s = rng.choice([0.3, 1.5, 2.5]) * PEER_TIMEOUT_S
    kind = rng.choice(["mute", "deafen", "lose"])
    if kind == "mute":
        await fleet.mute(name, for_s)
    elif kind == "deafen":
        await fleet.deafen(name, for_s)
    else:
        await fleet.lose_messages(name, for_s, 0.3, rng)
    await fleet.until_ready(set(fleet.workers))


async def everything(fleet: LocalFleet, rng: random.Random) -> None:
    await rng.choice([kill_one, restart_one, cut_one_off])(fleet, rng)


@pytest.fixture(scope="module")
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("disturb", "num_blocks"), [(kill_one, 60), (restart_one, 60), (cut_one_off, 60), (everything, 24)]
)
def test_no_output_changes(redis_url: str, disturb: Disturb, num_blocks: int, seed: int) -> None:
    """Deaths, rolling restarts, lost messages and half-open links; all of it with pools that are too small."""
    run_jobs(redis_url, seed, 400, disturb, num_blocks=num_blocks)


async def test_a_request_that_nobody_can_finish_ends_at_its_deadline(redis_url: str) -> None:
    async with local_fleet(redis_url, 1, 1, lambda: HashRunner(max_model_len=224, step_s=0.02)) as fleet:
        sampling = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)
        request = GenerateRequest(request_id="late", prompt_ids=[1, 2, 3], sampling=sampling, timeout_s=2.5)
        began = asyncio.get_running_loop().time()
        handle = fleet.dispatcher.submit(request)
        tokens: list[int] = []

        async def read() -> None:
            async for deltas in read_batches(handle):
                tokens.extend(token for delta in deltas for token in delta.token_ids)
                if len(tokens) >= 5 and "decode-0" in fleet.workers:
                    fleet.kill("decode-0")

        with pytest.raises(RequestFailed) as failed:
            await read()
        assert failed.value.kind is FailureKind.DEADLINE
        assert 2.4 < asyncio.get_running_loop().time() - began < 10
        assert tokens == expected_tokens([1, 2, 3], sampling, 224)[: len(tokens)]
        await fleet.until_clean()
