"""Runs the prompts of one HTTP request: submits them, and turns their tokens into the parts of an answer."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.packed_logprobs import CollectedLogprobs
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.text.choice import Choice
from kvrelay.text.sequence_delta import SequenceDelta
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import GenerateRequest, RequestFailed
from kvrelay_router.dispatch.running_request import RunningRequest
from kvrelay_router.loop_share import LoopShare

MAX_ROUTES_BYTES = 4096
MAX_NAMES_BYTES = 1024
NOTE_BYTES = 32


@dataclass(slots=True)
class PromptRun:
    """One prompt and its choices: `choices[i]` is the choice of sequence i."""

    request: GenerateRequest
    choices: list[Choice]
    prompt_logprobs: Sequence[TokenLogprobs] | CollectedLogprobs = ()
    least_cached: int | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached before this request came: the choices after the first also find its own."""
        return min(self.least_cached or 0, len(self.request.prompt_ids))

    def saw_cached(self, num_tokens: int) -> None:
        """One of the choices found that many prompt tokens cached."""
        self.least_cached = num_tokens if self.least_cached is None else min(self.least_cached, num_tokens)


Add = Callable[[PromptRun, Choice], bytes]
"""Adds what is new of a choice to the answer, and returns the bytes to send now. `AnswerFormat.add` implements it."""


class Generation:
    """All prompts of a request. Use as a context manager: prompts that still run at its end are cancelled.

    Tokens are handled in the callback that receives them, which costs less than a task that wakes for each. The task
    that owns the generation sleeps in `wait`. It wakes for the first tokens of a stream, tokens that cannot be written
    at once, the end of a sequence, and failures; `take` then handles the tokens that came meanwhile.
    """

    def __init__(
        self, dispatcher: RouterDispatcher, runs: Sequence[PromptRun], add: Add, on_tokens: Callable[[], None]
    ) -> None:
        """`add` is called for all tokens, and `on_tokens` whenever `take` has handled some, also for the first."""
        self.runs = runs
        self.on_tokens = on_tokens
        self._dispatcher = dispatcher
        self._add = add
        self._sinks: list[PromptSink] = []
        self._num_unfinished = sum(len(run.choices) for run in runs)
        self._waiter: asyncio.Future[None] | None = None
        self._was_cut = False  # `take` left tokens for its next call
        self._failure: Exception | None = None  # raised by a callback
        self._can_push: Callable[[], bool] = _never
        self._has_tokens = False
        self._sign_is_due = False

    async def submit(self, can_push: Callable[[], bool], push: Callable[[bytes], None]) -> Generation:
        """Starts all prompts. `push` gets what `add` returns from a callback, but only while `can_push` allows it, and
        not before the first `take` of tokens."""
        self._can_push = can_push
        share = LoopShare()
        try:
            for run in self.runs:
                await share.pause()
                handle = self._dispatcher.submit(run.request, await self._dispatcher.prepare(run.request))
                self._sinks.append(PromptSink(self, run, handle, self._add, _never, push))
        except BaseException:
            self._close(cancel=True)
            raise
        for sink in self._sinks:
            sink.handle.connect(sink)
        return self

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close(cancel=exc_info[0] is not None or not self.is_over)

    def _close(self, *, cancel: bool) -> None:
        for sink in self._sinks:
            if cancel:
                sink.handle.cancel()
            sink.handle.disconnect()
        self._sinks = []  # they refer to the generation: without this cycle all is freed at once

    @property
    def is_over(self) -> bool:
        """Every choice has finished."""
        return not self._num_unfinished

    async def wait(self, sign_interval_s: float | None = None) -> bool:
        """Sleeps until `take` has something to do, or the generation is over. Returns False.

        Returns True if it has waited for a worker for `sign_interval_s` seconds, so that the client needs a life sign.
        """
        if self._has_news():
            if self._was_cut:
                await asyncio.sleep(0)
            return False
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._set_waiting(True)
        timer, self._sign_is_due = None, False
        if sign_interval_s is not None and self._awaits_worker():
            timer = loop.call_later(sign_interval_s, self._wake_for_sign)
        try:
            await self._waiter
            return self._sign_is_due
        finally:
            self._waiter = None
            self._set_waiting(False)
            if timer is not None:
                timer.cancel()

    def _wake_for_sign(self) -> None:
        self._sign_is_due = True
        self.wake()

    def _awaits_worker(self) -> bool:
        return any(sink.handle.awaits_worker for sink in self._sinks)

    def _set_waiting(self, is_waiting: bool) -> None:
        for sink in self._sinks:
            sink.is_waiting = is_waiting

    def _has_news(self) -> bool:
        if not self._num_unfinished or self._failure is not None:
            return True
        are_over = True
        for sink in self._sinks:
            handle = sink.handle
            if handle.has_deltas or handle.error is not None:
                return True
            are_over = are_over and handle.is_over
        return are_over

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self._set_waiting(False)
            waiter.set_result(None)

    def take(self) -> bytes:
        """Handles the tokens that came since the last call, and returns what `add` returned for them. If they are
        many, some wait for the next call.

        Raises RequestFailed once there are no more tokens before the failure.
        """
        events: list[bytes] = []
        has_deltas, share = False, LoopShare()
        self._was_cut = False
        for sink in self._sinks:
            if sink.handle.has_deltas and self._failure is None:
                if has_deltas and share.is_used_up:
                    self._was_cut = True
                    break
                has_deltas = True
                sink.take_waiting(events.append)
                self._was_cut |= sink.handle.has_deltas
        if self._failure is not None:
            raise self._failure
        if has_deltas:
            self._allow_pushes()
            self.on_tokens()
        elif not self.is_over:
            self._raise_failure()
        return b"".join(events)

    def _allow_pushes(self) -> None:
        if not self._has_tokens:
            self._has_tokens = True
            for sink in self._sinks:
                sink.can_take = self._can_push

    def _raise_failure(self) -> None:
        for sink in self._sinks:
            if sink.handle.error is not None:
                raise sink.handle.error
        if all(sink.handle.is_over for sink in self._sinks):
            raise RequestFailed("the request ended without a finish reason", FailureKind.PROTOCOL_ERROR)

    def choices_finished(self, num_choices: int = 1) -> None:
        """Called by the sinks."""
        self._num_unfinished -= num_choices

    def fail(self, failure: Exception) -> None:
        """A callback failed. The task raises it."""
        self._failure = failure
        self.wake()

    def served_by_headers(self) -> dict[str, str]:
        """Which workers took part, as far as is known by now, and as many as a header of 1 KiB names."""
        served = [sink.handle.served_by for sink in self._sinks]
        headers = {
            "x-kvrelay-prefill": _joined([each.prefill for each in served]),
            "x-kvrelay-decode": _joined([each.decode for each in served]),
        }
        return {name: value for name, value in headers.items() if value}

    def routes(self) -> str:
        """The decisions behind it as JSON in one line of ASCII, one for each prompt.

        Those that do not fit 4 KiB, which is what proxies take of a header, are left out; the last item counts them.
        """
        routes = [json.dumps(sink.handle.served_by.describe_route(), separators=(",", ":")) for sink in self._sinks]
        if len(routes) == 1 and len(routes[0]) <= MAX_ROUTES_BYTES:
            return routes[0]
        fitting = _fitting(routes, MAX_ROUTES_BYTES, 1)
        if len(fitting) < len(routes):
            fitting.append(f'{{"left_out":{len(routes) - len(fitting)}}}')
        return f"[{','.join(fitting)}]"


