"""Runs the steps of one state in order, on the program loop. A step may use surplus text of an earlier call (API
speculation, section 5 of Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvrelay_programs.content import Content
from kvrelay_programs.endpoint import Caller
from kvrelay_programs.errors import CannotScore, Location, ProgramError
from kvrelay_programs.expressions import Gen, Media, Role, Select
from kvrelay_programs.graph import Step, applied
from kvrelay_programs.results import Generated, Selected, TextFeed, Value
from kvrelay_programs.run import Operation, OrderedStream, Run
from kvrelay_programs.scoring import greedy_choice

DEFAULT_MAX_TOKENS = 16
"""Of a text completion; a chat without `max_tokens` has the rest of the context."""
_LIMITS = ("max_tokens", "stop")
_SAMPLING = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed")
)


@dataclass(frozen=True, slots=True)
class Surplus:
    """`ends` has the number of characters up to the end of each token. With `is_complete` the model has ended behind
    the text; otherwise the text was cut.
    """

    text: str = ""
    ends: tuple[int, ...] = ()
    is_complete: bool = False

    def behind(self, constant: str) -> Surplus | None:
        """Returns the rest behind `constant`; None if the model went on with another text."""
        if not self.text.startswith(constant):
            return None
        return self._from(len(constant))

    def generated(self, stop: Sequence[str], max_tokens: int | None) -> tuple[str, str, Surplus] | None:
        """Text, finish reason and what is left of a `gen` with these limits; None if the text is too short to know.

        Tokens are counted from the beginning of the text. A token that a constant has divided counts as one.
        """
        for number, end in enumerate(self.ends, start=1):
            found = [at for each in stop if (at := self.text.find(each, 0, end)) >= 0]
            if found:
                return self.text[: min(found)], "stop", self._from(min(found))
            if number == max_tokens:
                return self.text[:end], "length", self._from(end)
        return (self.text, "stop", self._from(len(self.text))) if self.is_complete else None

    def _from(self, num_chars: int) -> Surplus:
        ends = tuple(end - num_chars for end in self.ends if end > num_chars)
        return Surplus(self.text[num_chars:], ends, self.is_complete)


def sampling_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of a call without its limits; None if its text cannot be taken from a longer one."""
    rest = {name: value for name, value in fields.items() if name not in _LIMITS}
    return rest if rest.keys() <= _SAMPLING else None


