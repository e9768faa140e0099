"""What the router knows of its fleet: readiness, live answers, a registry that is away, peers of another version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
import zmq.asyncio

from kvrelay.fleet import WorkerRecord
from kvrelay.protocol import codec
from kvrelay.protocol.messages import AnyBody, Header, Reject, TokenBatch
from kvrelay_router.dispatch.interface import NoWorkerReady
from tests.component.dispatch.fake_workers import FakeDecode, FakePrefill, true_tokens
from tests.component.dispatch.rig import Rig, pair, read, two_pairs
from tests.fakes.waiting import PATIENCE_S, until


async def test_a_router_is_ready_with_its_first_decode_worker(rig: Rig) -> None:
    await rig.start(max_wait_for_worker_s=0)
    assert not rig.dispatcher.ready()
    assert rig.dispatcher.limits() is None
    with pytest.raises(NoWorkerReady, match="no worker is ready"):
        rig.submit()
    rig.add(FakePrefill("p0", max_model_len=100))
    await until(lambda: rig.states() == {"p0": "ready"})
    assert not rig.dispatcher.ready()
    with pytest.raises(NoWorkerReady, match="no decode worker is ready"):
        rig.submit()
    rig.add(FakeDecode("d0"))
    await until(rig.dispatcher.ready)
    limits = rig.dispatcher.limits()
    assert limits is not None and limits.max_model_len == 100
    assert await read(rig.submit()) == {0: true_tokens(0, 6)}


async def test_the_fleet_is_asked_live_and_says_who_did_not_answer(rig: Rig) -> None:
    await rig.start(*two_pairs())
    rig.workers["d1"].tells_status = False
    fleet = await rig.dispatcher.fleet()
    workers = {worker["worker_id"]: worker for worker in fleet["workers"]}
    assert {name: worker["live"] for name, worker in workers.items()} == {
        "p0": True,
        "p1": True,
        "d0": True,
        "d1": False,
    }
    assert workers["p0"]["blocks"]["total"] == 100
    assert (workers["d0"]["state"], workers["d1"]["state"]) == ("ready", "silent") and workers["d1"]["age_s"] >= 0.5
    assert [worker["role"] for worker in fleet["workers"]] == ["prefill", "prefill", "decode", "decode"]


async def test_the_registry_may_be_away(rig: Rig) -> None:
    await rig.start(*pair())
    rig.registry_is_away = True
    await until(lambda: rig.dispatcher.watch.registry_is_away != "")
    assert await read(rig.submit()) == {0: true_tokens(0, 6)}
    rig.add(FakeDecode("d1"))
    rig.registry_is_away = False
    await until(lambda: rig.states() == {"p0": "ready", "d0": "ready", "d1": "ready"})
    assert (await rig.dispatcher.fleet())["router"]["registry"] == "ok"


async def test_workers_of_another_model_under_the_same_name_are_not_used(rig: Rig) -> None:
    """As with two fleets on one prefix of Redis."""
    own, others = pair(), [FakePrefill("p1"), FakeDecode("d1")]
    for worker in (*own, *others):
        worker.tokenizer = "own" if worker in own else "other"
    await rig.start(*own, tokenizer="own")
    for worker in others:
        rig.add(worker)
    states = {"p0": "ready", "d0": "ready", "p1": "incompatible", "d1": "incompatible"}
    await until(lambda: rig.states() == states)
    for _ in range(4):
        assert await read(rig.submit()) == {0: true_tokens(0, 6)}
    assert not others[0].received and not others[1].received
    workers = {worker["worker_id"]: worker for worker in (await rig.dispatcher.fleet())["workers"]}
    assert "redis_prefix" in workers["d1"]["reason"] and not workers["d0"]["reason"]
    own[1].kill()
    await until(lambda: not rig.dispatcher.ready())


async def test_a_draining_worker_gets_nothing_new(rig: Rig) -> None:
    await rig.start(FakePrefill("p0"), FakeDecode("d0"), FakeDecode("d1"))
    rig.workers["d0"].draining = True
    await until(lambda: rig.states()["d0"] == "draining")
    handles = [rig.submit() for _ in range(4)]
    for handle in handles:
        await read(handle)
    assert {handle.served_by.decode for handle in handles} == {"d1"}


async def test_a_damaged_message_costs_an_attempt_and_not_the_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.start(*pair())
    decode_body = codec.decode_body
    damaged: list[TokenBatch] = []

    def decode_all_but_one(frames: Sequence[codec.Frame]) -> AnyBody:
        body = decode_body(frames)
        if isinstance(body, TokenBatch) and not damaged:
            damaged.append(body)
            raise codec.MalformedMessage("damaged")
        return body

    monkeypatch.setattr(codec, "decode_body", decode_all_but_one)
    assert await read(rig.submit()) == {0: true_tokens(0, 6)}
    assert damaged
    await until(lambda: rig.states() == {"p0": "ready", "d0": "ready"})


async def test_a_worker_that_is_silent_for_a_while_comes_back(rig: Rig) -> None:
    prefill, decode = pair()
    await rig.start(prefill, decode)
    rig.dispatcher.view.lost(decode.messenger.me, "silent", asyncio.get_running_loop().time())
    assert not rig.dispatcher.ready()
    await until(rig.dispatcher.ready)
    assert await read(rig.submit()) == {0: true_tokens(0, 6)}


async def test_a_peer_that_refuses_is_shown_as_incompatible_and_not_used(rig: Rig) -> None:
    await rig.start(*pair())
    context = zmq.asyncio.Context()
    inbox = context.socket(zmq.PULL)
    port = inbox.bind_to_random_port("tcp://127.0.0.1")
    refusing = _RefusingWorker(port)
    rig.workers["old"] = refusing
    task = asyncio.create_task(_refuse_all(context, inbox, refusing.record))
    try:
        await until(lambda: rig.states().get("old") == "incompatible")
        for _ in range(4):
            assert await read(rig.submit()) == {0: true_tokens(0, 6)}
        shown = {worker["worker_id"]: worker for worker in (await rig.dispatcher.fleet())["workers"]}
        assert shown["old"]["reason"] == "speaks protocol version 9"
    finally:
        task.cancel()
        context.destroy(linger=0)


class _RefusingWorker(FakeDecode):
    """Registered, but its inbox is another's."""

    def __init__(self, port: int) -> None:
        super().__init__("old")
        self._port = port

    @property
    def record(self) -> WorkerRecord:
        return msgspec.structs.replace(super().record, address=f"tcp://127.0.0.1:{self._port}", protocol_version=9)


