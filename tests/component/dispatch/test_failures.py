"""Workers die, refuse and fail at every moment of a request: the client gets the same tokens all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.link import PeerLost
from kvrelay.protocol.messages import Cancel, Failed, NeedDecode, Prefill
from kvrelay.protocol.sampling import Sampling
from kvrelay_router.dispatch.interface import Ending, RequestFailed
from kvrelay_router.dispatch.running_request import RunningRequest
from tests.component.dispatch.fake_workers import FakeDecode, FakePrefill, FakeWorker, true_tokens
from tests.component.dispatch.rig import PROMPT, Rig, pair, read, read_deltas, two_pairs
from tests.fakes.waiting import until

MOMENTS = [
    ("prefill", "start"),
    ("prefill", "first token"),
    ("prefill", "handoff"),
    ("decode", "reserve"),
    ("decode", "commit"),
    ("decode", "token 3"),
]


async def decode_dies(
    rig: Rig, point: str, *, max_tokens: int = 6, **settings: Any
) -> tuple[FakePrefill, RunningRequest]:
    """At this point of a request to the only pair of workers."""
    prefill, decode = pair()
    gate = decode.hold(point)
    await rig.start(prefill, decode, **settings)
    handle = rig.submit(max_tokens=max_tokens)
    await gate.reached.wait()
    decode.kill()
    return prefill, handle


@pytest.mark.everyday(6)
@pytest.mark.parametrize(("holder", "point"), MOMENTS)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_that_dies_costs_the_client_nothing(rig: Rig, victim: str, holder: str, point: str) -> None:
    await rig.start(*two_pairs())
    gates = [worker.hold(point) for worker in rig.workers.values() if worker.role == holder]
    handle = rig.submit(max_tokens=8, num_sequences=2)
    await asyncio.wait(
        [asyncio.create_task(gate.reached.wait()) for gate in gates], return_when=asyncio.FIRST_COMPLETED
    )
    name = handle.served_by.prefill if victim == "prefill" else handle.served_by.decode
    assert name is not None
    rig.workers[name].kill()
    for gate in gates:
        gate.open.set()
    assert await read(handle) == {sequence: true_tokens(sequence, 8) for sequence in range(2)}
    await rig.nothing_is_left()
    await until(lambda: name not in rig.states())


async def test_workers_that_are_lost_together_cost_one_attempt(rig: Rig) -> None:
    """A retry on one that is known to be lost would fail at once."""
    prefills, decode = [FakePrefill("p0"), FakePrefill("p1")], FakeDecode("d0")
    gates = [prefill.hold("start") for prefill in prefills]
    await rig.start(*prefills, decode)
    handle = rig.submit()
    for prefill in prefills:
        rig.dispatcher._inbox.take(PeerLost(prefill.messenger.me, "silent"))
    assert await read(handle) == {0: true_tokens(0, 6)}
    assert rig.record(handle)["num_attempts"] == 2
    for gate in gates:
        gate.open.set()
    await rig.nothing_is_left()


async def test_workers_that_gave_up_a_silent_router_one_after_the_other_cost_no_attempt(rig: Rig) -> None:
    prefills, decode = [FakePrefill("p0"), FakePrefill("p1")], FakeDecode("d0")
    gates = [prefill.hold("start") for prefill in prefills]
    await rig.start(*prefills, decode, max_attempts=1)
    handle = rig.submit()
    for attempt in (1, 2, 3):
        await until(lambda attempt=attempt: rig.record(handle)["num_attempts"] == attempt)  # type: ignore[misc]
        lost = rig.workers[str(handle.served_by.prefill)].messenger.me
        rig.dispatcher._inbox.take(PeerLost(lost, "the peer lost its link to us", is_alive=True))
    for gate in gates:
        gate.open.set()
    assert await read(handle) == {0: true_tokens(0, 6)}
    await rig.nothing_is_left()


async def test_a_client_that_leaves_in_the_pause_before_an_attempt_leaves_nothing(rig: Rig) -> None:
    prefill, decode = pair()
    gate = prefill.hold("start")
    await rig.start(prefill, decode)
    handle = rig.submit()
    rig.dispatcher._inbox.take(PeerLost(prefill.messenger.me, "the peer lost its link to us", is_alive=True))
    await asyncio.sleep(0)
    handle.cancel()
    gate.open.set()
    await rig.nothing_is_left()
    await asyncio.sleep(0.2)  # longer than the pause: nothing may be placed after it
    assert rig.record(handle)["num_attempts"] == 1


async def test_decodes_death_before_the_commit_changes_the_decode_worker_only(rig: Rig) -> None:
    prefill, first, second = FakePrefill("p0"), FakeDecode("d0"), FakeDecode("d1")
    await rig.start(prefill, first, second)
    gates = {"d0": first.hold("reserve"), "d1": second.hold("reserve")}
    handle = rig.submit()
    dying = str(handle.served_by.decode)
    await gates[dying].reached.wait()
    rig.workers[dying].kill()
    for gate in gates.values():
        gate.open.set()
    assert await read(handle) == {0: true_tokens(0, 6)}
    assert rig.record(handle)["num_attempts"] == 1
    assert len(prefill.got(Prefill)) == 1
    assert handle.served_by.decode != dying
    (attempt,) = rig.record(handle)["sequences"][0]["attempts"]
    assert {each["decode"] for each in attempt["reassigned"]} == {handle.served_by.decode}


async def test_a_resumed_attempt_carries_the_tokens_already_sent(rig: Rig) -> None:
    await rig.start(*two_pairs())
    gates = [rig.workers[name].hold("token 4") for name in ("d0", "d1")]
    handle = rig.submit(max_tokens=8)
    dying = rig.workers[str(handle.served_by.decode)]
    await dying.gates["token 4"].reached.wait()
    await until(lambda: rig.record(handle)["sequences"][0]["num_output_tokens"] == 4)
    dying.kill()
    for gate in gates:
        gate.open.set()
    assert await read(handle) == {0: true_tokens(0, 8)}
    resumed = [
        body
        for worker in rig.workers.values()
        for key, body in worker.got(Prefill)
        if isinstance(body, Prefill) and key[1] == 2
    ]
    assert [body.prompt.num_output for body in resumed] == [4]
    assert len(resumed[0].prompt.tokens) == 4 * (len(PROMPT) + 4)
    assert resumed[0].prompt.sampling.max_tokens == 8


async def test_where_no_decode_worker_takes_the_handoff_one_computes_alone(rig: Rig) -> None:
    """As while no connection between prefill and decode workers holds."""
    prefill, decode = pair()
    decode.refusal = "it cannot be reached"
    await rig.start(prefill, decode, max_attempts=2)
    handle = rig.submit()
    assert await read(handle) == {0: true_tokens(0, 6)}
    (sequence,) = rig.record(handle)["sequences"]
    assert [(each["prefill"], each["decode"]) for each in sequence["attempts"]] == [("p0", None), (None, "d0")]
    await rig.nothing_is_left()


async def test_a_request_whose_handoff_and_decode_fail_ends_after_all_attempts(rig: Rig) -> None:
    prefill, decode = pair()
    decode.refusal = "it cannot be reached"
    decode.failure = Failed(failure=FailureKind.ENGINE_ERROR, cause="a step failed", retriable=True)
    await rig.start(prefill, decode, max_attempts=2)
    handle = rig.submit()
    with pytest.raises(RequestFailed, match="a step failed"):
        await read(handle)
    assert rig.record(handle)["state"] == "failed"
    await rig.nothing_is_left()


async def test_a_failure_that_would_repeat_itself_ends_the_request_and_its_siblings(rig: Rig) -> None:
    prefill, decode = pair()
    prefill.failure = Failed(failure=FailureKind.TOO_LARGE, cause="the prompt does not fit", retriable=False)
    await rig.start(prefill, decode)
    handle = rig.submit(num_sequences=3)
    with pytest.raises(RequestFailed, match="does not fit"):
        await read(handle)
    assert len(prefill.got(Prefill)) <= 3
    await rig.nothing_is_left()


@pytest.mark.parametrize("kind", list(FailureKind))
async def test_what_a_worker_failed_for_reaches_the_client_and_the_request_page(rig: Rig, kind: FailureKind) -> None:
    prefill, decode = pair()
    prefill.failure = Failed(failure=kind, cause="in words", retriable=False)
    await rig.start(prefill, decode)
    handle = rig.submit()
    with pytest.raises(RequestFailed, match="in words") as failed:
        await read(handle)
    assert failed.value.kind is kind
    record = rig.record(handle)
    assert record["failure_kind"] == kind
    assert [(each["finish"], each["failure_kind"]) for each in record["sequences"]] == [("abort", kind)]
    assert record["state"] == ("timed_out" if kind is FailureKind.DEADLINE else "failed")
    await rig.nothing_is_left()


async def test_a_request_waits_for_a_worker_and_goes_on_where_it_stopped(rig: Rig) -> None:
    _, handle = await decode_dies(rig, "token 3", max_tokens=8)
    await until(lambda: len(rig.dispatcher._driver.waits) == 1)
    fleet = await rig.dispatcher.fleet()
    assert fleet["requests"]["sequences_waiting_for_worker"] == 1
    rig.add(FakeDecode("d9"))
    assert await read(handle) == {0: true_tokens(0, 8)}
    assert handle.served_by.decode == "d9"
    await rig.nothing_is_left()


async def test_what_was_computed_waits_for_a_decode_worker_to_come_back(rig: Rig) -> None:
    """The only one dies before it commits; its next start takes the handoff, and nothing is computed again."""
    prefill, handle = await decode_dies(rig, "commit")
    await until(lambda: len(rig.dispatcher._driver.waits) == 1)
    rig.add(FakeDecode("d0"))
    assert await read(handle) == {0: true_tokens(0, 6)}
    assert rig.record(handle)["num_attempts"] == 1
    assert len(prefill.got(Prefill)) == 1
    await rig.nothing_is_left()


async def test_waiting_for_a_decode_worker_is_bounded(rig: Rig) -> None:
    _, handle = await decode_dies(rig, "commit", max_wait_for_worker_s=0.1)
    with pytest.raises(RequestFailed, match=r"no decode worker is left.*no decode worker is ready, for 0.1 s"):
        await read(handle)
    await rig.nothing_is_left()


async def test_a_client_that_leaves_while_its_handoff_waits_leaves_nothing(rig: Rig) -> None:
    prefill, handle = await decode_dies(rig, "commit")
    await until(lambda: len(rig.dispatcher._driver.waits) == 1)
    handle.cancel()
    await until(lambda: len(rig.dispatcher._driver.waits) == 0)
    await until(lambda: bool(prefill.got(Cancel)))
    await rig.nothing_is_left()


async def test_prefill_that_dies_while_its_handoff_waits_costs_the_client_nothing(rig: Rig) -> None:
    prefill, handle = await decode_dies(rig, "commit")
    await until(lambda: len(rig.dispatcher._driver.waits) == 1)
    prefill.kill()
    await until(lambda: rig.record(handle)["num_attempts"] == 1 and not rig.states())
    rig.add(FakePrefill("p1"))
    rig.add(FakeDecode("d1"))
    assert await read(handle) == {0: true_tokens(0, 6)}
    await rig.nothing_is_left()


async def test_a_worker_replaced_behind_the_same_name_takes_over(rig: Rig) -> None:
    _, handle = await decode_dies(rig, "token 3", max_tokens=8)
    rig.add(FakeDecode("d0"))
    assert await read(handle) == {0: true_tokens(0, 8)}
    assert rig.record(handle)["num_attempts"] == 2
    await rig.nothing_is_left()


async def test_prefill_that_asks_for_a_decode_worker_after_the_end_is_told_to_let_go(rig: Rig) -> None:
    """It lost decode before it heard of the commit; the request finished all the same."""
    prefill, decode = pair()
    await rig.start(prefill, decode)
    handle = rig.submit()
    assert await read(handle) == {0: true_tokens(0, 6)}
    key = (handle.request.request_id, 1, 0)
    prefill.send(rig.dispatcher.messenger.me, key, NeedDecode(reason="d0 is lost", excluded=["d0"]))
    await until(lambda: key in [told for told, _ in prefill.got(Cancel)])
    await rig.nothing_is_left()


@pytest.mark.parametrize("num_shared", [0, 5])
@pytest.mark.parametrize("point", ["start", "first token"])
async def test_endings_of_a_prompt_are_scored_again_after_a_workers_death(
    rig: Rig, point: str, num_shared: int
) -> None:
    await rig.start(*two_pairs())
    gates = [worker.hold(point) for worker in rig.workers.values() if worker.role == "prefill"]
    prompt = PROMPT[:num_shared]
    # The last one has more scores than come with a first token.
    token_ids = [[7, 8, 9], [7], list(range(10, 110))]
    sampling = Sampling(max_tokens=0, prompt_logprobs=0, logprob_start_len=max(1, num_shared))
    endings = [Ending(each, sampling) for each in token_ids]
    handle = rig.submit(num_sequences=3, prompt_ids=prompt, endings=endings)
    await asyncio.wait(
        [asyncio.create_task(gate.reached.wait()) for gate in gates], return_when=asyncio.FIRST_COMPLETED
    )
    assert handle.served_by.prefill is not None
    rig.workers[handle.served_by.prefill].kill()
    for gate in gates:
        gate.open.set()
    scored = {
        delta.sequence: [each.token_id for each in delta.prompt_logprobs[:]] for delta in await read_deltas(handle)
    }
    assert scored == {index: each if prompt else each[1:] for index, each in enumerate(token_ids)}
    assert rig.record(handle)["num_prompt_tokens"] == num_shared + 104
    await rig.nothing_is_left()


# -- numerics ---------------------------------------------------------------------------------------------------------


def of_unlike_workers() -> list[FakeWorker]:
    decodes = [FakeDecode(f"d{number}", numerics=each) for number, each in enumerate(["avx", "amx", "amx", "avx"])]
    return [FakePrefill("p0", numerics="amx"), *decodes]


def goes_on_otherwise(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if "bits of its output may differ" in line]


async def test_samples_stay_with_workers_that_round_alike_and_the_answer_says_if_they_cannot(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await rig.start(*of_unlike_workers())
    gates = {name: rig.workers[name].hold("token 3") for name in ("d1", "d2")}
    handle = rig.submit(num_sequences=3)
    for _ in range(2):
        victim = str(handle.served_by.decode)
        await gates.pop(victim).reached.wait()
        await until(lambda: all(each["num_output_tokens"] >= 3 for each in rig.record(handle)["sequences"]))
        assert handle.served_by.numerics == ["amx"] and not goes_on_otherwise(caplog)
        rig.workers[victim].kill()
        await until(lambda victim=victim: handle.served_by.decode != victim)  # type: ignore[misc]
    assert await read(handle) == {sequence: true_tokens(sequence, 6) for sequence in range(3)}
    assert handle.served_by.numerics == ["amx", "avx"]
    for sequence in rig.record(handle)["sequences"]:
        first, *_, last = [each["numerics"] for each in sequence["attempts"]]
        assert (first, last) == (["amx"], ["amx", "avx"])
    (line,) = goes_on_otherwise(caplog)
    assert "numerics amx" in line and "with avx" in line
    await rig.nothing_is_left()


async def test_a_handoff_that_is_refused_goes_to_a_worker_that_rounds_alike_before_others(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    workers = of_unlike_workers()
    await rig.start(*workers)
    await read(first := rig.submit())
    refusing = rig.workers[str(first.served_by.decode)]
    assert isinstance(refusing, FakeDecode)
    refusing.refusal = "no"
    await read(second := rig.submit())
    await read(third := rig.submit())
    other = {"d1": "d2", "d2": "d1"}[refusing.worker_id]
    assert {second.served_by.decode, third.served_by.decode} == {other}
    assert second.served_by.numerics == third.served_by.numerics == ["amx"]
    rig.workers[other].refusal = "no"
    await read(last := rig.submit())
    assert last.served_by.decode in ("d0", "d3")
    assert last.served_by.numerics == ["amx", "avx"]
    assert len(goes_on_otherwise(caplog)) == 1
