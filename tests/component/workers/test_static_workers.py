"""A fleet without any Redis: real workers with their pages, and a router's dispatcher with their addresses."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrelay.fleet.worker_record import RECORD_PAGE
from kvrelay.messaging.messenger import Messenger
from kvrelay.ports import HeldPort
from kvrelay.protocol.link import LinkEvent, LinkSettings
from kvrelay.protocol.sampling import Sampling
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import DispatchSettings, GenerateRequest
from kvrelay_router.dispatch.running_request import RunningRequest
from kvrelay_router.fleet.watch import StaticWorkers
from tests.component.workers.rig import prompt_of, run
from tests.fakes.delta_reader import read_batches
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import PATIENCE_S, until
from tests.fakes.workers import LocalWorker

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = prompt_of(100)
_numbers = itertools.count()


async def begin(role: str, held: HeldPort) -> LocalWorker:
    """Also again, behind the same port."""
    worker = LocalWorker("none", role, HashRunner(), worker_id=f"{role}-0", http_port=held.port)
    await worker.start()
    return worker


@asynccontextmanager
async def routed(held: list[HeldPort]) -> AsyncIterator[RouterDispatcher]:
    def open_messenger(on_event: Callable[[LinkEvent], None]) -> Messenger:
        return Messenger("router", on_event, settings=LinkSettings(0.1, 2.0))

    static = StaticWorkers([f"http://127.0.0.1:{each.port}" for each in held], "hash-model", 0.05)
    settings = DispatchSettings(registry_interval_s=0.05, status_interval_s=0.2, local_prefill_tokens=0)
    dispatcher = RouterDispatcher(open_messenger, None, settings, static=static)
    dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.close()


def ready(dispatcher: RouterDispatcher) -> set[tuple[str, str]]:
    described = dispatcher.view.describe(frozenset(), time.monotonic())
    return {(each["worker_id"], each["incarnation"]) for each in described if each["state"] == "ready"}


def submit(dispatcher: RouterDispatcher) -> RunningRequest:
    request = GenerateRequest(request_id=f"r{next(_numbers)}", prompt_ids=PROMPT, sampling=GREEDY, num_sequences=1)
    return dispatcher.submit(request)


async def check_output(handle: RunningRequest) -> None:
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for deltas in read_batches(handle):
            for delta in deltas:
                tokens += delta.token_ids
    assert tokens == expected_tokens(PROMPT, GREEDY, 512)
    assert (handle.served_by.prefill, handle.served_by.decode) == ("prefill-0", "decode-0")


def names(*workers: LocalWorker) -> set[tuple[str, str]]:
    return {(worker.me.peer_id, worker.me.incarnation) for worker in workers}


def test_requests_are_handed_over_also_after_a_worker_died_and_began_again() -> None:
    async def test() -> None:
        with HeldPort() as one, HeldPort() as other:
            prefill, decode = await begin("prefill", one), await begin("decode", other)
            try:
                async with routed([one, other]) as dispatcher:
                    await until(lambda: ready(dispatcher) == names(prefill, decode))
                    await check_output(submit(dispatcher))
                    assert decode.started.role.totals()["received_blocks"] > 0
                    prefill.runner.hold_after(0)
                    running = submit(dispatcher)
                    await until(lambda: dispatcher.figures()["requests"]["running_sequences"] == 1)
                    decode.die()
                    decode = await begin("decode", other)
                    prefill.runner.go_on()
                    await check_output(running)
                    await until(lambda: ready(dispatcher) == names(prefill, decode))
                    await check_output(submit(dispatcher))
                    await until(lambda: prefill.is_clean() and decode.is_clean())
            finally:
                await prefill.stop()
                await decode.stop()

    run(test)


def test_a_worker_tells_by_its_page_who_it_is_once_it_can_serve() -> None:
    async def test() -> None:
        with HeldPort() as held:
            worker = LocalWorker("none", "decode", HashRunner(), worker_id="decode-0", http_port=held.port)
            assert worker.shell._record_page().status == 503
            await worker.start()
            try:
                assert worker.shell._readiness().status == 200
                static = StaticWorkers([f"http://127.0.0.1:{held.port}"], "hash-model", 0.05)
                static.start(lambda: None)
                await until(static.found)
                (found,) = static.found()
                assert found.record is not None
                assert (found.record.worker_id, found.record.role) == ("decode-0", "decode")
                assert (found.record.incarnation, found.record.address) == (worker.me.incarnation, worker.me.address)
                assert RECORD_PAGE == "/worker"
                await static.close()
            finally:
                await worker.stop()

    run(test)