def surplus_of(answer: Generated, *, is_chat: bool) -> Surplus | None:
    """The text of an answer with the ends of its tokens; None if the endpoint gave no log-probabilities."""
    if answer.logprobs is None:
        return None
    length = len(answer.text)
    if is_chat:
        ends, read = [], b""
        for token in answer.logprobs["content"]:
            read += bytes(token["bytes"] or token["token"].encode())
            ends.append(min(length, len(read.decode(errors="ignore"))))
    else:
        ends = [min(length, offset) for offset in answer.logprobs["text_offset"][1:]] + [length]
    return Surplus(answer.text, tuple(ends), is_complete=answer.finish_reason == "stop")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """All methods may be called from any thread, and none waits. An error of a step fails all that follow."""

    run: Run
    feed: TextFeed | None
    _stream: OrderedStream
    _at: _Position

    @classmethod
    def begin(cls, run: Run, feed: TextFeed | None) -> Interpreter:
        return cls(run, feed, run.new_stream(), _Position())

    @property
    def content_so_far(self) -> Content:
        """Without waiting."""
        return self._at.content

    def open(self, role: Role, location: Location) -> None:
        """Begins a message."""

        def changed(content: Content) -> Content:
            self._at.surplus = None
            return content.opened(role, location)

        self._change(changed)

    def close(self) -> None:
        """Ends a message."""
        self._change(Content.closed)

    def add(self, piece: str | Media, location: Location) -> None:
        """Appends a constant."""

        def changed(content: Content) -> Content:
            longer = content.added(piece, location)
            surplus = self._at.surplus
            self._at.surplus = surplus.behind(piece) if surplus is not None and isinstance(piece, str) else None
            if self.feed is not None and isinstance(piece, str):
                self.feed.add(None, piece)
            return longer

        self._change(changed)

    def call(self, step: Gen | Select, value: Value) -> None:
        """Makes a call, appends its text and sets `value`."""

        async def run() -> None:
            if isinstance(step, Gen):
                result: Generated | Selected = await self._generated(step)
            else:
                result, self._at.surplus = await self._selected(step), None
            self._at.content = self._at.content.added(result.text)
            value.set(result)

        self._stream.submit(Operation(run, value.fail))

    def snapshot(self) -> Future[Content]:
        """The content behind all steps so far."""
        future: Future[Content] = Future()

        async def run() -> None:
            future.set_result(self._at.content)

        self._stream.submit(Operation(run, future.set_exception))
        return future

    def announce_fork(self, num: int, location: Location, beginning: tuple[Step, ...] = ()) -> None:
        """Has the endpoint compute the text so far, and the steps with which all states go on as far as they are known,
        before states that share it ask for it at the same time. Does nothing if little of that text is new to it."""

        async def run() -> None:
            shared = applied(self._at.content, beginning, location)
            if num > 1 and self.run.endpoint.is_worth_prefetching(shared):
                self._sent(shared)
                await self.run.call("fork", location, lambda caller: self.run.endpoint.prefetch(shared, caller))

        self._stream.submit(Operation(run, _ignore))

    def inherit(self, content: Future[Content]) -> None:
        """Begins with the content of another state."""

        async def run() -> None:
            self._at.content = await _content_of(content)

        self._stream.submit(Operation(run, _ignore))

    def wait_for(self, contents: Sequence[Future[Content]], then: Callable[[list[Content]], str]) -> None:
        """Waits for other states, and appends the text that `then` makes of their contents."""

        async def run() -> None:
            joined = [await _content_of(content) for content in contents]
            if text := then(joined):
                self._at.content = self._at.content.added(text)

        self._stream.submit(Operation(run, _ignore))

    def _change(self, change: Callable[[Content], Content]) -> None:
        async def run() -> None:
            self._at.content = change(self._at.content)

        self._stream.submit(Operation(run, _ignore))

    def _sent(self, content: Content) -> None:
        self.run.endpoint.sent.add(content.whole_text)

    async def _generated(self, step: Gen) -> Generated:
        what, content, feed = f"gen({step.name!r})", self._at.content, self.feed
        content.check_can_generate(what, step.location)
        fields = {**self.run.options.sampling, **step.fields}
        if self.run.options.surplus_tokens and (taken := await self._from_surplus(what, step, fields)) is not None:
            if feed is not None:
                feed.add(step.name, taken.text)
            return taken
        self._at.surplus = None
        self._sent(content)
        on_text = None if feed is None else (lambda text: feed.add(step.name, text))
        return await self.run.call(
            what, step.location, lambda caller: self.run.endpoint.generate(content, fields, caller, on_text)
        )

    async def _from_surplus(self, what: str, step: Gen, fields: dict[str, Any]) -> Generated | None:
        """Text that a call has brought or now brings beyond its own; None if this `gen` must be asked for as it is."""
        sampling, content = sampling_of(fields), self._at.content
        if sampling is None:
            return None
        stop = fields.get("stop") or []
        max_tokens = fields.get("max_tokens") or (None if content.is_chat else DEFAULT_MAX_TOKENS)
        taken = None
        if self._at.surplus is not None and self._at.surplus_sampling == sampling:
            taken = self._at.surplus.generated(stop, max_tokens)
        if taken is None:
            longer = sampling | {"max_tokens": max(self.run.options.surplus_tokens, max_tokens or 0), "logprobs": 0}
            self._sent(content)
            answer = await self.run.call(
                what, step.location, lambda caller: self.run.endpoint.generate(content, longer, caller)
            )
            surplus = surplus_of(answer, is_chat=content.is_chat)
            taken = None if surplus is None else surplus.generated(stop, max_tokens)
        if taken is None:
            return None
        text, finish_reason, self._at.surplus = taken
        self._at.surplus_sampling = sampling
        return Generated(text, finish_reason)

    async def _selected(self, step: Select) -> Selected:
        what, content = f"select({step.name!r})", self._at.content
        content.check_can_generate(what, step.location)
        self._sent(content)
        selected = await self.run.call(what, step.location, lambda caller: self._by_likelihood(step, content, caller))
        if self.feed is not None:
            self.feed.add(step.name, selected.text)
        return selected

    async def _by_likelihood(self, step: Select, content: Content, caller: Caller) -> Selected:
        endpoint = self.run.endpoint
        try:
            return await endpoint.select(content, step, caller)
        except CannotScore:
            if step.normalization == "unconditional":
                raise
            return await greedy_choice(step.choices, lambda begin: endpoint.top_tokens(content, begin, caller))


@dataclass(slots=True)
class _Position:
    """The content that the steps so far have made."""

    content: Content = field(default_factory=Content)
    surplus: Surplus | None = None  # behind the content
    surplus_sampling: dict[str, Any] | None = None


async def _content_of(future: Future[Content]) -> Content:
    # Without the shield, a cancelled waiter would cancel the future itself. Other states wait for it, and the stream
    # that sets it would fail.
    return await asyncio.shield(asyncio.wrap_future(future))


def _ignore(error: ProgramError) -> None:
    """The stream keeps the error."""
