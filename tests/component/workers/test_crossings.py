"""Messages that cross each other: what one side gave up, the other has taken over, or has not begun."""

from __future__ import annotations

import pytest

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import Abort, Reassign
from kvrelay.protocol.sampling import Sampling
from tests.component.workers.rig import fleet, prompt_of, run
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import until
from tests.fakes.workers import has_sent_all

pytestmark = pytest.mark.component
LONG = Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)


def test_an_abort_that_crosses_the_commit_does_not_end_a_running_request(redis_url: str) -> None:
    """Prefill gives up, as at the end of its drain, before it hears that decode has taken over."""

    async def test() -> None:
        async with fleet(redis_url, [HashRunner()], [HashRunner()]) as f:
            f.decode[0].runner.hold_after(10)
            got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(30), LONG)
            await got.until(lambda r: len(r.tokens) > 3)
            abort = Abort(reservation="", reason="the worker shut down")
            f.prefill[0].context.messenger.send(f.decode[0].me, abort, request="a", attempt=1)
            await until(lambda: has_sent_all(f.prefill[0].context.messenger))
            f.decode[0].runner.go_on()
            assert (await got.finished()).output == expected_tokens(prompt_of(30), LONG, 512)
            await f.until_clean()

    run(test)


def test_prompts_that_nobody_will_decode_leave_the_queue_and_the_step(redis_url: str) -> None:
    async def test() -> None:
        async with fleet(redis_url, [HashRunner()], [HashRunner()], token_budget=32, max_running=8) as f:
            f.prefill[0].runner.hold_after(0)
            computing = f.router.prefill(f.prefill[0].me, f.decode[0].me, "computing", prompt_of(400), LONG)
            queued = f.router.prefill(f.prefill[0].me, f.decode[0].me, "queued", prompt_of(100, 1), LONG)
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

    run(test)
