"""The parts that chat and text completions share when they are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from kvrelay.text.choice import Choice
from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.grammar_fields import GenerationFields
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


class ChunkWriter:
    """Writes the events of OpenAI's two APIs. `head`: the fields that all events begin with.

    Without `include_usage` there is no `usage`. With it, the field is null until the last event, or, with
    `continuous_usage_stats`, counts the choice's tokens up to and including the event.
    """

    def __init__(self, head: dict[str, Any], request: GenerationFields) -> None:
        self._head = head
        self._has_usage, self._is_continuous = request.include_usage, request.running_usage
        self._num_sent: dict[int, int] = {}  # tokens of each choice in the events so far

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Everything before and after what stands between `before` and `after` in events with a single choice, if their
        usage is not continuous."""
        usage = b',"usage":null' if self._has_usage else b""
        return b'data: %b,"choices":[%b' % (orjson.dumps(self._head)[:-1], before), b"%b]%b}\n\n" % (after, usage)

    def event(self, run: PromptRun, content: dict[str, Any], num_new_tokens: int = 0, **more: Any) -> bytes:
        """The event for new content of a choice, with `more` fields behind the choices."""
        usage: dict[str, Any] = {"usage": None} if self._has_usage else {}
        if self._is_continuous:
            index, prompt_tokens = content["index"], len(run.request.prompt_ids)
            self._num_sent[index] = num_sent = self._num_sent.get(index, 0) + num_new_tokens
            totals = (prompt_tokens, num_sent, prompt_tokens + num_sent)
            usage["usage"] = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), totals, strict=True))
        return b"data: %b\n\n" % orjson.dumps({**self._head, "choices": [content], **usage, **more})

    def last_event(self, usage: dict[str, Any]) -> bytes:
        """The event after the last choice, which has no choice but the usage. No bytes if there is no usage."""
        if not self._has_usage:
            return b""
        return b"data: %b\n\n" % orjson.dumps({**self._head, "choices": [], "usage": usage})
