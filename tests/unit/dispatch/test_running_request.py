"""The handle: deltas that wait are joined per sequence, errors come after the tokens; a sink gets deltas while it is
ready, in order with those that are taken."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.protocol.messages import SequenceUsage
from kvrelay.protocol.sampling import FinishReason, Sampling, ScoredText, TokenLogprobs
from kvrelay.text.choice import SequenceDelta
from kvrelay_router.dispatch.interface import GenerateRequest, RequestFailed
from kvrelay_router.dispatch.placement import PromptPrefixes
from kvrelay_router.dispatch.running_request import MAX_TAKEN_TOKENS, PushQueue, RunningRequest
from tests.fakes.delta_reader import read_batches


class Calls:
    def __init__(self, num_sequences: int = 1, pushes: PushQueue | None = None) -> None:
        self.stopped: list[int] = []
        self.num_cancelled = 0
        request = GenerateRequest(request_id="r", prompt_ids=[1], sampling=Sampling(), num_sequences=num_sequences)
        self.handle = RunningRequest(request, PromptPrefixes([1]), self._stop, self._cancel, pushes)

    def _stop(self, handle: RunningRequest, sequence: int) -> None:
        self.stopped.append(sequence)
        handle.finish(sequence)

    def _cancel(self, handle: RunningRequest) -> None:
        self.num_cancelled += 1
        handle.fail(RequestFailed("cancelled"))


class Reader:
    """A sink, and the task behind it, which may be busy with what it took."""

    def __init__(self, calls: Calls) -> None:
        self.seen: list[tuple[str, list[SequenceDelta]]] = []
        self.ready = True
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self._waiter: asyncio.Event | None = None
        self._handle = calls.handle
        self._handle.connect(self)
        self.task = asyncio.create_task(self._read())

    def can_take(self) -> bool:
        return self.ready and self._waiter is not None

    def take(self, deltas: list[SequenceDelta]) -> None:
        self.seen.append(("sink", deltas))

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.set()

    async def _read(self) -> None:
        handle = self._handle
        while True:
            if handle.has_deltas:
                batch = handle.take()
                await self.may_go_on.wait()
                self.seen.append(("task", batch))
            elif handle.error is not None:
                raise handle.error
            elif handle.is_over:
                return
            else:
                self._waiter = waiter = asyncio.Event()
                await waiter.wait()

    def tokens(self, sequence: int) -> list[int]:
        """All that was seen of a sequence, in its order."""
        deltas = [delta for _, batch in self.seen for delta in batch if delta.sequence == sequence]
        return [token for delta in deltas for token in delta.token_ids]


async def turn() -> None:
    """Everything that is due happens."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_waits_comes_at_once_merged_per_sequence() -> None:
    calls = Calls(num_sequences=2)
    usage = SequenceUsage(prompt_blocks=1)
    logprobs = [TokenLogprobs(token, -0.5, [], []) for token in (1, 2)]
    calls.handle.deliver(SequenceDelta(0, [1], logprobs[:1], cached_tokens=3))
    calls.handle.deliver(SequenceDelta(1, [7], finish=FinishReason.LENGTH))
    calls.handle.deliver(SequenceDelta(0, [2], logprobs[1:], finish=FinishReason.STOP_TOKEN, usage=usage))
    calls.handle.finish(0)
    calls.handle.finish(1)
    batches = [batch async for batch in read_batches(calls.handle)]
    assert batches == [
        [
            SequenceDelta(0, [1, 2], logprobs, (), 3, FinishReason.STOP_TOKEN, usage),
            SequenceDelta(1, [7], finish=FinishReason.LENGTH),
        ]
    ]
    assert calls.num_cancelled == 0


async def test_leaving_early_cancels_once() -> None:
    calls = Calls()
    calls.handle.deliver(SequenceDelta(0, [1]))
    async with aclosing(read_batches(calls.handle)) as deltas:
        await anext(deltas)
    calls.handle.cancel()
    assert calls.num_cancelled == 1


async def test_stop_drops_what_waits_of_that_sequence_only() -> None:
    calls = Calls(num_sequences=2)
    calls.handle.deliver(SequenceDelta(0, [1]))
    calls.handle.deliver(SequenceDelta(1, [2], finish=FinishReason.LENGTH))
    calls.handle.finish(1)
    calls.handle.stop(0)
    batches = [batch async for batch in read_batches(calls.handle)]
    assert batches == [[SequenceDelta(1, [2], finish=FinishReason.LENGTH)]]
    calls.handle.stop(0)
    assert calls.stopped == [0]


async def test_after_the_end_nothing_is_cancelled() -> None:
    calls = Calls()
    calls.handle.finish(0)
    calls.handle.cancel()
    calls.handle.fail(RequestFailed("too late"))
    assert [batch async for batch in read_batches(calls.handle)] == []
    assert calls.num_cancelled == 0


async def test_a_sink_gets_what_comes_while_the_reader_sleeps_joined_per_sequence() -> None:
    calls = Calls(num_sequences=2)
    reader = Reader(calls)
    await turn()
    calls.handle.deliver(SequenceDelta(0, [1]))
    calls.handle.deliver(SequenceDelta(1, [7]))
    calls.handle.deliver(SequenceDelta(0, [2]))
    await turn()
    assert reader.seen == [("sink", [SequenceDelta(0, [1, 2]), SequenceDelta(1, [7])])]
    calls.handle.deliver(SequenceDelta(0, [3], finish=FinishReason.LENGTH))
    calls.handle.finish(0)
    await turn()
    assert reader.seen[1:] == [("task", [SequenceDelta(0, [3], finish=FinishReason.LENGTH)])]
    assert not reader.task.done()
    calls.handle.stop(1)
    await reader.task
    assert (calls.stopped, calls.num_cancelled) == ([1], 0)