async def _refuse_all(context: zmq.asyncio.Context, inbox: zmq.asyncio.Socket, worker: WorkerRecord) -> None:
    while True:
        header = codec.decode_header(await inbox.recv_multipart())
        answer = Header(
            sender=worker.worker_id,
            incarnation=worker.incarnation,
            reply_to=worker.address,
            to_incarnation=header.incarnation,
            link=0,
            to_link=header.link,
        )
        outbox = context.socket(zmq.PUSH)
        outbox.connect(header.reply_to)
        reject = Reject(code="version", reason="speaks protocol version 9")
        await outbox.send_multipart(codec.encode(answer, reject))
        outbox.close(linger=500)


@pytest.fixture
async def routers() -> AsyncIterator[tuple[Rig, Rig]]:
    """The older and the newer one, with the same workers. The newer one has not started."""
    older, newer = Rig(), Rig()
    await older.start(*pair())
    newer.workers = older.workers
    yield older, newer
    await newer.dispatcher.close()
    await older.close()


async def test_the_older_of_two_routers_with_one_id_waits_and_goes_on(routers: tuple[Rig, Rig]) -> None:
    older, newer = routers
    assert await read(older.submit()) == {0: true_tokens(0, 6)}
    gate = older.workers["d0"].hold("token 3")
    waiting = asyncio.create_task(read(older.submit(timeout_s=4 * PATIENCE_S)))
    await asyncio.wait_for(gate.reached.wait(), PATIENCE_S)
    del older.workers["d0"].gates["token 3"]
    await newer.start()
    assert await read(newer.submit()) == {0: true_tokens(0, 6)}
    gate.open.set()
    await until(lambda: set(older.states().values()) == {"lost"})
    assert await read(newer.submit(num_sequences=2)) == {0: true_tokens(0, 6), 1: true_tokens(1, 6)}
    assert set(newer.states().values()) == {"ready"}
    await newer.dispatcher.close()
    assert await waiting == {0: true_tokens(0, 6)}
    await until(lambda: set(older.states().values()) == {"ready"})
    await older.nothing_is_left()
