"""Ends that are nobody's plan: messages that cross each other, a sampler that refuses a handoff, a drain with slots
that nobody can prove safe, a dead thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import Abort, Reassign
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from tests.component.workers.rig import fleet, prompt_of
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import until
from tests.fakes.workers import LocalWorker, has_sent_all

pytestmark = pytest.mark.component
GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)


class PickyRunner(HashRunner):
    """Cannot take any sequence, as a sampler without some feature could not."""

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        raise ValueError("not with this sampler")


@pytest.mark.parametrize("length", [5, 15, 16, 100])
async def test_a_handoff_that_the_scheduler_cannot_take_goes_to_another_decode_worker(
    redis_url: str, length: int
) -> None:
    async with fleet(redis_url, [HashRunner()], [PickyRunner(), HashRunner()]) as f:
        prompt = prompt_of(length)
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, GREEDY)
        await got.until(lambda r: bool(r.need_decode))
        assert got.need_decode[0].reason == "not with this sampler"
        f.router.send(f.prefill[0].me, "a", Reassign(decode=f.decode[1].me))
        assert (await got.finished()).output == expected_tokens(prompt, GREEDY, 512)
        await f.until_clean()


async def test_what_a_refused_handoff_leaves_in_the_cache_is_true(redis_url: str) -> None:
    """The first token is appended before the scheduler says no; its K/V is not there, so its block is not published."""
    async with fleet(redis_url, [HashRunner()], [PickyRunner()]) as f:
        prompt = prompt_of(31)
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, GREEDY)
        await got.until(lambda r: bool(r.need_decode))
        assert f.decode[0].blocks["cached"] == 1
        f.router.send(f.prefill[0].me, "a", Reassign(decode=None))
        await f.until_clean()


async def test_a_drain_does_not_wait_for_slots_that_nobody_can_prove_safe(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ZmqReceiver, "is_one_sided", True)
    settings = {"token_budget": 16, "max_running": 16, "drain_timeout_s": 3600.0}
    async with fleet(redis_url, [HashRunner()], [HashRunner()], **settings) as f:
        f.prefill[0].runner.hold_after(4)
        f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(400), GREEDY)
        decode = f.decode[0]
        await until(lambda: decode.blocks["reserved"])
        f.prefill.pop().die()
        await until(lambda: decode.started.role.queues()["sender_lost"])
        assert decode.started.role.num_open == 1
        f.decode.clear()
        await decode.stop()  # this process lives on, so its end is no proof; the test's own timeout would be


async def test_a_second_signal_right_after_the_first_is_not_lost(redis_url: str) -> None:
    """Both come before the worker looks up from what it does."""
    async with fleet(redis_url, [HashRunner()], [HashRunner()], drain_timeout_s=3600.0) as f:
        f.decode[0].runner.hold_after(10)
        sampling = Sampling(temperature=0.0, max_tokens=480, ignore_eos=True)
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(20), sampling)
        await got.until(lambda r: len(r.tokens) > 3)
        f.decode[0].shell.on_signal()
        f.decode[0].shell.on_signal()
        f.decode[0].runner.go_on()
        assert (await got.finished()).failed == "the worker shut down"
        assert got.failure is FailureKind.DRAINING


async def test_a_thread_that_dies_ends_the_worker(redis_url: str) -> None:
    worker = LocalWorker(redis_url, "decode", HashRunner())
    await worker.start()
    error = RuntimeError("the socket is gone")
    context = {"message": "the thread kv-receiver ended", "exception": error, "fatal": True}
    asyncio.get_running_loop().call_exception_handler(context)
    assert worker._task is not None
    with pytest.raises(RuntimeError, match="the socket is gone"):
        await worker._task
    await worker.shell.leave()
    worker.shell.close()


CROSSED = Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)


async def test_an_abort_that_crosses_the_commit_does_not_end_a_running_request(redis_url: str) -> None:
    """Prefill gives up, as at the end of its drain, before it hears that decode has taken over."""
    async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
        f.decode[0].runner.hold_after(10)
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(30), CROSSED)
        await got.until(lambda r: len(r.tokens) > 3)
        abort = Abort(reservation="", reason="the worker shut down")
        f.prefill[0].context.messenger.send(f.decode[0].me, abort, request="a", attempt=1)
        await until(lambda: has_sent_all(f.prefill[0].context.messenger))
        f.decode[0].runner.go_on()
        assert (await got.finished()).output == expected_tokens(prompt_of(30), CROSSED, 512)
        await f.until_clean()


async def test_prompts_that_nobody_will_decode_leave_the_queue_and_the_step(redis_url: str) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()], token_budget=32, max_running=8) as f:
        f.prefill[0].runner.hold_after(0)
        computing = f.router.prefill(f.prefill[0].me, f.decode[0].me, "computing", prompt_of(400), CROSSED)
        queued = f.router.prefill(f.prefill[0].me, f.decode[0].me, "queued", prompt_of(100, 1), CROSSED)
        await until(lambda: f.prefill[0].blocks["computing"])
        f.decode.pop().die()
        await until(lambda: computing.need_decode and queued.need_decode)
        assert f.prefill[0].context.scheduler.has_work
        for name, got in (("computing", computing), ("queued", queued)):
            f.router.send(f.prefill[0].me, name, Reassign(decode=None))
            assert (await got.finished()).failed == "no decode worker is left"
            assert got.failure is FailureKind.NO_DECODE_WORKER
        f.prefill[0].runner.go_on()  # only now: they would be computed before anybody looked
        await f.until_clean()
        one = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
        after = await f.router.prefill(f.prefill[0].me, None, "after", prompt_of(20), one).finished()
        assert after.output == expected_tokens(prompt_of(20), one, 512)
        await f.until_clean()
