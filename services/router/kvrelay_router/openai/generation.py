"""Runs the prompts of one HTTP request: submits them, and turns their tokens into the parts of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.packed_logprobs import CollectedLogprobs
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.text.choice import Choice, SequenceDelta, single_tokens
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import GenerateRequest, RequestFailed, ServedBy
from kvrelay_router.dispatch.running_request import RunningRequest
from kvrelay_router.http.event_stream import EventStream
from kvrelay_router.loop_share import LoopShare


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


class Generation:
    """All prompts of a request. Use as a context manager: prompts that still run at its end are cancelled.

    Tokens are handled in the callback that receives them, which costs less than a task that wakes for each. The task
    that owns the generation sleeps in `wait`. It wakes for the first tokens of a stream, tokens that cannot be written
    at once, the end of a sequence, and failures; `take` then handles the tokens that came meanwhile.
    """

    def __init__(
        self,
        dispatcher: RouterDispatcher,
        runs: Sequence[PromptRun],
        add: Callable[[PromptRun, Choice], bytes],
        stream: EventStream | None = None,
    ) -> None:
        """`add` adds what is new of a choice to the answer, and returns the events to write to the `stream`."""
        self.runs = runs
        self.add = add
        self.stream = stream
        self.has_tokens = False  # `take` has handled some
        self._dispatcher = dispatcher
        self._sinks: list[PromptSink] = []
        self._num_unfinished = sum(len(run.choices) for run in runs)
        self._waiter: asyncio.Future[None] | None = None
        self._was_cut = False  # `take` left tokens for its next call
        self._failure: Exception | None = None  # raised by a callback
        self._sign_is_due = False

    async def submit(self) -> Generation:
        """Starts all prompts; if one cannot start, those before it are cancelled. Returns itself."""
        share = LoopShare()
        try:
            for run in self.runs:
                await share.pause()
                handle = self._dispatcher.submit(run.request, await self._dispatcher.prepare(run.request))
                self._sinks.append(PromptSink(self, run, handle))
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
        timer, self._sign_is_due = None, False
        if sign_interval_s is not None and self._awaits_worker():
            timer = loop.call_later(sign_interval_s, self._wake_for_sign)
        try:
            await self._waiter
            return self._sign_is_due
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake_for_sign(self) -> None:
        self._sign_is_due = True
        self.wake()

    def _awaits_worker(self) -> bool:
        return any(sink.handle.awaits_worker for sink in self._sinks)

    def can_write(self) -> bool:
        """Returns whether a callback may handle tokens: the task sleeps, has handled the first ones, and the client has
        read what was written. While the task works, later tokens would overtake those that it has taken."""
        return self._waiter is not None and self.has_tokens and (self.stream is None or self.stream.is_ready())

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
            waiter.set_result(None)

    def take(self) -> bytes:
        """Handles the tokens that came since the last call, and returns what `add` returned for them. If they are
        many, some wait for the next call.

        Raises RequestFailed once there are no more tokens before the failure.
        """
        events: list[bytes] = []
        has_deltas, share = False, LoopShare()
        self._was_cut = False
        if self._failure is not None:
            raise self._failure
        for sink in self._sinks:
            if sink.handle.has_deltas:
                if has_deltas and share.is_used_up:
                    self._was_cut = True
                    break
                has_deltas = True
                events.append(sink.events_of(sink.handle.take()))
                self._was_cut |= sink.handle.has_deltas
        if has_deltas:
            self.has_tokens = True
        elif not self.is_over:
            self._raise_failure()
        return b"".join(events)

    def _raise_failure(self) -> None:
        for sink in self._sinks:
            if sink.handle.error is not None:
                raise sink.handle.error
        if all(sink.handle.is_over for sink in self._sinks):
            raise RequestFailed("the request ended without a finish reason", FailureKind.PROTOCOL_ERROR)

    def choices_finished(self, num_choices: int = 1) -> None:
        """Counts the choices whose last token has been handled."""
        self._num_unfinished -= num_choices

    def fail(self, failure: Exception) -> None:
        """A callback failed. The task raises it."""
        self._failure = failure
        self.wake()

    def served_by(self) -> list[ServedBy]:
        """Returns the workers of each prompt that are known so far."""
        return [sink.handle.served_by for sink in self._sinks]


class PromptSink:
    """Takes the tokens of one prompt: the `DeltaSink` of its request handle."""

    __slots__ = ("_generation", "_run", "_splits", "can_take", "handle", "wake")

    def __init__(self, generation: Generation, run: PromptRun, handle: RunningRequest) -> None:
        self.handle = handle
        self.can_take, self.wake = generation.can_write, generation.wake
        self._generation, self._run = generation, run
        # In a stream with log-probabilities each token gets an event: clients match events with tokens.
        self._splits = generation.stream is not None and run.request.sampling.logprobs is not None

    def take(self, deltas: list[SequenceDelta]) -> None:
        """Adds the text of the tokens to the answer, and writes its events."""
        try:
            events = self.events_of(deltas)
            if events and self._generation.stream is not None:
                self._generation.stream.write(events)
        except Exception as failure:
            # One receive callback serves all requests: the failure must end only this request.
            self._generation.fail(failure)

    def events_of(self, deltas: list[SequenceDelta]) -> bytes:
        """Adds the text of the tokens to the answer, and returns its events."""
        events, run, generation = b"", self._run, self._generation
        if self._splits:
            deltas = [part for delta in deltas for part in single_tokens(delta)]
        for delta in deltas:
            choice = run.choices[delta.sequence]
            if delta.cached_tokens is not None:
                run.saw_cached(delta.cached_tokens)
            if delta.prompt_logprobs:
                run.prompt_logprobs = delta.prompt_logprobs
            if delta.texts:
                events += self._feed_texts(delta)
                continue
            if choice.finish_reason is not None:
                continue
            choice.feed(delta)
            if choice.finish_reason is not None:
                generation.choices_finished()
                if delta.finish is None:  # a stop string matched
                    self.handle.stop(delta.sequence)
            event = generation.add(run, choice)
            events = events + event if events else event
        return events

    def _feed_texts(self, delta: SequenceDelta) -> bytes:
        """A search brings all texts, the best first, in one delta or several."""
        run, events = self._run, b""
        unfinished = [choice for choice in run.choices if choice.finish_reason is None]
        for choice, text in zip(unfinished, delta.texts, strict=False):
            choice.feed_scored(text)
            events += self._generation.add(run, choice)
        self._generation.choices_finished(len(delta.texts))
        return events
