"""The samples of a request over real workers: the full blocks of a prompt are computed and sent once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvrelay.kv.table import blocks_for
from kvrelay.protocol.messages import Cancel
from kvrelay.protocol.sampling import Sampling
from tests.component.transfer.transports import NO_NIXL
from tests.component.workers.rig import Fleet, fleet, prompt_of
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import until
from tests.fakes.workers import LocalWorker, Received

pytestmark = pytest.mark.component
BLOCK = 16
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7]
SAMPLING = Sampling(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)


@dataclass(frozen=True)
class Cost:
    """Cost of the samples of one prompt: tokens computed; blocks computed, sent and received."""

    computed_tokens: int
    computed_blocks: float
    pushed_blocks: float
    received_blocks: int


def cost_of(length: int, count: int) -> Cost:
    """Samples share all full blocks before the last token; each sample computes and sends the rest."""
    num_shared = blocks_for(length, BLOCK) - 1
    num_blocks = num_shared + count
    return Cost(num_shared * BLOCK + count * (length - num_shared * BLOCK), num_blocks, num_blocks, num_blocks)


def check(prompt: list[int], received: Sequence[Received], sampling: Sampling = SAMPLING) -> None:
    for index, each in enumerate(received):
        assert each.failed is None
        assert each.output == expected_tokens(prompt, sampling, 512, index)


async def compute_together(worker: LocalWorker, runner: HashRunner, samples: Sequence[Received]) -> None:
    """The runner, which was held, goes on once the worker has all samples; to their ends."""
    await until(lambda: worker.started.role.num_open == len(samples))
    runner.go_on()
    for sample in samples:
        await sample.finished()


async def hand_over(redis_url: str, prompt: list[int], count: int, **settings: object) -> Cost:
    """All samples are on the prefill worker before the first chunk is computed."""
    prefill, decode = HashRunner(), HashRunner()
    async with fleet(redis_url, [prefill], [decode], **settings) as f:
        prefill.hold_after(0)
        samples = [
            f.router.prefill(f.prefill[0].me, f.decode[0].me, "r", prompt, SAMPLING, sample=(index, count))
            for index in range(count)
        ]
        await compute_together(f.prefill[0], prefill, samples)
        check(prompt, samples)
        await f.until_clean()
        num_received = [sample.usage.received_blocks for sample in samples if sample.usage is not None]
        # The transport tells the sender of a block's leaving when it pleases, perhaps after the commit.
        await until(lambda: f.prefill[0].started.role.totals()["pushed_blocks"] >= sum(num_received))
        totals = f.prefill[0].started.role.totals()
        assert totals["prompt_blocks"] == totals["computed_blocks"] + totals["cached_blocks"]
        assert len(num_received) == count
        return Cost(
            f.prefill[0].context.steps.totals.num_prefill_tokens,
            totals["computed_blocks"],
            totals["pushed_blocks"],
            sum(num_received),
        )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("overlap", ["on", "off"])
async def test_eight_samples_compute_and_send_full_blocks_once(redis_url: str, length: int, overlap: str) -> None:
    prompt = prompt_of(length, 3)
    settings = {"token_budget": 24, "max_running": 16, "overlap": overlap}  # longer prompts take several chunks
    for count in (1, 8):
        assert await hand_over(redis_url, prompt, count, **settings) == cost_of(length, count)


@pytest.mark.parametrize("length", LENGTHS)
async def test_on_a_worker_that_runs_both_phases_too(redis_url: str, length: int) -> None:
    prompt, runner = prompt_of(length, 4), HashRunner()
    async with fleet(redis_url, [], [runner], token_budget=24, max_running=16) as f:
        runner.hold_after(0)
        samples = [f.router.generate(f.decode[0].me, "r", prompt, SAMPLING, sample=(index, 8)) for index in range(8)]
        await compute_together(f.decode[0], runner, samples)
        check(prompt, samples)
        await f.until_clean()
        assert f.decode[0].context.steps.totals.num_prefill_tokens == cost_of(length, 8).computed_tokens
        usages = [sample.usage for sample in samples if sample.usage is not None]
        assert sum(usage.computed_blocks for usage in usages) == cost_of(length, 8).computed_blocks
        assert all(u.computed_blocks + u.cached_blocks == u.prompt_blocks for u in usages)


async def test_a_first_sample_that_ends_with_its_first_token_leaves_its_blocks_to_the_others(redis_url: str) -> None:
    prompt = prompt_of(BLOCK + 3, 5)
    first = expected_tokens(prompt, SAMPLING, 512, 0)[0]
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, stop_token_ids=(first,))
    runner = HashRunner()
    async with fleet(redis_url, [runner], [HashRunner()]) as f:
        runner.hold_after(0)
        samples = [
            f.router.prefill(f.prefill[0].me, f.decode[0].me, "r", prompt, sampling, sample=(index, 4))
            for index in range(4)
        ]
        await compute_together(f.prefill[0], runner, samples)
        check(prompt, samples, sampling)
        assert len(samples[0].output) == 1
        await f.until_clean()
        assert f.prefill[0].context.steps.totals.num_prefill_tokens == cost_of(len(prompt), 4).computed_tokens


async def test_samples_that_go_to_several_decode_workers_are_sent_full_blocks_once_to_each(redis_url: str) -> None:
    prompt, runner = prompt_of(2 * BLOCK + 5, 6), HashRunner()
    async with fleet(redis_url, [runner], [HashRunner(), HashRunner()]) as f:
        runner.hold_after(0)
        samples = [
            f.router.prefill(f.prefill[0].me, f.decode[index % 2].me, "r", prompt, SAMPLING, sample=(index, 6))
            for index in range(6)
        ]
        await compute_together(f.prefill[0], runner, samples)
        check(prompt, samples)
        await f.until_clean()
        assert f.prefill[0].context.steps.totals.num_prefill_tokens == cost_of(len(prompt), 6).computed_tokens
        num_received = sum(sample.usage.received_blocks for sample in samples if sample.usage is not None)
        assert num_received == 2 * cost_of(len(prompt), 3).received_blocks


async def test_samples_cost_as_much_where_blocks_are_written_one_sidedly(redis_url: str) -> None:
    if NO_NIXL:
        pytest.skip(NO_NIXL)
    for length in LENGTHS:
        cost = await hand_over(redis_url, prompt_of(length, 7), 5, max_running=16, transfer="nixl")
        expected = cost_of(length, 5)
        assert (cost.computed_tokens, cost.received_blocks) == (expected.computed_tokens, expected.received_blocks)


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("num_blocks", [14, 64])
@pytest.mark.parametrize("transfer", ["zmq", "nixl"])
async def test_cancels_and_stops_of_any_sample_at_any_moment(
    redis_url: str, num_prefill: int, num_blocks: int, transfer: str
) -> None:
    """Requests of one to six samples over two decode workers, with pools that are too small for all, or large."""
    if transfer == "nixl" and (NO_NIXL or not num_prefill):
        pytest.skip(NO_NIXL or "nothing is handed over")
    rng = random.Random(num_blocks)
    prefill = [HashRunner(num_blocks) for _ in range(num_prefill)]
    decode = [HashRunner(num_blocks, num_host_slots=8 * index) for index in range(2)]
    async with fleet(redis_url, prefill, decode, token_budget=32, max_running=6, transfer=transfer) as f:
        kept: list[tuple[list[int], int, Sampling, Received]] = []
        for number in range(40):
            count, prompt = rng.randint(1, 6), prompt_of(rng.randint(1, 70), number)
            sampling = Sampling(temperature=1.0, seed=number, max_tokens=rng.randint(2, 24), ignore_eos=True)
            started = [start(f, rng, f"r{number}", prompt, sampling, (i, count)) for i in range(count)]
            doomed = set(rng.sample(range(count), rng.randint(0, count)))
            kept += [(prompt, i, sampling, got) for i, got in enumerate(started) if i not in doomed]
            for index in doomed:
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.01)
                bodies = [Cancel(reason=why) for why in ("the client is gone", "a stop string matched")]
                body = rng.choice(bodies)
                for worker in [*f.prefill, *f.decode]:
                    f.router.send(worker.me, f"r{number}", body, sequence=index)
        for prompt, index, sampling, got in kept:
            await got.finished()
            assert got.failed is None, got.failed
            assert got.output == expected_tokens(prompt, sampling, num_blocks * BLOCK, index)
        await f.until_clean()


def start(
    f: Fleet, rng: random.Random, name: str, prompt: list[int], sampling: Sampling, sample: tuple[int, int]
) -> Received:
    decode: LocalWorker = rng.choice(f.decode)
    if not f.prefill:
        return f.router.generate(decode.me, name, prompt, sampling, sample=sample)
    return f.router.prefill(f.prefill[0].me, decode.me, name, prompt, sampling, sample=sample)
