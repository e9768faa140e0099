"""The handle: what waits is merged per sequence, errors come after the tokens, leaving early cancels."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from kvrelay.protocol.messages import SequenceUsage
from kvrelay.protocol.sampling import FinishReason, Sampling, TokenLogprobs
from kvrelay_router.dispatch.handle import RunningRequest
from kvrelay_router.dispatch.interface import GenerateRequest, RequestFailed, SequenceDelta


class Calls:
    """The dispatcher's end."""

    def __init__(self, num_sequences: int = 1) -> None:
        self.stopped: list[int] = []
        self.num_cancelled = 0
        request = GenerateRequest(request_id="r", prompt_ids=[1], sampling=Sampling(), num_sequences=num_sequences)
        self.handle = RunningRequest(request, self._stop, self._cancel)

    def _stop(self, handle: RunningRequest, sequence: int) -> None:
        self.stopped.append(sequence)
        handle.finish(sequence)

    def _cancel(self, handle: RunningRequest) -> None:
        self.num_cancelled += 1
        handle.fail(RequestFailed("cancelled"))


async def test_what_waits_comes_at_once_merged_per_sequence() -> None:
    calls = Calls(num_sequences=2)
    usage = SequenceUsage(prompt_blocks=1)
    logprobs = [TokenLogprobs(token, -0.5, [], []) for token in (1, 2)]
    calls.handle.deliver(SequenceDelta(0, [1], logprobs[:1], cached_tokens=3))
    calls.handle.deliver(SequenceDelta(1, [7], finish=FinishReason.LENGTH))
    calls.handle.deliver(SequenceDelta(0, [2], logprobs[1:], finish=FinishReason.STOP_TOKEN, usage=usage))
    calls.handle.finish(0)
    calls.handle.finish(1)
    batches = [batch async for batch in calls.handle.deltas()]
    assert batches == [
        [
            SequenceDelta(0, [1, 2], logprobs, [], 3, FinishReason.STOP_TOKEN, usage),
            SequenceDelta(1, [7], finish=FinishReason.LENGTH),
        ]
    ]
    assert calls.num_cancelled == 0


async def test_tokens_come_before_the_error() -> None:
    calls = Calls()
    calls.handle.deliver(SequenceDelta(0, [1]))
    calls.handle.fail(RequestFailed("broken", timed_out=True))
    deltas = calls.handle.deltas()
    assert await anext(deltas) == [SequenceDelta(0, [1])]
    with pytest.raises(RequestFailed, match="broken") as failure:
        await anext(deltas)
    assert failure.value.timed_out


async def test_a_waiting_reader_wakes_up() -> None:
    calls = Calls()

    async def read() -> list[list[SequenceDelta]]:
        return [batch async for batch in calls.handle.deltas()]

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    calls.handle.deliver(SequenceDelta(0, [1]))
    await asyncio.sleep(0.01)
    calls.handle.deliver(SequenceDelta(0, [2], finish=FinishReason.LENGTH))
    calls.handle.finish(0)
    assert len(await reader) == 2


async def test_leaving_early_cancels_once() -> None:
    calls = Calls()
    calls.handle.deliver(SequenceDelta(0, [1]))
    async with aclosing(calls.handle.deltas()) as deltas:
        await anext(deltas)
    calls.handle.cancel()
    assert calls.num_cancelled == 1


async def test_stop_drops_what_waits_of_that_sequence_only() -> None:
    calls = Calls(num_sequences=2)
    calls.handle.deliver(SequenceDelta(0, [1]))
    calls.handle.deliver(SequenceDelta(1, [2], finish=FinishReason.LENGTH))
    calls.handle.finish(1)
    calls.handle.stop(0)
    assert [batch async for batch in calls.handle.deltas()] == [[SequenceDelta(1, [2], finish=FinishReason.LENGTH)]]
    calls.handle.stop(0)
    assert calls.stopped == [0]


async def test_after_the_end_nothing_is_cancelled() -> None:
    calls = Calls()
    calls.handle.finish(0)
    calls.handle.cancel()
    calls.handle.fail(RequestFailed("too late"))
    assert [batch async for batch in calls.handle.deltas()] == []
    assert calls.num_cancelled == 0
