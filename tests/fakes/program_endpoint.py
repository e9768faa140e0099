"""An endpoint whose answers follow from the text before them, without a server."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvrelay_programs.content import Content, SentTexts
from kvrelay_programs.endpoint import Caller, Endpoint
from kvrelay_programs.errors import EndpointError
from kvrelay_programs.expressions import Select
from kvrelay_programs.results import Generated, Selected
from kvrelay_programs.scoring import ScoredTokens


def answer_to(text: str, fields: Mapping[str, Any]) -> str:
    """A few words that depend on all of the text and the fields."""
    digest = hashlib.sha256(f"{text}|{sorted(fields.items())}".encode()).hexdigest()
    return f" {digest[:4]} {digest[4:8]}"


def scores_of(text: str, endings: Sequence[str]) -> list[ScoredTokens]:
    """One token for each character of an ending."""
    return [
        ScoredTokens(
            [ord(char) for char in ending],
            [-hashlib.sha256(f"{text}{ending[:at]}{char}".encode()).digest()[0] / 16 for at, char in enumerate(ending)],
        )
        for ending in endings
    ]


class FakeEndpoint(Endpoint):
    """`calls` are the prompts in the order in which their calls began. Calls wait while `gate` is not set."""

    least_prefetch_chars = 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.prefetched: list[str] = []
        self.callers: list[Caller] = []
        self.began, self.was_cancelled = threading.Event(), threading.Event()
        self.sent = SentTexts()
        self.ended_sessions: list[str] = []
        self.session_ended = threading.Event()
        self.fails_on = ""
        self.gate: asyncio.Event | None = None
        self.num_running = self.most_running = 0
        self.three_run = threading.Event()

    async def generate(
        self, content: Content, fields: Mapping[str, Any], caller: Caller, on_text: Callable[[str], None] | None = None
    ) -> Generated:
        text = answer_to(content.whole_text, fields)
        await self._call(content.whole_text, caller)
        if on_text is not None:
            for at in range(0, len(text), 2):
                on_text(text[at : at + 2])
                await asyncio.sleep(0)
        return Generated(text, "stop")

    async def select(self, content: Content, step: Select, caller: Caller) -> Selected:
        return await self._by_prompts(content, step, caller)

    async def score(self, content: Content, endings: Sequence[str], caller: Caller) -> list[ScoredTokens]:
        await self._call(content.whole_text, caller)
        return scores_of(content.whole_text, endings)

    async def prefetch(self, content: Content, caller: Caller) -> None:
        self.prefetched.append(content.whole_text)

    async def end_session(self, session: str) -> None:
        self.ended_sessions.append(session)
        self.session_ended.set()

    async def _call(self, text: str, caller: Caller) -> None:
        self.calls.append(text)
        self.callers.append(caller)
        self.began.set()
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        if self.num_running == 3:
            self.three_run.set()
        try:
            for _ in range(1 + len(text) % 3):  # calls end in another order than they begin
                await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        finally:
            self.num_running -= 1
        if self.fails_on and self.fails_on in text:
            raise EndpointError("status 400: this text is refused", status=400)
