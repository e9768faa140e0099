"""The run of one HTTP request: all its prompts at once, each with its choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.api.choice import Choice, Piece
from kvrelay_router.dispatch.interface import (
    Dispatcher,
    GenerateRequest,
    RequestFailed,
    RequestHandle,
    SequenceDelta,
)


@dataclass(slots=True)
class PromptRun:
    """One prompt and its choices; the choice of sequence i stands at place i."""

    request: GenerateRequest
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """What one delta added to one choice."""

    run: PromptRun
    choice: Choice
    piece: Piece


class Generation:
    """Submits all prompts, and brings their pieces until every choice has finished.

    Use as a context manager: whatever is still running at its end is cancelled.
    """

    def __init__(self, dispatcher: Dispatcher, runs: Sequence[PromptRun]) -> None:
        self.runs = runs
        self._dispatcher = dispatcher
        self._handles: list[RequestHandle] = []

    def __enter__(self) -> Generation:
        try:
            for run in self.runs:
                self._handles.append(self._dispatcher.submit(run.request))
        except BaseException:
            self._cancel_all()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is not None or not self._all_finished():
            self._cancel_all()

    def _cancel_all(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def _all_finished(self) -> bool:
        return all(choice.finish_reason is not None for run in self.runs for choice in run.choices)

    def served_by_headers(self) -> dict[str, str]:
        """Which workers took part, as far as is known by now."""
        served = [handle.served_by for handle in self._handles]
        headers = {
            "x-kvrelay-prefill": _joined([each.prefill for each in served]),
            "x-kvrelay-decode": _joined([each.decode for each in served]),
        }
        return {name: value for name, value in headers.items() if value}

    async def steps(self) -> AsyncGenerator[list[Step], None]:
        """Batches of steps, one a wake-up. Raises RequestFailed, also for a sequence that ends without a reason."""
        if len(self.runs) == 1:
            async for deltas in self._handles[0].deltas():
                yield self._take(0, deltas)
                if self._all_finished():
                    return
        else:
            async with aclosing(_merged([handle.deltas for handle in self._handles])) as merged:
                async for number, deltas in merged:
                    yield self._take(number, deltas)
                    if self._all_finished():
                        return
        if not self._all_finished():
            raise RequestFailed("the request ended without a finish reason")

    def _take(self, number: int, deltas: list[SequenceDelta]) -> list[Step]:
        run = self.runs[number]
        steps = []
        for delta in deltas:
            choice = run.choices[delta.sequence]
            if choice.finish_reason is not None:
                continue
            if delta.cached_tokens is not None:
                run.cached_tokens = min(max(run.cached_tokens, delta.cached_tokens), len(run.request.prompt_ids))
            if delta.prompt_logprobs:
                run.prompt_logprobs = delta.prompt_logprobs
            piece = choice.feed(delta)
            if choice.finish_reason is not None and delta.finish is None:
                self._handles[number].stop(delta.sequence)
            steps.append(Step(run, choice, piece))
        return steps


def _joined(names: list[str | None]) -> str:
    return ", ".join(dict.fromkeys(name for name in names if name))


async def _merged(
    sources: list[Callable[[], AsyncIterator[list[SequenceDelta]]]],
) -> AsyncGenerator[tuple[int, list[SequenceDelta]], None]:
    """Batches of all sources as they come; the first failure ends all."""
    queue: asyncio.Queue[tuple[int, list[SequenceDelta] | BaseException | None]] = asyncio.Queue()

    async def pump(number: int) -> None:
        try:
            async for deltas in sources[number]():
                queue.put_nowait((number, deltas))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(pump(number)) for number in range(len(sources))]
    num_running = len(tasks)
    try:
        while num_running:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
