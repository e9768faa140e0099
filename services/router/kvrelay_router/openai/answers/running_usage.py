"""Streams whose every event says the usage so far, for clients that count tokens as they come."""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson

from kvrelay_router.openai.answers.answer_format import AnswerFormat, Collected
from kvrelay_router.openai.generation import Step

NO_USAGE = b',"usage":null}\n\n'
"""How an event ends where usage is asked for. No text has it: JSON writes neither quotes nor newlines as they are."""


class RunningUsage:
    """Wraps the format of a stream that ends with its usage: each event has that of its choice until then.

    Tokens count with the event that brings them, and so more with each; an event that only opens a choice has none.
    """

    def __init__(self, answer: AnswerFormat) -> None:
        self._answer = answer
        self._num_sent: Counter[int] = Counter()  # of each choice

    def chunk(self, step: Step) -> bytes:
        """The stream's events for a step; empty if nothing is to be said yet."""
        events = self._answer.chunk(step)
        num_opening = events.count(NO_USAGE) - (1 if step.output.token_ids else 0)
        if num_opening > 0:
            events = events.replace(NO_USAGE, self._ending(step), num_opening)
        self._num_sent[step.choice.index] += len(step.output.token_ids)
        return events.replace(NO_USAGE, self._ending(step))

    def _ending(self, step: Step) -> bytes:
        prompt_tokens, completion_tokens = len(step.run.request.prompt_ids), self._num_sent[step.choice.index]
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return b',"usage":' + orjson.dumps(usage) + b"}\n\n"

    def around_text(self, index: int) -> None:
        """Each event has its usage beside the text."""

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The event that ends a stream with its usage."""
        return self._answer.usage_chunk(usage)

    def whole(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain answer."""
        return self._answer.whole(choices, usage)