async def test_a_sink_that_was_disconnected_gets_nothing() -> None:
    calls = Calls()
    reader = Reader(calls)
    await turn()
    calls.handle.deliver(SequenceDelta(0, [1]))
    calls.handle.disconnect()
    await turn()
    assert reader.seen == []
    reader.task.cancel()


ACTIONS = st.sampled_from(["deliver 0", "deliver 1", "turn", "step", "not ready", "ready", "busy", "free", "fail"])


@given(actions=st.lists(ACTIONS, max_size=40))
def test_whoever_gets_them_tokens_come_once_and_in_order(actions: list[str]) -> None:
    async def history() -> None:
        calls = Calls(num_sequences=2)
        reader = Reader(calls)
        given: dict[int, list[int]] = {0: [], 1: []}
        for number, action in enumerate(actions):
            match action.split():
                case ["deliver", sequence] if not calls.handle.is_over:
                    given[int(sequence)].append(number)
                    calls.handle.deliver(SequenceDelta(int(sequence), [number]))
                case ["turn"]:
                    await turn()
                case ["step"]:
                    await asyncio.sleep(0)
                case ["not", "ready"]:
                    reader.ready = False
                case ["ready"]:
                    reader.ready = True
                case ["busy"]:
                    reader.may_go_on.clear()
                case ["free"]:
                    reader.may_go_on.set()
                case ["fail"]:
                    calls.handle.fail(RequestFailed("broken"))
        reader.may_go_on.set()
        if calls.handle.is_over:
            with pytest.raises(RequestFailed, match="broken"):
                await reader.task
        else:
            for each in given:
                calls.handle.finish(each)
            await reader.task
        assert {sequence: reader.tokens(sequence) for sequence in given} == given
        assert calls.num_cancelled == 0

    asyncio.run(history())


async def test_many_tokens_are_taken_a_part_at_a_time() -> None:
    calls = Calls(num_sequences=2)
    ids = list(range(3 * MAX_TAKEN_TOKENS))
    size = MAX_TAKEN_TOKENS // 2 + 1
    cuts = range(0, len(ids), size)
    for start in cuts:
        calls.handle.deliver(SequenceDelta(0, ids[start : start + size]))
    calls.handle.deliver(SequenceDelta(1, ids, finish=FinishReason.LENGTH))
    batches = []
    while calls.handle.has_deltas:
        batches.append(calls.handle.take())
    assert all(len(batch) == 1 for batch in batches)  # two of them exceed the limit, and a single one never waits
    assert [token for (delta,) in batches if delta.sequence == 0 for token in delta.token_ids] == ids
    assert batches[-1] == [SequenceDelta(1, ids, finish=FinishReason.LENGTH)]


@pytest.mark.parametrize("is_pushed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, MAX_TAKEN_TOKENS // 4, 2 * MAX_TAKEN_TOKENS])
async def test_long_texts_of_a_beam_search_are_taken_a_part_at_a_time(num_tokens: int, is_pushed: bool) -> None:
    calls = Calls()
    reader = Reader(calls) if is_pushed else None
    await turn()
    beams = [ScoredText([number] * num_tokens, -1.0, -1.0, FinishReason.LENGTH) for number in range(9)]
    calls.handle.deliver(SequenceDelta(0, [], cached_tokens=3, finish=FinishReason.LENGTH, texts=beams))
    taken = []
    while calls.handle.has_deltas:
        if reader is None:
            taken += calls.handle.take()
        else:
            await turn()
    if reader is not None:
        taken = [delta for end, batch in reader.seen for delta in batch if end == "sink"]
        calls.handle.finish(0)
        await reader.task
    assert [beam for delta in taken for beam in delta.texts] == beams
    assert all(len(delta.texts) == 1 or len(delta.texts) * num_tokens <= MAX_TAKEN_TOKENS for delta in taken)
    assert len(taken) == (1 if num_tokens == 1 else 3 if num_tokens < MAX_TAKEN_TOKENS else len(beams))
    assert [delta.cached_tokens for delta in taken] == [3] + [None] * (len(taken) - 1)


@pytest.mark.parametrize(("token_ids", "pushes_per_slice"), [([], 1), ([7], 1000)], ids=["one token", "several"])
async def test_pushes_to_many_requests_leave_room_for_other_callbacks(
    monkeypatch: pytest.MonkeyPatch, token_ids: list[int], pushes_per_slice: int
) -> None:
    monkeypatch.setattr("kvrelay_router.loop_share.SLICE_S", -1.0)  # each push uses a slice up
    monkeypatch.setattr("kvrelay_router.dispatch.running_request.LIGHT_PUSHES", pushes_per_slice)
    pushes = PushQueue()
    several = [Calls(pushes=pushes) for _ in range(4)]
    readers = [Reader(calls) for calls in several]
    await turn()
    order: list[str] = []
    for number, (calls, reader) in enumerate(zip(several, readers, strict=True)):
        monkeypatch.setattr(
            reader, "take", lambda deltas, name=number: order.append(f"{name}:{deltas[0].token_ids[0]}")
        )
        calls.handle.deliver(SequenceDelta(0, [number, *token_ids]))
    for step in range(4):
        asyncio.get_running_loop().call_soon(order.append, f"other {step}")
        await asyncio.sleep(0)
        if step == 1:
            several[0].handle.deliver(SequenceDelta(0, [9]))
    await turn()
    assert [each for each in order if not each.startswith("other")] == ["0:0", "1:1", "2:2", "3:3", "0:9"]
    assert order.index("other 0") < order.index("1:1") < order.index("2:2")
    for reader in readers:
        reader.task.cancel()
