"""The sequences of one request are sent in slices of the event loop, and anything may happen in between."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvrelay.protocol.messages import AnyBody, PeerRef, Prefill, Reserve
from kvrelay_router import loop_share
from kvrelay_router.dispatch.interface import RequestFailed
from tests.component.dispatch.fake_workers import FakeDecode, true_tokens
from tests.component.dispatch.rig import Rig, pair, read, two_pairs
from tests.fakes.waiting import PATIENCE_S, until

NUM_SEQUENCES = 5


@pytest.fixture(autouse=True)
def one_in_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_share, "SLICE_S", -1.0)


def num_placed(rig: Rig, request_id: str) -> int:
    return sum(bool(each["attempts"]) for each in rig.dispatcher.recent_request(request_id)["sequences"])  # type: ignore[index]


async def placed_per_turn(rig: Rig, request_id: str) -> list[int]:
    """The number of placed sequences after each turn of the event loop that placed some, until all are."""
    seen = [num_placed(rig, request_id)]
    async with asyncio.timeout(PATIENCE_S):
        while seen[-1] < NUM_SEQUENCES:
            await asyncio.sleep(0)
            if (now := num_placed(rig, request_id)) > seen[-1]:
                seen.append(now)
    return seen[1:]


async def test_all_sequences_are_sent_to_the_same_workers(rig: Rig) -> None:
    await rig.start(*two_pairs())
    handle = rig.submit(num_sequences=NUM_SEQUENCES)
    assert num_placed(rig, handle.request.request_id) == 1
    assert await read(handle) == {sequence: true_tokens(sequence, 6) for sequence in range(NUM_SEQUENCES)}
    prefill_of = [name for name, worker in rig.workers.items() for _ in worker.got(Prefill)]
    assert len(prefill_of) == NUM_SEQUENCES and len(set(prefill_of)) == 1
    await rig.nothing_is_left()


async def test_nothing_is_sent_after_a_cancel(rig: Rig) -> None:
    prefill, decode = pair()
    await rig.start(prefill, decode)
    gate = prefill.hold("start")
    handle = rig.submit(num_sequences=NUM_SEQUENCES)
    handle.cancel()
    following = rig.submit()
    gate.open.set()
    assert await read(following) == {0: true_tokens(0, 6)}
    keys = {key for key, _ in prefill.got(Prefill) if key[0] == handle.request.request_id}
    assert {sequence for _, _, sequence in keys} <= {0}
    await rig.nothing_is_left()


async def test_a_worker_lost_in_between_gets_no_more(rig: Rig) -> None:
    await rig.start(*two_pairs())
    handle = rig.submit(num_sequences=NUM_SEQUENCES)
    first = handle.served_by.decode
    lost = rig.workers[str(first)].messenger.me
    rig.dispatcher.view.lost(lost, "cut off", time.monotonic())
    num_waiting = await placed_per_turn(rig, handle.request.request_id)
    assert num_waiting == list(range(2, NUM_SEQUENCES + 1))  # one after another, as before
    assert await read(handle) == {sequence: true_tokens(sequence, 6) for sequence in range(NUM_SEQUENCES)}
    assert handle.served_by.decode != first
    decode_of = {name for name, worker in rig.workers.items() if worker.got(Reserve)}
    assert len(decode_of) == 2  # that of the first sequence, and one for all others
    await rig.nothing_is_left()


async def test_sequences_wait_if_the_only_worker_is_lost_in_between(rig: Rig) -> None:
    prefill, decode = pair()
    await rig.start(prefill, decode)
    handle = rig.submit(num_sequences=NUM_SEQUENCES)
    decode.kill()
    rig.dispatcher.view.lost(decode.messenger.me, "killed", time.monotonic())
    await until(lambda: handle.awaits_worker)
    rig.add(FakeDecode("d1"))
    assert await read(handle) == {sequence: true_tokens(sequence, 6) for sequence in range(NUM_SEQUENCES)}
    await rig.nothing_is_left()


async def test_a_failure_in_a_later_slice_fails_the_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:

    prefill, decode = pair()
    await rig.start(prefill, decode)
    send = rig.dispatcher.messenger.send

    def failing(peer: PeerRef, body: AnyBody, **options: Any) -> None:
        if isinstance(body, Prefill) and options["sequence"] == 2:
            raise RuntimeError("no memory")
        send(peer, body, **options)

    monkeypatch.setattr(rig.dispatcher._driver, "_send", failing)
    with pytest.raises(RequestFailed, match="no memory"):
        await read(rig.submit(num_sequences=NUM_SEQUENCES))
    await rig.nothing_is_left()
