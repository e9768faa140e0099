"""The run of one HTTP request: all its prompts at once, each with its choices."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import msgspec

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.dispatch.interface import (
    DeltaSink,
    Dispatcher,
    GenerateRequest,
    PreparedPrompt,
    RequestFailed,
    RequestHandle,
    SequenceDelta,
)
from kvrelay_router.openai.answers.choice import Choice, ChoiceOutput

T = TypeVar("T")

MAX_ROUTES_BYTES = 4096
MAX_NAMES_BYTES = 1024
NOTE_BYTES = 32

Source = Callable[[], AsyncIterator[list[SequenceDelta]]]


@dataclass(slots=True)
class PromptRun:
    """One prompt and its choices; the choice of sequence i stands at place i."""

    request: GenerateRequest
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    least_cached: int | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached before this request came: the choices after the first also find its own."""
        return min(self.least_cached or 0, len(self.request.prompt_ids))

    def saw_cached(self, num_tokens: int) -> None:
        """One of the choices found that many prompt tokens cached."""
        self.least_cached = num_tokens if self.least_cached is None else min(self.least_cached, num_tokens)


class Step(msgspec.Struct, frozen=True):
    """What one delta added to one choice."""

    run: PromptRun
    choice: Choice
    output: ChoiceOutput


class Generation:
    """Submits all prompts, and brings their outputs until every choice has finished.

    Use as a context manager: whatever is still running at its end is cancelled.
    """

    def __init__(self, dispatcher: Dispatcher, runs: Sequence[PromptRun]) -> None:
        self.runs = runs
        self._dispatcher = dispatcher
        self._handles: list[RequestHandle] = []
        self._prepared: list[PreparedPrompt] = []
        self._num_unfinished = sum(len(run.choices) for run in runs)

    async def prepare(self) -> None:
        """What takes a while and is better done before the prompts are submitted."""
        for run in self.runs:
            self._prepared.append(await self._dispatcher.prepare(run.request))

    def __enter__(self) -> Generation:
        try:
            for number, run in enumerate(self.runs):
                prepared = self._prepared[number] if self._prepared else None
                self._handles.append(self._dispatcher.submit(run.request, prepared))
        except BaseException:
            self._cancel_all()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is not None or self._num_unfinished:
            self._cancel_all()

    def _cancel_all(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def served_by_headers(self) -> dict[str, str]:
        """Which workers took part, as far as is known by now, and as many as a header of 1 KiB names."""
        served = [handle.served_by for handle in self._handles]
        headers = {
            "x-kvrelay-prefill": _joined([each.prefill for each in served]),
            "x-kvrelay-decode": _joined([each.decode for each in served]),
        }
        return {name: value for name, value in headers.items() if value}

    def routes(self) -> str:
        """The decisions behind it as JSON in one line of ASCII, one for each prompt.

        Those that do not fit 4 KiB, which is what proxies take of a header, are left out; the last item counts them.
        """
        routes = [json.dumps(handle.served_by.tell_route(), separators=(",", ":")) for handle in self._handles]
        if len(routes) == 1 and len(routes[0]) <= MAX_ROUTES_BYTES:
            return routes[0]
        fitting = _fitting(routes, MAX_ROUTES_BYTES, 1)
        if len(fitting) < len(routes):
            fitting.append(f'{{"left_out":{len(routes) - len(fitting)}}}')
        return f"[{','.join(fitting)}]"

    @property
    def is_over(self) -> bool:
        """Every choice has finished."""
        return not self._num_unfinished

    def push_to(self, sink: DeltaSink) -> None:
        """Deltas of a single prompt go to the sink, while it is ready and whoever iterates `steps` waits there. Those
        of several prompts go through a queue, whose order a way beside it would break."""
        if len(self._handles) == 1:
            self._handles[0].push_to(sink)

    def take(self, deltas: list[SequenceDelta]) -> list[Step]:
        """For a sink: what deltas of the only prompt add to its choices."""
        return self._take(0, deltas)

    async def steps(self) -> AsyncGenerator[list[Step], None]:
        """Batches of steps, one a wake-up. Raises RequestFailed, also for a sequence that ends without a reason."""
        if len(self._handles) == 1:
            batches = self._handles[0].deltas()
            try:
                async for deltas in batches:
                    yield self._take(0, deltas)
                    if not self._num_unfinished:
                        return
            finally:
                await _close(batches)
        else:
            async with aclosing(_merged([handle.deltas for handle in self._handles])) as numbered:
                async for number, deltas in numbered:
                    yield self._take(number, deltas)
                    if not self._num_unfinished:
                        return
        if self._num_unfinished:
            raise RequestFailed("the request ended without a finish reason", FailureKind.PROTOCOL_ERROR)

    def _take(self, number: int, deltas: list[SequenceDelta]) -> list[Step]:
        run = self.runs[number]
        steps = []
        for delta in deltas:
            if delta.beams:
                steps += self._take_beams(run, delta)
                continue
            choice = run.choices[delta.sequence]
            if choice.finish_reason is not None:
                continue
            if delta.cached_tokens is not None:
                run.saw_cached(delta.cached_tokens)
            if delta.prompt_logprobs:
                run.prompt_logprobs = delta.prompt_logprobs
            output = choice.feed(delta)
            if choice.finish_reason is not None:
                self._num_unfinished -= 1
                if delta.finish is None:
                    self._handles[number].stop(delta.sequence)
            steps.append(Step(run, choice, output))
        return steps

    def _take_beams(self, run: PromptRun, delta: SequenceDelta) -> list[Step]:
        """The texts of a beam search, all at once, best first."""
        if len(delta.beams) != len(run.choices):
            message = f"the beam search found {len(delta.beams)} texts, {len(run.choices)} were asked for"
            raise RequestFailed(message, FailureKind.PROTOCOL_ERROR)
        run.saw_cached(delta.cached_tokens or 0)
        steps = []
        for choice, beam in zip(run.choices, delta.beams, strict=True):
            output = choice.feed(SequenceDelta(choice.index, beam.token_ids, finish=beam.finish))
            output.beam = beam
            self._num_unfinished -= 1
            steps.append(Step(run, choice, output))
        return steps


def _joined(names: list[str | None]) -> str:
    if len(names) == 1 and len(name := names[0] or "") <= MAX_NAMES_BYTES:
        return name
    distinct = list(dict.fromkeys([name for name in names if name]))
    joined = ", ".join(distinct)
    if len(joined) <= MAX_NAMES_BYTES:
        return joined
    fitting = _fitting(distinct, MAX_NAMES_BYTES, 2)
    return ", ".join([*fitting, f"{len(distinct) - len(fitting)} more"])


def _fitting(texts: list[str], num_bytes: int, separator_bytes: int) -> list[str]:
    """As many of the first texts, joined, as fit beside a note of how many do not."""
    ends = accumulate(len(text) + separator_bytes for text in texts)
    return texts[: bisect(list(ends), num_bytes - NOTE_BYTES)]


@asynccontextmanager
async def _closing(batches: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Closes what is iterated, if it can be closed, and does not leave that to the garbage collector."""
    try:
        yield batches
    finally:
        await _close(batches)


async def _close(batches: AsyncIterator[T]) -> None:
    if isinstance(batches, AsyncGenerator):
        await batches.aclose()


async def _merged(sources: list[Source]) -> AsyncGenerator[tuple[int, list[SequenceDelta]], None]:
    """Batches of all sources as they come; the first failure ends all."""
    queue: asyncio.Queue[tuple[int, list[SequenceDelta] | BaseException | None]] = asyncio.Queue()

    async def pump(number: int) -> None:
        try:
            async with _closing(sources[number]()) as batches:
                async for deltas in batches:
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
