"""The parts that chat and text completions share when they are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from kvrelay_router.http.api_error import ApiError
from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.openai.generation import PromptRun


class EventFormat(ABC):
    """Writes an answer as a stream of events. There is an implementation for each kind of answer."""

    life_sign = b": waiting for a worker\n\n"
    """What a stream sends while its request waits: a comment, which clients of server-sent events skip."""
    done = b"data: [DONE]\n\n"
    """The end of every stream."""

    @abstractmethod
    def add(self, run: PromptRun, choice: Choice) -> bytes:
        """Takes what is new of a choice. Returns the events for it."""

    async def finish(self) -> None:  # noqa: B027 - most answers do nothing here
        """Does what must be done before the last events. Called once, after the last text."""

    @abstractmethod
    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the last events."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the event for a failure after the first byte."""
        return b"data: " + orjson.dumps(error.body()) + b"\n\n"


class DocumentFormat(ABC):
    """Writes an answer in one piece. There is an implementation for each kind of answer."""

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        """Returns no bytes: the choices keep what they get."""
        return b""

    async def finish(self) -> None:  # noqa: B027 - most answers do nothing here
        """Does what must be done before `document`. Called once, after the last text."""

    @abstractmethod
    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON values of the answer."""


AnswerFormat = EventFormat | DocumentFormat


def usage_of(runs: Sequence[PromptRun]) -> dict[str, Any]:
    """Counts the tokens of all prompts, each prompt once, and of all sampled sequences."""
    prompt_tokens = sum(len(run.request.prompt_ids) for run in runs)
    choices = [choice for run in runs for choice in run.choices]
    completion_tokens = sum(choice.num_tokens for choice in choices)
    reasoning = [count for choice in choices if (count := choice.num_reasoning_tokens) is not None]
    details = {"completion_tokens_details": {"reasoning_tokens": sum(reasoning)}} if reasoning else {}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(run.cached_tokens for run in runs)},
        **details,
    }


class EventUsage:
    """The `usage` field of a stream's events.

    Without `include_usage` there is none. With it, the field is null until the last event, or, with
    `continuous_usage_stats`, counts the choice's tokens up to and including the event.
    """

    def __init__(self, *, is_included: bool, is_continuous: bool) -> None:
        self.is_included = is_included
        self.is_continuous = is_continuous
        self._num_sent: dict[int, int] = {}  # tokens of each choice in the events so far

    def field(self, run: PromptRun, choice: Choice, num_new_tokens: int) -> bytes:
        """Returns the field for an event that brings this many tokens, with a comma before it, or no bytes."""
        if not self.is_included:
            return b""
        if not self.is_continuous:
            return b',"usage":null'
        prompt_tokens = len(run.request.prompt_ids)
        completion_tokens = self._num_sent.get(choice.index, 0) + num_new_tokens
        self._num_sent[choice.index] = completion_tokens
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return b',"usage":' + orjson.dumps(usage)

    def last_event(self, head: dict[str, Any], usage: dict[str, Any]) -> bytes:
        """Returns the event after the last choice, which has no choice but the usage, or no bytes."""
        if not self.is_included:
            return b""
        return b"data: " + orjson.dumps({**head, "choices": [], "usage": usage}) + b"\n\n"
