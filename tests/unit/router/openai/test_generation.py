"""A generation: its tokens in callbacks and in its task, failures of one request, and what is left at its end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import cast

import pytest

from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.text.choice import Choice, SequenceDelta, StopRules
from kvrelay.text.tokenizer import Tokenizer, make_detokenizer
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import GenerateRequest, RequestFailed
from kvrelay_router.dispatch.placement import PromptPrefixes
from kvrelay_router.dispatch.running_request import PushQueue, RunningRequest
from kvrelay_router.http.event_stream import EventStream
from kvrelay_router.openai.generation import Generation, PromptRun


class Dispatch:
    """Gives out handles, whose tokens the test delivers."""

    def __init__(self, queue: PushQueue | None = None) -> None:
        self.handles: list[RunningRequest] = []
        self.num_cancelled = 0
        self._queue = queue

    async def prepare(self, request: GenerateRequest) -> PromptPrefixes:
        return PromptPrefixes([1])

    def submit(self, request: GenerateRequest, prepared: PromptPrefixes) -> RunningRequest:
        self.handles.append(RunningRequest(request, prepared, self._stop, self._cancel, self._queue))
        return self.handles[-1]

    def _stop(self, handle: RunningRequest, sequence: int) -> None:
        handle.finish(sequence)

    def _cancel(self, handle: RunningRequest) -> None:
        self.num_cancelled += 1
        handle.fail(RequestFailed("cancelled"))


class Answer:
    """Keeps the text by prompt, and is the stream to which callbacks write."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.written: list[bytes] = []
        self.failure: Exception | None = None

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        if self.failure is not None:
            raise self.failure
        self.texts.append(choice.take_text())
        return self.texts[-1].encode()

    def is_ready(self) -> bool:
        return True

    def write(self, events: bytes) -> None:
        self.written.append(events)


def generation_of(
    tokenizer: Tokenizer, dispatch: Dispatch, answer: Answer, num_prompts: int = 1, stop: tuple[str, ...] = ()
) -> Generation:
    runs: list[PromptRun] = []
    for _ in range(num_prompts):
        rules = StopRules(list(stop), frozenset(), 0, include_in_output=False)
        choice = Choice(len(runs), make_detokenizer(tokenizer, [5], skip_special_tokens=True), rules)
        runs.append(PromptRun(GenerateRequest(request_id="r", prompt_ids=[5], sampling=Sampling()), [choice]))
    return Generation(cast(RouterDispatcher, dispatch), runs, answer.add, cast(EventStream, answer))


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def run(generation: Generation) -> list[bytes]:
    """As a stream's task does it; what it took."""
    taken: list[bytes] = []
    with await generation.submit():
        while not generation.is_over:
            await generation.wait()
            taken.append(generation.take())
    return taken


def deltas_of(tokenizer: Tokenizer, *words: str) -> list[SequenceDelta]:
    return [SequenceDelta(0, tokenizer.encode(word, add_special_tokens=False)) for word in words]


async def test_the_task_takes_the_first_and_the_last_tokens_only(byte_level: Tokenizer) -> None:
    dispatch, answer = Dispatch(), Answer()
    task = asyncio.create_task(run(generation_of(byte_level, dispatch, answer)))
    await turn()
    (handle,) = dispatch.handles
    for delta in deltas_of(byte_level, "an", " otter", " is"):
        handle.deliver(delta)
        await turn()
    handle.deliver(SequenceDelta(0, [], finish=FinishReason.LENGTH))
    handle.finish(0)
    assert await task == [b"an", b""]
    assert answer.written == [b" otter", b" is"]
    assert dispatch.num_cancelled == 0


async def test_a_stop_string_ends_the_task_and_the_sequence(byte_level: Tokenizer) -> None:
    dispatch, answer = Dispatch(), Answer()
    task = asyncio.create_task(run(generation_of(byte_level, dispatch, answer, stop=("is",))))
    await turn()
    for delta in deltas_of(byte_level, "an", " otter is", " never"):
        dispatch.handles[0].deliver(delta)
        await turn()
    await task
    assert "".join(answer.texts) == "an otter "


async def test_a_failure_in_a_callback_ends_its_request_only(byte_level: Tokenizer) -> None:
    queue = PushQueue()
    dispatches, answers = [Dispatch(queue), Dispatch(queue)], [Answer(), Answer()]
    tasks = [
        asyncio.create_task(run(generation_of(byte_level, dispatch, answer)))
        for dispatch, answer in zip(dispatches, answers, strict=True)
    ]
    await turn()
    first, second = deltas_of(byte_level, "an", " otter")
    for dispatch in dispatches:
        dispatch.handles[0].deliver(first)
    await turn()
    answers[0].failure = ZeroDivisionError("of the answer")
    for dispatch in dispatches:
        dispatch.handles[0].deliver(second)
    with pytest.raises(ZeroDivisionError, match="of the answer"):
        await tasks[0]
    assert dispatches[0].num_cancelled == 1
    assert answers[1].written == [b" otter"]
    tasks[1].cancel()


async def test_the_tokens_before_a_failure_come_first(byte_level: Tokenizer) -> None:
    dispatch, answer = Dispatch(), Answer()
    task = asyncio.create_task(run(generation_of(byte_level, dispatch, answer, num_prompts=2)))
    await turn()
    dispatch.handles[0].deliver(deltas_of(byte_level, "an")[0])
    dispatch.handles[0].fail(RequestFailed("the workers are gone"))
    with pytest.raises(RequestFailed, match="gone"):
        await task
    assert answer.texts == ["an"]
    assert dispatch.num_cancelled == 1, "the other prompt's"


async def test_an_end_without_a_finish_reason_is_a_failure(byte_level: Tokenizer) -> None:
    dispatch, answer = Dispatch(), Answer()
    task = asyncio.create_task(run(generation_of(byte_level, dispatch, answer)))
    await turn()
    dispatch.handles[0].finish(0)
    with pytest.raises(RequestFailed, match="without a finish reason"):
        await task


async def test_a_generation_that_is_over_is_freed_without_the_garbage_collector(byte_level: Tokenizer) -> None:
    dispatch, answer = Dispatch(), Answer()
    generation = generation_of(byte_level, dispatch, answer)
    gc.disable()
    try:
        task = asyncio.create_task(run(generation))
        await turn()
        dispatch.handles[0].deliver(SequenceDelta(0, [], finish=FinishReason.LENGTH))
        dispatch.handles[0].finish(0)
        await task
        weak = weakref.ref(generation)
        del generation, task
        assert weak() is None
    finally:
        gc.enable()
