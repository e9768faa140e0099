"""Real prefill and decode services with the hash model: every token proves that the right blocks were read."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import pytest

from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings
from kvrelay.protocol.messages import Reassign, Status, StatusQuery
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.telemetry.metrics_file import StepRecord, read_metrics
from tests.component.workers.rig import fleet, prompt_of
from tests.fakes.hash_runner import EOS_TOKEN_ID, HashRunner, expected_tokens
from tests.fakes.waiting import PATIENCE_S, until
from tests.fakes.workers import Received, StubRouter

pytestmark = pytest.mark.component
GREEDY = Sampling(temperature=0.0, max_tokens=24)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 200, 480])
async def test_a_prompt_of_any_length_is_computed_handed_over_and_continued(redis_url: str, length: int) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()], token_budget=64, max_running=16) as f:
        prompt = prompt_of(length)
        got = await f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, GREEDY).finished()
        assert got.output == expected_tokens(prompt, GREEDY, 512)
        if len(got.output) > 1:
            await got.until(lambda received: received.first_from_prefill)
            assert got.usage is not None
            assert got.usage.received_blocks == got.usage.prompt_blocks == -(-length // 16)
            assert got.usage.computed_blocks == 0
        await f.until_clean()
        assert f.decode[0].context.steps.totals.num_prefill_tokens == 0


async def test_blocks_leave_while_later_chunks_are_computed(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()], token_budget=32, max_running=16) as f:
        f.prefill[0].runner.hold_after(9)
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(320), GREEDY)
        # 10 chunks of 2 blocks, of which the last is not computed.
        await until(lambda: f.prefill[0].started.role.totals()["pushed_blocks"] == 18)
        assert not got.tokens
        f.prefill[0].runner.go_on()
        await got.finished()


async def test_a_cached_prefix_leaves_before_the_first_forward(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner(), HashRunner()]) as f:
        await f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(300), GREEDY).finished()
        before = f.prefill[0].started.role.totals()["pushed_blocks"]
        f.prefill[0].runner.hold_after(0)
        got = f.router.prefill(f.prefill[0].me, f.decode[1].me, "b", prompt_of(300), GREEDY)
        await until(lambda: f.prefill[0].started.role.totals()["pushed_blocks"] >= before + 18)
        assert not got.tokens
        f.prefill[0].runner.go_on()
        await got.finished()


async def test_blocks_that_a_sender_cannot_write_unasked_do_not_count_towards_its_limit(redis_url: str) -> None:
    runners = [HashRunner(), HashRunner()]
    runners[0].hold_after(2)
    async with fleet(redis_url, runners[:1], runners[1:], token_budget=32, max_running=16) as f:
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(320), GREEDY)
        await until(lambda: f.decode[0].blocks["reserved"])
        runners[0].go_on()
        await got.finished()


async def test_what_decode_holds_already_is_not_sent_again(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        sampling = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
        first = prompt_of(40)
        answer = await f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", first, sampling).finished()
        second = first + answer.output + prompt_of(30, seed=1)
        got = await f.router.prefill(f.prefill[0].me, f.decode[0].me, "b", second, sampling).finished()
        assert got.output == expected_tokens(second, sampling, 512)
        assert got.usage is not None
        assert got.usage.cached_blocks == (len(first) + len(answer.output) - 1) // 16
        assert got.usage.cached_blocks + got.usage.received_blocks == got.usage.prompt_blocks
        assert got.cached_tokens == 32  # prefill itself kept the first prompt's two full blocks
        await f.until_clean()


async def test_sequences_of_one_prompt_compute_send_and_store_it_once(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner(step_s=0.01)], [HashRunner()], token_budget=32, max_running=16) as f:
        prompt = prompt_of(200)  # 12 full blocks and one of 8 tokens
        sampling = [Sampling(temperature=1.0, seed=seed, max_tokens=30) for seed in range(5)]
        jobs = [f.router.prefill(f.prefill[0].me, f.decode[0].me, f"r{s.seed}", prompt, s) for s in sampling]
        for one, got in zip(sampling, jobs, strict=True):
            assert (await got.finished()).output == expected_tokens(prompt, one, 512)
        assert f.prefill[0].context.steps.totals.num_prefill_tokens == 200 + 4 * 8
        handed_over = [got.usage.received_blocks for got in jobs if got.usage is not None]
        assert sorted(handed_over) == [1] * (len(handed_over) - 1) + [13]
        await f.until_clean()


async def test_a_shared_prefix_that_never_arrives_holds_nobody_up(redis_url: str) -> None:
    runners = [HashRunner(), HashRunner(), HashRunner()]
    async with fleet(redis_url, runners[:2], runners[2:], token_budget=16, max_running=16) as f:
        slow, quick = f.prefill
        slow.runner.hold_after(4)
        f.router.prefill(slow.me, f.decode[0].me, "dying", prompt_of(300), GREEDY)
        await until(lambda: f.decode[0].blocks["reserved"])
        got = f.router.prefill(quick.me, f.decode[0].me, "waiting", prompt_of(300), GREEDY)
        f.prefill.remove(slow)
        slow.die()
        assert (await got.finished()).output == expected_tokens(prompt_of(300), GREEDY, 512)
        await f.until_clean()


async def test_a_cache_salt_keeps_tenants_apart(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        prompt, me, to = prompt_of(100), f.prefill[0].me, f.decode[0].me
        for salt, cached in (("x", 0), ("y", 0), ("x", 96)):
            name = f"{salt}{cached}"
            got = await f.router.prefill(me, to, name, prompt, GREEDY, cache_salt=salt).finished()
            assert got.cached_tokens == cached


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_a_first_token_that_ends_the_request_leaves_decode_alone(redis_url: str, max_tokens: int) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        got = await f.router.prefill(f.prefill[0].me, None, "a", prompt_of(50), sampling).finished()
        assert len(got.output) == max_tokens
        assert got.finish is FinishReason.LENGTH
        await f.until_clean()
        assert f.decode[0].started.role.totals()["handoffs_committed"] == 0


async def test_a_first_token_that_is_end_of_sequence_frees_the_reservation(redis_url: str) -> None:
    prompt = next(p for n in range(1000) if expected_tokens(p := prompt_of(90, n), GREEDY, 512) == [EOS_TOKEN_ID])
    async with fleet(redis_url, [HashRunner()], [HashRunner()], token_budget=32, max_running=16) as f:
        got = await f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, GREEDY).finished()
        assert got.output == [EOS_TOKEN_ID]
        assert got.finish is FinishReason.STOP_TOKEN
        await f.until_clean()


async def test_decode_alone_computes_what_it_is_asked_to(redis_url: str) -> None:
    async with fleet(redis_url, [], [HashRunner()]) as f:
        got = await f.router.generate(f.decode[0].me, "a", prompt_of(70), GREEDY).finished()
        assert got.output == expected_tokens(prompt_of(70), GREEDY, 512)
        assert got.usage is not None
        assert got.usage.computed_blocks == got.usage.prompt_blocks == 5
        await f.until_clean()


async def test_a_large_handoff_is_not_starved_by_local_prompts(redis_url: str) -> None:
    runners = [HashRunner(), HashRunner(num_blocks=20, max_model_len=320, step_s=0.002)]
    async with fleet(redis_url, runners[:1], runners[1:], token_budget=64, max_running=16) as f:
        sampling = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True)

        def local(number: int) -> Received:
            return f.router.generate(f.decode[0].me, f"local{number}", prompt_of(40, number), sampling)

        running = [local(number) for number in range(5)]
        await running[0].until(lambda r: bool(r.tokens))
        large = f.router.prefill(f.prefill[0].me, f.decode[0].me, "large", prompt_of(280), sampling)
        async with asyncio.timeout(PATIENCE_S):
            for number in itertools.count(5):  # one comes whenever one ends: there are always some that would fit
                await running.pop(0).finished()
                running.append(local(number))
                if large.finish is not None:
                    break
        assert large.output == expected_tokens(prompt_of(280), sampling, 320)
        for got in running:
            await got.finished()
        await f.until_clean()


async def test_a_resumed_attempt_goes_on_where_the_first_stopped(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        sampling = Sampling(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
        prompt = prompt_of(45)
        whole = expected_tokens(prompt, sampling, 512)
        tokens = prompt + whole[:11]
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", tokens, sampling, attempt=2, num_output=11)
        await got.finished()
        assert [got.tokens[i] for i in range(11, 40)] == whole[11:]
        await f.until_clean()


def steps_in(directory: Path) -> list[StepRecord]:
    found = [record for file in directory.iterdir() for record in read_metrics(file)]
    return [record for record in found if isinstance(record, StepRecord)]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("preemption", "num_host_slots"), [("recompute", 0), ("swap", 60), ("swap", 9), ("auto", 60)])
async def test_many_requests_over_pools_too_small_for_them_all_finish_with_their_own_tokens(
    redis_url: str, tmp_path: Path, preemption: str, num_host_slots: int
) -> None:
    """Two of each, pools nearly full: deferred grants and preemptions, but nobody waits for ever."""

    totals: list[dict[str, float]] = []
    small = [HashRunner(num_blocks=14, max_model_len=224, num_host_slots=num_host_slots) for _ in range(4)]
    policy: dict[str, object] = {"token_budget": 48, "max_running": 8, "preemption": preemption}
    policy["metrics_file"] = str(tmp_path / "{worker_id}")
    async with fleet(redis_url, small[:2], small[2:], **policy) as f:
        rng = random.Random(5)
        jobs: list[tuple[list[int], Sampling, Received]] = []
        for number in range(120):
            prompt = prompt_of(rng.randint(1, 150), number % 30)
            sampling = Sampling(temperature=rng.choice([0.0, 1.0]), seed=number, max_tokens=rng.randint(2, 60))
            sender, receiver = rng.choice(f.prefill), rng.choice(f.decode)
            got = f.router.prefill(sender.me, receiver.me, f"r{number}", prompt, sampling)
            jobs.append((prompt, sampling, got))
        for prompt, sampling, got in jobs:
            await got.finished()
            assert got.failed is None
            assert got.output == expected_tokens(prompt, sampling, 224)
        await f.until_clean()
        totals.extend(worker.started.role.totals() for worker in f.decode)
        assert sum(each["preemptions"] for each in totals) > 0
        assert (sum(each["preemptions_by_swap"] for each in totals) > 0) >= (preemption == "swap")
        for each in totals:
            assert each["preemptions"] == each["preemptions_by_swap"] + each["preemptions_by_recompute"]
        for worker in f.decode:
            assert worker.started.reports.status().swap == {"total": num_host_slots, "used": 0}
    steps = steps_in(tmp_path)
    assert sum(s.num_swapped_out_blocks for s in steps) == sum(each["swapped_out_blocks"] for each in totals)
    assert sum(s.num_swapped_in_blocks for s in steps) == sum(each["swapped_in_blocks"] for each in totals)
    assert max(s.num_used_swap_slots for s in steps) <= num_host_slots


async def test_prefill_keeps_the_kv_until_commit_and_serves_another_decode_worker(redis_url: str) -> None:
    runners = [HashRunner(), HashRunner(), HashRunner()]
    async with fleet(redis_url, runners[:1], runners[1:], token_budget=32, max_running=16) as f:
        first, second = f.decode
        f.prefill[0].runner.hold_after(3)
        got = f.router.prefill(f.prefill[0].me, first.me, "a", prompt_of(200), GREEDY)
        await until(lambda: f.prefill[0].started.role.totals()["pushed_blocks"])
        first.die()
        f.decode.remove(first)
        f.prefill[0].runner.go_on()
        await got.until(lambda r: bool(r.need_decode))
        assert got.need_decode[0].excluded == [first.me.peer_id]
        await until(lambda: f.prefill[0].context.steps.totals.num_prefill_tokens == 200)
        f.router.send(f.prefill[0].me, "a", Reassign(decode=second.me))
        assert (await got.finished()).output == expected_tokens(prompt_of(200), GREEDY, 512)
        assert f.prefill[0].context.steps.totals.num_prefill_tokens == 200  # nothing was computed again
        await f.until_clean()


async def test_a_dead_prefill_worker_leaves_no_reservation_behind(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()], token_budget=16, max_running=16) as f:
        f.prefill[0].runner.hold_after(4)
        f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(400), GREEDY)
        await until(lambda: f.decode[0].blocks["reserved"])
        f.prefill.pop().die()
        await f.until_clean()


async def test_a_router_that_dies_has_its_requests_ended(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        f.decode[0].runner.hold_after(20)
        other = StubRouter("dying-router")
        sampling = Sampling(temperature=0.0, max_tokens=450, ignore_eos=True)
        for number in range(4):
            other.prefill(f.prefill[0].me, f.decode[0].me, f"r{number}", prompt_of(30, number), sampling)
        await until(lambda: f.decode[0].blocks["running"])
        other.close()
        await until(lambda: not f.decode[0].started.role.num_open)
        f.decode[0].runner.go_on()
        await f.until_clean()


async def test_a_draining_decode_worker_finishes_what_runs_and_refuses_what_comes(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        f.decode[0].runner.hold_after(10)
        sampling = Sampling(temperature=0.0, max_tokens=100, ignore_eos=True)
        old = f.router.prefill(f.prefill[0].me, f.decode[0].me, "old", prompt_of(30), sampling)
        await old.until(lambda r: len(r.tokens) > 3)
        f.decode[0].shell.on_signal()
        new = f.router.prefill(f.prefill[0].me, f.decode[0].me, "new", prompt_of(31), sampling)
        await new.until(lambda r: bool(r.need_decode))
        f.decode[0].runner.go_on()
        assert (await old.finished()).output == expected_tokens(prompt_of(30), sampling, 512)
        f.router.send(f.prefill[0].me, "new", Reassign(decode=None))
        assert (await new.finished()).failed


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_worker_says_that_it_did_not_begin_what_it_refuses(redis_url: str, role: str) -> None:
    """So that the router does not count it as a try; what was begun and given up counts."""
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        f.decode[0].runner.hold_after(4)
        sampling = Sampling(temperature=0.0, max_tokens=400, ignore_eos=True)
        worker = f.prefill[0] if role == "prefill" else f.decode[0]
        running = f.router.generate(f.decode[0].me, "running", prompt_of(30), sampling)
        await running.until(lambda r: bool(r.tokens))
        worker.started.role.begin_drain()
        if role == "prefill":
            refused = f.router.prefill(worker.me, f.decode[0].me, "new", prompt_of(31), sampling)
        else:
            refused = f.router.generate(worker.me, "new", prompt_of(31), sampling)
            worker.started.role.abandon("the worker shut down")
            assert (await running.finished()).failed and not running.refused
        assert (await refused.finished()).failed and refused.refused


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_begins_to_drain_tells_the_routers_at_once(redis_url: str, role: str) -> None:
    """Else they would send it requests until their next question, and it would refuse every attempt."""
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        worker = f.prefill[0] if role == "prefill" else f.decode[0]
        reports: list[Status] = []

        def on_event(event: LinkEvent) -> None:
            if isinstance(event, Delivered) and isinstance(event.body, Status):
                reports.append(event.body)

        router = Messenger("asking-router", on_event, settings=LinkSettings(0.1, 2.0))
        router.start()
        router.send(worker.me, StatusQuery(query=1))
        await until(lambda: reports)
        worker.shell.on_signal()
        await until(lambda: len(reports) >= 2)
        router.close(0)
        assert [report.draining for report in reports] == [False, True]


@pytest.mark.parametrize("is_alike", [True, False])
async def test_decode_reuses_blocks_of_prefill_for_its_own_prompts_if_both_round_alike(
    redis_url: str, is_alike: bool
) -> None:
    runners = [HashRunner(numerics="amx"), HashRunner(numerics="amx" if is_alike else "avx")]
    async with fleet(redis_url, runners[:1], runners[1:]) as f:
        prompt = prompt_of(100)
        for name, num_cached in (("first", 0), ("second", 6)):
            got = await f.router.prefill(f.prefill[0].me, f.decode[0].me, name, prompt, GREEDY).finished()
            assert got.usage is not None and got.usage.cached_blocks == num_cached
        for name, num_cached in (("alone", 6 if is_alike else 0), ("alone again", 6)):
            got = await f.router.generate(f.decode[0].me, name, prompt, GREEDY).finished()
            assert got.output == expected_tokens(prompt, GREEDY, 512)
            assert got.usage is not None and got.usage.cached_blocks == num_cached
        await f.until_clean()