class PromptSink:
    """Takes the tokens of one prompt: the `DeltaSink` of its request handle."""

    __slots__ = ("_add", "_generation", "_run", "_write", "can_take", "handle", "is_waiting")

    def __init__(
        self,
        generation: Generation,
        run: PromptRun,
        handle: RunningRequest,
        add: Add,
        can_push: Callable[[], bool],
        push: Callable[[bytes], None],
    ) -> None:
        self.handle = handle
        self._generation, self._run = generation, run
        self._add, self._write = add, push
        self.can_take = can_push
        self.is_waiting = False

    def wake(self) -> None:
        self._generation.wake()

    def take_waiting(self, write: Callable[[bytes], None]) -> None:
        """Takes the deltas that wait in the handle, and passes their events to `write`."""
        push, self._write = self._write, write
        self.take(self.handle.take())
        self._write = push

    def take(self, deltas: list[SequenceDelta]) -> None:
        """Adds the text of the tokens to the answer, and writes its events."""
        events, run = b"", self._run
        try:
            for delta in deltas:
                choice = run.choices[delta.sequence]
                if delta.cached_tokens is not None:
                    run.saw_cached(delta.cached_tokens)
                if delta.prompt_logprobs:
                    run.prompt_logprobs = delta.prompt_logprobs
                if delta.beams:
                    events += self._feed_beams(delta)
                    continue
                if choice.finish_reason is not None:
                    continue
                choice.feed(delta)
                if choice.finish_reason is not None:
                    self._generation.choices_finished()
                    if delta.finish is None:  # a stop string matched
                        self.handle.stop(delta.sequence)
                event = self._add(run, choice)
                events = events + event if events else event
            if events:
                self._write(events)
        except Exception as failure:
            # One receive callback serves all requests: the failure must end only this request.
            self._generation.fail(failure)

    def _feed_beams(self, delta: SequenceDelta) -> bytes:
        """A beam search brings all texts, the best first, in one delta or several."""
        run, events = self._run, b""
        unfinished = [choice for choice in run.choices if choice.finish_reason is None]
        for choice, beam in zip(unfinished, delta.beams, strict=False):
            choice.feed_beam(beam)
            events += self._add(run, choice)
        self._generation.choices_finished(len(delta.beams))
        return events


def _never() -> bool:
    return False


def _joined(names: list[str | None]) -> str:
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
