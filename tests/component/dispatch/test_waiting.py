"""While no worker is ready, requests wait for one: new ones and those that lost theirs."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import PeerRef, Prompt, SequenceUsage
from kvrelay_router.dispatch.attempt_driver import PLACED_PER_TURN
from kvrelay_router.dispatch.interface import NoWorkerReady, RequestFailed, TooLate
from tests.component.dispatch.fake_workers import FakeDecode, FakePrefill, Key, true_tokens
from tests.component.dispatch.rig import Rig, pair, read
from tests.fakes.waiting import until


async def without_decode(rig: Rig, **settings: Any) -> FakePrefill:
    """The only decode worker is gone, and the router has noticed."""
    prefill, decode = pair()
    await rig.start(prefill, decode, **settings)
    decode.kill()
    await until(lambda: not rig.dispatcher.ready())
    return prefill


@pytest.mark.parametrize("max_wait_s", [0.2, 60])
async def test_limits_are_those_of_the_first_worker_that_comes(rig: Rig, max_wait_s: float) -> None:
    await rig.start(max_wait_for_worker_s=max_wait_s)
    if max_wait_s < 1:
        assert await rig.dispatcher.first_limits() is None
        return
    asking = asyncio.create_task(rig.dispatcher.first_limits())
    await asyncio.sleep(0)
    assert not asking.done()
    for worker in pair():
        rig.add(worker)
    assert (await asking) == rig.dispatcher.limits() is not None
    assert await read(rig.submit()) == {0: true_tokens(0, 6)}
    await rig.nothing_is_left()


async def test_new_requests_wait_for_a_worker(rig: Rig) -> None:
    await without_decode(rig)
    handles = [rig.submit(num_sequences=number) for number in (1, 2)]
    assert all(handle.awaits_worker for handle in handles)
    assert rig.dispatcher.limits() is not None
    rig.add(FakeDecode("d0"))
    for number, handle in enumerate(handles, 1):
        assert await read(handle) == {sequence: true_tokens(sequence, 6) for sequence in range(number)}
        assert rig.record(handle)["num_attempts"] == 1
        assert not handle.awaits_worker
    await rig.nothing_is_left()


async def test_a_new_request_waits_only_so_long(rig: Rig) -> None:
    await without_decode(rig, max_wait_for_worker_s=0.1)
    with pytest.raises(RequestFailed, match=r"no decode worker is ready, for 0.1 s") as failed:
        await read(rig.submit())
    assert failed.value.kind is FailureKind.NO_WORKER
    await rig.nothing_is_left()


async def test_the_deadline_of_a_first_token_bounds_the_wait(rig: Rig) -> None:
    await without_decode(rig, ttft_deadline_s=0.1)
    with pytest.raises(RequestFailed, match=r"no decode worker is ready, for 0.1 s"):
        await read(rig.submit())
    await rig.nothing_is_left()


async def test_a_request_whose_first_token_is_expected_too_late_is_refused(rig: Rig) -> None:
    workers = pair()
    for worker in workers:
        worker.step_cost = (5.0, 0.0, 0.0)
    await rig.start(*workers, ttft_deadline_s=1.0)
    view = rig.dispatcher.view
    await until(lambda: all(each.step_cost for each in view.candidates(time.monotonic()).prefill))
    with pytest.raises(TooLate):
        rig.submit()
    await rig.nothing_is_left()


async def test_without_a_wait_new_requests_are_refused(rig: Rig) -> None:
    await without_decode(rig, max_wait_for_worker_s=0)
    with pytest.raises(NoWorkerReady, match="no decode worker is ready"):
        rig.submit()
    await rig.nothing_is_left()


async def test_a_waiting_request_keeps_its_deadline(rig: Rig) -> None:
    await without_decode(rig)
    with pytest.raises(RequestFailed, match="did not finish within") as failed:
        await read(rig.submit(timeout_s=0.1))
    assert failed.value.kind is FailureKind.DEADLINE
    await rig.nothing_is_left()


async def test_a_client_that_leaves_while_its_request_waits_leaves_nothing(rig: Rig) -> None:
    await without_decode(rig)
    handle = rig.submit(num_sequences=3)
    assert len(rig.dispatcher._driver.waits) == 3
    handle.cancel()
    assert len(rig.dispatcher._driver.waits) == 0
    await rig.nothing_is_left()


async def test_no_more_requests_wait_than_may_be_in_progress(rig: Rig) -> None:
    await without_decode(rig, max_requests=2)
    handles = [rig.submit(), rig.submit()]
    with pytest.raises(NoWorkerReady, match="overloaded"):
        rig.submit()
    for handle in handles:
        handle.cancel()
    await rig.nothing_is_left()


async def test_many_that_wait_are_placed_in_turns_of_the_event_loop(rig: Rig) -> None:
    await without_decode(rig)
    handles = [rig.submit(max_tokens=2) for _ in range(5 * PLACED_PER_TURN)]
    placed_at: list[int] = []
    turns = itertools.count()
    place = rig.dispatcher._driver.place

    def count(*args: object) -> None:
        placed_at.append(turn)
        place(*args)  # type: ignore[arg-type]

    rig.dispatcher._driver.place = count  # type: ignore[method-assign, assignment]
    rig.add(FakeDecode("d0"))
    while len(placed_at) < len(handles):
        turn = next(turns)
        await asyncio.sleep(0)
    assert max(placed_at.count(each) for each in placed_at) <= PLACED_PER_TURN
    for handle in handles:
        assert await read(handle) == {0: true_tokens(0, 2)}
    await rig.nothing_is_left()


class FragileDecode(FakeDecode):
    """Dies of one request as soon as it runs it."""

    deadly = ""

    async def _stream(self, key: Key, router: PeerRef, prompt: Prompt, usage: SequenceUsage) -> None:
        if key[0] == self.deadly:
            asyncio.get_running_loop().call_soon(self.kill)
            await asyncio.Event().wait()
        await super()._stream(key, router, prompt, usage)


async def test_a_worker_that_dies_with_several_requests_costs_none_of_them_an_attempt(rig: Rig) -> None:
    prefill, decode = pair()
    gate = decode.hold("token 1")
    await rig.start(prefill, decode, max_attempts=1)
    handles = [rig.submit() for _ in range(3)]
    await gate.reached.wait()
    await until(lambda: all(handle.served_by.decode for handle in handles))
    decode.kill()
    rig.add(FakeDecode("d0"))
    for handle in handles:
        assert await read(handle) == {0: true_tokens(0, 6)}
    await rig.nothing_is_left()


async def test_of_several_requests_the_one_that_kills_workers_fails_alone(rig: Rig) -> None:
    """Each attempt is made beside others at first. Later it is the only one that is not proven."""
    prefill, decode = FakePrefill("p0"), FragileDecode("d0")
    start = prefill.hold("start")
    await rig.start(prefill, decode, max_attempts=2)
    handles = [rig.submit(max_tokens=40) for _ in range(4)]
    FragileDecode.deadly = handles[1].request.request_id
    num_deaths = 0

    async def supervise() -> None:
        nonlocal num_deaths
        while True:
            await until(lambda: rig.workers["d0"].dead)
            num_deaths += 1
            rig.add(FragileDecode("d0"))

    supervisor = asyncio.create_task(supervise())
    start.open.set()
    try:
        for handle in handles[:1] + handles[2:]:
            assert await read(handle) == {0: true_tokens(0, 40)}
        with pytest.raises(RequestFailed) as failed:
            await read(handles[1])
        assert failed.value.kind is FailureKind.WORKER_LOST
    finally:
        supervisor.cancel()
    assert num_deaths <= 4, "twice max_attempts"
    await rig.nothing_is_left()


async def test_an_attempt_that_went_to_a_dead_worker_does_not_count(rig: Rig) -> None:
    """The link reports the death only later. Until then the worker is the only one there is."""
    prefill, decode = pair()
    await rig.start(prefill, decode, max_attempts=1)
    decode.kill()
    await until(lambda: rig.dispatcher.messenger.silent_s(decode.messenger.me) > 0.35)
    handle = rig.submit()
    assert not handle.awaits_worker
    rig.add(FakeDecode("d0"))
    assert await read(handle) == {0: true_tokens(0, 6)}
    await rig.nothing_is_left()
