"""Beam search on real prefill and decode services with the hash model: each candidate proves that the right blocks were
read, whoever shares, copies, or loses them."""

from __future__ import annotations

import random

import pytest

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import Cancel
from kvrelay.protocol.sampling import BeamSpec, Sampling
from tests.component.workers.rig import fleet, prompt_of
from tests.fakes.beam_oracle import expected_beams
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import until
from tests.fakes.workers import Received, has_sent_all

pytestmark = pytest.mark.component


def beams(width: int, max_tokens: int = 20, *, returned: int | None = None, **rest: object) -> Sampling:
    spec = BeamSpec(width=width, num_returned=returned or width, **rest)  # type: ignore[arg-type]
    return Sampling(max_tokens=max_tokens, beams=spec)


def check(got: Received, prompt: list[int], sampling: Sampling) -> None:
    assert got.failed is None
    expected = expected_beams(prompt, sampling, 512)
    assert [tuple(each.token_ids) for each in got.beams] == [text.token_ids for text in expected]
    for each, text in zip(got.beams, expected, strict=True):
        assert abs(each.score - text.score) < 1e-5
    assert got.finish is got.beams[0].finish
    assert not got.tokens


@pytest.mark.everyday(5)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 300])
@pytest.mark.parametrize("width", [2, 4, 7])
async def test_a_prompt_of_any_length_is_handed_over_and_searched(redis_url: str, length: int, width: int) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()], token_budget=64, max_running=16) as f:
        prompt, sampling = prompt_of(length), beams(width)
        got = await f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, sampling).finished()
        check(got, prompt, sampling)
        assert got.usage is not None
        assert got.usage.received_blocks == got.usage.prompt_blocks == -(-length // 16), "sent once"
        await f.until_clean()


async def test_many_searches_under_pressure(redis_url: str) -> None:
    """Handed over and local, beside greedy ones, in a pool that holds a few: beams are preempted and resumed."""
    runners = [HashRunner(num_blocks=80), HashRunner(num_blocks=26)]
    async with fleet(redis_url, runners[:1], runners[1:], token_budget=48, max_running=12) as f:
        rng = random.Random(5)
        prefill, decode = f.prefill[0].me, f.decode[0].me
        searches, plain = [], []
        for number in range(12):
            prompt = prompt_of(rng.randint(1, 60), rng.randint(0, 2))
            sampling = beams(rng.randint(1, 6), rng.randint(1, 60), early_stopping=rng.choice([True, False, "never"]))
            if number % 3:
                got = f.router.prefill(prefill, decode, f"b{number}", prompt, sampling)
            else:
                got = f.router.generate(decode, f"b{number}", prompt, sampling)
            searches.append((got, prompt, sampling))
            greedy = Sampling(temperature=0.0, max_tokens=rng.randint(1, 80), ignore_eos=True)
            plain.append((f.router.prefill(prefill, decode, f"g{number}", prompt, greedy), prompt, greedy))
        for got, prompt, sampling in searches:
            check(await got.finished(), prompt, sampling)
        for got, prompt, greedy in plain:
            assert (await got.finished()).output == expected_tokens(prompt, greedy, 512)
        await f.until_clean()


async def test_searches_that_outgrow_the_pool_together_take_turns(redis_url: str) -> None:
    runners = [HashRunner(), HashRunner(num_blocks=26, step_s=0.005)]
    async with fleet(redis_url, runners[:1], runners[1:], max_running=12) as f:
        spec = BeamSpec(width=4, num_returned=4, early_stopping="never")
        sampling = Sampling(max_tokens=60, beams=spec, ignore_eos=True)
        prompts = [prompt_of(20, seed) for seed in range(3)]
        searches = [
            f.router.prefill(f.prefill[0].me, f.decode[0].me, f"r{number}", prompt, sampling)
            for number, prompt in enumerate(prompts)
        ]
        for got, prompt in zip(searches, prompts, strict=True):
            check(await got.finished(), prompt, sampling)
        await f.until_clean()
        assert f.decode[0].context.scheduler.num_preemptions > 0


async def test_one_token_never_reaches_decode(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], []) as f:
        prompt, sampling = prompt_of(50), beams(5, 1, returned=3)
        got = await f.router.prefill(f.prefill[0].me, None, "a", prompt, sampling).finished()
        check(got, prompt, sampling)
        await f.until_clean()


@pytest.mark.parametrize("local", [True, False])
async def test_a_cancelled_search_leaves_nothing(redis_url: str, local: bool) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        prompt, decode = prompt_of(50), f.decode[0]
        decode.runner.hold_after(10)
        sampling = Sampling(max_tokens=150, beams=BeamSpec(width=4, num_returned=4), ignore_eos=True)
        if local:
            f.router.generate(decode.me, "a", prompt, sampling)
        else:
            f.router.prefill(f.prefill[0].me, decode.me, "a", prompt, sampling)
        await until(lambda: len(decode.context.scheduler.running) >= 4)
        for worker in (f.prefill[0], decode):
            f.router.send(worker.me, "a", Cancel(reason="the client is gone"))
        await until(lambda: has_sent_all(f.router.messenger))
        decode.runner.go_on()
        await f.until_clean()


async def test_a_search_that_can_never_run_is_refused_with_numbers(redis_url: str) -> None:
    async with fleet(redis_url, [], [HashRunner(num_blocks=40)], max_running=8) as f:
        decode = f.decode[0].me
        got = await f.router.generate(decode, "a", prompt_of(50), beams(9)).finished()
        assert got.failed is not None
        assert "9 beams run at a time, and max_running is 8" in got.failed
        got = await f.router.generate(decode, "b", prompt_of(50), beams(8, 200)).finished()
        assert got.failed is not None
        assert got.failure is FailureKind.TOO_LARGE
        assert "107 blocks together, the pool has 40" in got.failed
        await f.until_clean()


async def test_a_worker_that_dies_in_the_middle_takes_no_answer_with_it(redis_url: str) -> None:
    """Nothing was sent yet: another attempt on another worker finds the same texts."""
    async with fleet(redis_url, [HashRunner()], [HashRunner(), HashRunner()]) as f:
        f.decode[0].runner.hold_after(10)
        prompt = prompt_of(70)
        sampling = Sampling(max_tokens=60, beams=BeamSpec(width=4, num_returned=3), ignore_eos=True)
        first = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, sampling)
        await until(lambda: len(f.decode[0].context.scheduler.running) >= 4)
        f.decode.pop(0).die()
        assert not first.beams
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, sampling, attempt=2)
        check(await got.finished(), prompt, sampling)
        await f.until_clean()
