"""Requests over real sockets while nothing fails: the ways they take, and what is known about them afterwards."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvrelay.kv.hashing import hash_blocks
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.link import Links
from kvrelay.protocol.messages import AnyBody, Cancel, Generate, PeerRef, Prefill, SequenceUsage
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay_router.dispatch.dispatcher import LONG_PROMPT_TOKENS
from kvrelay_router.dispatch.interface import GenerateRequest, NoWorkerReady, RequestFailed
from tests.component.dispatch.fake_workers import CACHED_TOKENS, FakeDecode, FakePrefill, Key, true_tokens
from tests.component.dispatch.rig import PROMPT, Rig, pair, read, read_deltas
from tests.fakes.waiting import until


async def test_a_request_goes_through_prefill_and_decode(rig: Rig) -> None:
    await rig.start(*pair())
    handle = rig.submit(max_tokens=6)
    deltas = await read_deltas(handle)
    assert [token for delta in deltas for token in delta.token_ids] == true_tokens(0, 6)
    assert [delta.finish for delta in deltas if delta.finish is not None] == [FinishReason.LENGTH]
    assert deltas[-1].finish is FinishReason.LENGTH
    placements = (await rig.dispatcher.fleet())["placements"]
    assert placements == {"disaggregated": 1, "prefill_alone": 0, "decode_alone": 0}
    assert [delta.cached_tokens for delta in deltas if delta.cached_tokens is not None] == [CACHED_TOKENS]
    assert [delta.usage for delta in deltas if delta.usage is not None] == [
        SequenceUsage(prompt_blocks=1, received_blocks=1)
    ]
    assert (handle.served_by.prefill, handle.served_by.decode) == ("p0", "d0")
    await rig.nothing_is_left()


async def test_the_record_says_who_did_it_when_and_why(rig: Rig) -> None:
    await rig.start(*pair())
    handle = rig.submit(max_tokens=6)
    assert rig.record(handle)["state"] == "running"
    await read(handle)
    record = rig.record(handle)
    (sequence,) = record["sequences"]
    (attempt,) = sequence["attempts"]
    assert (record["state"], record["num_attempts"], record["num_prompt_tokens"]) == ("finished", 1, len(PROMPT))
    assert (attempt["prefill"], attempt["decode"], attempt["policy"]) == ("p0", "d0", "cost")
    assert all(name in " ".join(attempt["reasons"]) for name in ("p0", "d0"))
    assert (sequence["num_output_tokens"], sequence["finish"]) == (6, "length")
    assert (sequence["usage"]["prompt_blocks"], sequence["usage"]["received_blocks"]) == (1, 1)
    assert 0 <= attempt["placed_ms"] <= sequence["first_token_ms"] <= sequence["finished_ms"]
    assert rig.dispatcher.recent_request("unknown") is None


async def test_without_prefill_decode_works_alone_and_the_fleet_says_so(rig: Rig) -> None:
    decode = FakeDecode("d0")
    await rig.start(decode)
    handle = rig.submit(max_tokens=6)
    assert await read(handle) == {0: true_tokens(0, 6)}
    assert (handle.served_by.prefill, handle.served_by.decode) == (None, "d0")
    assert len(decode.got(Generate)) == 1
    fallback = (await rig.dispatcher.fleet())["fallback"]
    assert (fallback["decode_alone_requests"], fallback["active"]) == (1, True)
    rig.add(FakePrefill("p0"))
    await until(lambda: rig.states().get("p0") == "ready")
    await read(rig.submit())
    assert (await rig.dispatcher.fleet())["fallback"]["active"] is False


async def test_short_prompts_go_to_decode_alone_where_that_is_wanted(rig: Rig) -> None:
    prefill, decode = pair()
    await rig.start(prefill, decode, local_prefill_tokens=len(PROMPT))
    assert await read(rig.submit()) == {0: true_tokens(0, 6)}
    assert prefill.received == []
    fleet = await rig.dispatcher.fleet()
    assert fleet["fallback"]["decode_alone_requests"] == 0
    assert fleet["placements"] == {"disaggregated": 0, "prefill_alone": 0, "decode_alone": 1}


async def test_stop_ends_a_sequence_on_both_workers_and_drops_its_later_tokens(rig: Rig) -> None:
    prefill, decode = pair()
    gate = decode.hold("token 3")
    await rig.start(prefill, decode)
    handle = rig.submit(max_tokens=50, num_sequences=2)
    await gate.reached.wait()
    handle.stop(0)
    gate.open.set()
    tokens = await read(handle)
    assert tokens.get(0, []) == true_tokens(0, len(tokens.get(0, [])))
    assert len(tokens.get(0, [])) <= 3
    assert tokens[1] == true_tokens(1, 50)
    await until(lambda: len(prefill.got(Cancel)) == len(decode.got(Cancel)) == 1)
    assert rig.record(handle)["sequences"][0]["finish"] == "stop_string"
    await rig.nothing_is_left()


@pytest.mark.parametrize(
    ("worker", "point"),
    [("p0", "start"), ("p0", "first token"), ("p0", "handoff"), ("d0", "reserve"), ("d0", "commit"), ("d0", "token 3")],
)
async def test_cancel_reaches_both_workers_wherever_the_request_is(rig: Rig, worker: str, point: str) -> None:
    prefill, decode = pair()
    await rig.start(prefill, decode)
    gate = rig.workers[worker].hold(point)
    handle = rig.submit(num_sequences=2)
    await gate.reached.wait()
    handle.cancel()
    handle.cancel()
    with pytest.raises(RequestFailed):
        await read(handle)
    await until(lambda: len(prefill.got(Cancel)) == len(decode.got(Cancel)) == 2)
    await rig.nothing_is_left()
    assert rig.record(handle)["state"] == "cancelled"


async def test_the_deadline_cancels_and_says_so(rig: Rig) -> None:
    prefill, decode = pair()
    decode.hold("token 2")
    await rig.start(prefill, decode)
    handle = rig.submit(timeout_s=0.3)
    with pytest.raises(RequestFailed, match=r"0\.3 s") as failure:
        await read(handle)
    assert failure.value.kind is FailureKind.DEADLINE
    await until(lambda: len(prefill.got(Cancel)) == len(decode.got(Cancel)) == 1)
    await rig.nothing_is_left()
    assert rig.record(handle)["state"] == "timed_out"


async def test_a_prompt_carries_what_is_left_of_its_time(rig: Rig) -> None:
    prefill, decode = pair()
    await rig.start(prefill, decode)
    before = time.monotonic()
    await read(rig.submit(timeout_s=3000.0))
    ((_, body),) = prefill.got(Prefill)
    assert isinstance(body, Prefill) and 3000.0 - (time.monotonic() - before) <= body.prompt.timeout_s <= 3000.0


async def test_too_many_requests_are_refused_and_room_comes_back(rig: Rig) -> None:
    prefill, decode = pair()
    gate = prefill.hold("start")
    await rig.start(prefill, decode, max_requests=2)
    handles = [rig.submit(), rig.submit()]
    with pytest.raises(NoWorkerReady, match="overloaded") as refusal:
        rig.submit()
    assert refusal.value.retry_after_s > 0
    gate.open.set()
    for handle in handles:
        assert await read(handle) == {0: true_tokens(0, 6)}
    assert await read(rig.submit()) == {0: true_tokens(0, 6)}
    assert (await rig.dispatcher.fleet())["requests"]["refused"] == 1


async def test_a_request_id_is_good_once(rig: Rig) -> None:
    await rig.start(*pair())
    handle = rig.submit()
    with pytest.raises(ValueError, match="used already"):
        rig.dispatcher.submit(handle.request)
    assert await read(handle) == {0: true_tokens(0, 6)}


async def test_a_drain_is_told_and_takes_what_comes_on_open_connections(rig: Rig) -> None:
    prefill, decode = pair()
    gate = decode.hold("token 3")
    await rig.start(prefill, decode)
    handle = rig.submit()
    await gate.reached.wait()
    rig.dispatcher.begin_drain()
    assert not rig.dispatcher.ready()
    assert not (await rig.dispatcher.fleet())["router"]["accepting"]
    late = rig.submit()
    gate.open.set()
    assert await read(handle) == {0: true_tokens(0, 6)}
    assert await read(late) == {0: true_tokens(0, 6)}
    await rig.dispatcher.close()
    with pytest.raises(NoWorkerReady, match="shutting down"):
        rig.submit()


async def test_closing_tells_clients_and_workers(rig: Rig) -> None:
    prefill, decode = pair()
    decode.hold("token 3")
    await rig.start(prefill, decode)
    handle = rig.submit()
    await decode.gates["token 3"].reached.wait()
    await rig.dispatcher.close()
    with pytest.raises(RequestFailed, match="shutting down"):
        await read(handle)
    await until(lambda: len(prefill.got(Cancel)) == len(decode.got(Cancel)) == 1)


async def test_long_prompts_are_hashed_on_another_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.start(*pair())
    threads = []

    def noted(*arguments: Any) -> list[bytes]:
        threads.append(threading.current_thread())
        return hash_blocks(*arguments)

    monkeypatch.setattr("kvrelay_router.dispatch.placement.hash_blocks", noted)
    request = GenerateRequest(
        request_id="long", prompt_ids=[1] * (LONG_PROMPT_TOKENS + 1), sampling=Sampling(max_tokens=2)
    )
    handle = rig.dispatcher.submit(request, await rig.dispatcher.prepare(request))
    await read(handle)
    assert threads and threading.main_thread() not in threads


async def test_the_requests_of_a_session_are_found_by_its_id(rig: Rig) -> None:
    await rig.start(*pair())
    for owner, session in (("ann", "a"), ("ann", "b"), ("bob", "a"), ("ann", "a"), ("ann", "")):
        await read(rig.submit(owner=owner, session=session))
    every = rig.dispatcher.recent_requests(100)
    assert [each["session"] for each in every] == [None, "a", "a", "b", "a"]
    assert rig.dispatcher.recent_requests(100, "ann", "a") == [every[1], every[4]]
    assert rig.dispatcher.recent_requests(1, None, "a") == [every[1]]
    assert rig.dispatcher.recent_requests(100, "bob", "b") == []
    name = every[1]["request_id"]
    record, timeline = rig.dispatcher.recent_request(name), await rig.dispatcher.timeline(name)
    assert record is not None and timeline is not None
    assert record["session"] == timeline["session"] == "a"


async def test_an_owner_sees_its_own_requests_counts_and_decisions(rig: Rig) -> None:
    await rig.start(*pair())
    await read(rig.submit(owner="ann"))
    for _ in range(2):
        await read(rig.submit(owner="bob"))
    every = rig.dispatcher.recent_requests(100)
    own = rig.dispatcher.recent_requests(100, "ann")
    assert (len(every), own) == (3, every[2:])
    assert rig.dispatcher.recent_requests(1, "ann") == own
    name = own[0]["request_id"]
    assert rig.dispatcher.recent_request(name, "bob") is None
    assert await rig.dispatcher.timeline(name, "bob") is None
    assert rig.dispatcher.recent_request(name, "ann") == rig.dispatcher.recent_request(name) is not None
    timeline = await rig.dispatcher.timeline(name, "ann")
    assert timeline is not None and timeline["request_id"] == name
    for owner, num_requests in (("ann", 1), ("bob", 2), (None, 3), ("nobody", 0)):
        fleet = await rig.dispatcher.fleet(owner)
        assert fleet["requests"]["finished"] == fleet["latency"]["requests"] == num_requests
        assert len(fleet["last_decisions"]) == num_requests
        assert fleet["requests"].keys() == (await rig.dispatcher.fleet())["requests"].keys()


async def test_an_owners_running_requests_are_counted(rig: Rig) -> None:
    prefill, decode = pair()
    gate = decode.hold("token 3")
    await rig.start(prefill, decode)
    handles = [rig.submit(owner="ann", num_sequences=2), rig.submit(owner="bob")]
    await gate.reached.wait()
    requests = (await rig.dispatcher.fleet("ann"))["requests"]
    assert (requests["running"], requests["running_sequences"], requests["submitted"]) == (1, 2, 1)
    gate.open.set()
    for handle in handles:
        await read(handle)


NUM_SAMPLES = 128


class SlowPrefill(FakePrefill):
    """Its event loop has little time for messages. Keeps no prompts."""

    def __init__(self, worker_id: str, delay_s: float) -> None:
        super().__init__(worker_id, max_model_len=1 << 24)
        self.delay_s = delay_s
        self.num_tokens: list[int] = []

    def on_message(self, key: Key, peer: PeerRef, body: AnyBody) -> None:
        super().on_message(key, peer, body)
        self.received.pop()
        if isinstance(body, Prefill):
            self.num_tokens.append(body.prompt.num_tokens)
            time.sleep(self.delay_s)


@pytest.mark.parametrize(
    "num_tokens",
    [100_000, pytest.param(600_000, marks=pytest.mark.slow)],
)
async def test_a_slow_worker_gets_all_samples_of_a_long_prompt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Copies of the prompt would take 51 MB, and 307 MB, of the router."""
    monkeypatch.setattr(Links, "MAX_UNTAKEN_BYTES", 16 << 20)
    prefill = SlowPrefill("p0", 0.005)
    await rig.start(prefill, FakeDecode("d0", max_model_len=1 << 24))
    handle = rig.submit(max_tokens=1, num_sequences=NUM_SAMPLES, prompt_ids=[7] * num_tokens)
    assert await read(handle) == {sequence: true_tokens(sequence, 1) for sequence in range(NUM_SAMPLES)}
    assert prefill.num_tokens == [num_tokens] * NUM_SAMPLES
    assert rig.dispatcher._driver.num_retries == 0 and not prefill.lost
    await rig.nothing_is_left()
