"""Real services with the hash model whose blocks travel by NIXL: every token proves that the right blocks were read."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest

from kvrelay.handoff.quarantine import SETTLE_TICKS, Due
from kvrelay.process_identity import identity_of
from kvrelay.protocol.messages import Reassign
from kvrelay.protocol.sampling import Sampling
from kvrelay.worker import startup
from kvrelay_decode import incoming_handoffs
from kvrelay_decode.service import DecodeRole
from kvrelay_prefill import outgoing_handoffs
from kvrelay_prefill.service import PrefillRole
from tests.component.transfer.transports import NO_NIXL
from tests.component.workers.rig import Fleet, fleet, prompt_of
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import until
from tests.fakes.workers import LocalWorker

pytestmark = [pytest.mark.component, pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)]
GREEDY = Sampling(temperature=0.0, max_tokens=24)
ELSEWHERE = "another-machine:pid:[1]/1/1"


@contextmanager
def sleeping_processes(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        processes = [stack.enter_context(subprocess.Popen(command)) for _ in range(number)]
        for process in processes:
            stack.callback(process.kill)
        yield processes


async def until_reserved(f: Fleet) -> None:
    await until(lambda: f.decode[0].blocks["reserved"])


@pytest.mark.parametrize("length", [1, 16, 17, 200, 480])
async def test_a_prompt_of_any_length_is_handed_over(redis_url: str, length: int) -> None:
    async with fleet(redis_url, [HashRunner()], [HashRunner()], token_budget=64, max_running=16, transfer="nixl") as f:
        prompt = prompt_of(length)
        got = await f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, GREEDY).finished()
        assert got.output == expected_tokens(prompt, GREEDY, 512)
        await f.until_clean()


@pytest.mark.parametrize(
    ("prefill", "decode", "taken"), [("auto", "auto", "nixl"), ("auto", "zmq", "zmq"), ("zmq", "auto", "zmq")]
)
async def test_a_pair_takes_nixl_when_both_have_it_and_says_so_once(
    redis_url: str, prefill: str, decode: str, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [LocalWorker(redis_url, "prefill", HashRunner(), transfer=prefill)]
    workers += [LocalWorker(redis_url, "decode", HashRunner(), transfer=decode)]
    with caplog.at_level("INFO", logger=incoming_handoffs.__name__):
        async with fleet(redis_url, [], []) as f:
            for worker in workers:
                await worker.start()
            f.prefill.append(workers[0])
            f.decode.append(workers[1])
            for name in ("a", "b"):
                got = await f.router.prefill(workers[0].me, workers[1].me, name, prompt_of(50), GREEDY).finished()
                assert got.output == expected_tokens(prompt_of(50), GREEDY, 512)
            await f.until_clean()
    said = [record.getMessage() for record in caplog.records if "come by" in record.getMessage()]
    assert len(said) == 1
    assert f"come by {taken}:" in said[0]


@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_slots_of_a_silent_prefill_worker_stay_in_quarantine_until_its_processes_have_ended(
    redis_url: str, num_ranks: int
) -> None:
    runners = [HashRunner(), HashRunner()]
    runners[0].hold_after(4)
    settings = {"token_budget": 16, "max_running": 16, "transfer": "nixl"}
    with sleeping_processes(num_ranks) as processes:
        async with fleet(redis_url, runners[:1], runners[1:], **settings) as f:
            role = f.prefill[0].started.role
            assert isinstance(role, PrefillRole)
            role._outgoing._processes = [identity_of(process.pid) for process in processes]
            f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(400), GREEDY)
            await until_reserved(f)
            f.prefill.pop().die()
            decode = f.decode[0]
            await until(lambda: decode.started.role.queues()["sender_lost"])
            for process in processes:
                await asyncio.sleep(1.5)
                assert decode.blocks["quarantined"] == 25
                process.kill()
            await f.until_clean()


@asynccontextmanager
async def successor_speaks(redis_url: str) -> AsyncIterator[LocalWorker]:
    """A prefill worker falls silent in the middle of a handoff, and a second one is started under its name. The
    registry must take both for processes elsewhere: then the name is free when the first one's lease expires."""
    runners = [HashRunner(), HashRunner()]
    runners[0].hold_after(4)
    settings = {"token_budget": 16, "max_running": 16, "transfer": "nixl"}
    async with fleet(redis_url, [], runners[1:], **settings) as f:
        old = LocalWorker(redis_url, "prefill", runners[0], worker_id="p", **settings)
        await old.start()
        f.router.prefill(old.me, f.decode[0].me, "a", prompt_of(400), GREEDY)
        await until_reserved(f)
        old.die()
        new = LocalWorker(redis_url, "prefill", HashRunner(), worker_id="p", **settings)
        f.prefill.append(new)
        await new.start()
        got = f.router.prefill(new.me, f.decode[0].me, "b", prompt_of(300), GREEDY)
        assert (await got.finished()).output == expected_tokens(prompt_of(300), GREEDY, 512)
        yield f.decode[0]
        await f.until_clean()


async def test_slots_of_a_silent_prefill_worker_elsewhere_are_free_when_its_successor_speaks(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "own_identity", lambda: ELSEWHERE)
    monkeypatch.setattr(outgoing_handoffs, "own_identity", lambda: ELSEWHERE)
    async with successor_speaks(redis_url) as decode:
        assert decode.started.role.totals()["quarantines"] == 1


async def test_slots_stay_in_quarantine_while_the_silent_prefill_worker_is_seen_to_live_whoever_has_its_name(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped: it may wake up in the middle of a copy."""
    num_ticks = 0
    with sleeping_processes(1) as (process,):
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(startup, "own_identity", lambda: ELSEWHERE)
        monkeypatch.setattr(outgoing_handoffs, "own_identity", lambda: identity_of(process.pid))
        async with successor_speaks(redis_url) as decode:
            role = decode.started.role
            assert isinstance(role, DecodeRole)
            quarantine = role._incoming._quarantine
            tick = quarantine.tick

            def counted(now: float) -> Due:
                nonlocal num_ticks
                num_ticks += 1
                return tick(now)

            monkeypatch.setattr(quarantine, "tick", counted)
            await until(lambda: num_ticks > 2 * SETTLE_TICKS)
            assert decode.blocks["quarantined"] == 25
            process.kill()


async def test_slots_of_a_prefill_worker_that_was_only_out_of_reach_are_free_when_it_answers(redis_url: str) -> None:
    """It did not notice, or noticed and drained with nobody to tell: it is asked again."""
    runners = [HashRunner(), HashRunner()]
    runners[0].hold_after(4)
    settings = {"token_budget": 16, "max_running": 16, "transfer": "nixl"}
    async with fleet(redis_url, runners[:1], runners[1:], **settings) as f:
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(400), GREEDY)
        await until_reserved(f)
        decode = f.decode[0]
        decode.started.role.on_peer_lost(f.prefill[0].me, "silent", replaced=False)
        assert decode.blocks["quarantined"] == 25
        await got.until(lambda r: bool(r.need_decode))
        runners[0].go_on()
        f.router.send(f.prefill[0].me, "a", Reassign(decode=None))
        await got.finished()
        await f.until_clean()
