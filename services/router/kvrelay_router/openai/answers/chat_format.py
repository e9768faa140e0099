"""Chat completions as server-sent events and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.http.json_parts import dump_at_once, json_parts
from kvrelay_router.openai.answers.answer_format import (
    CollectedTexts,
    DocumentFormat,
    EventUsage,
    PartedEventFormat,
    beam_scores,
)
from kvrelay_router.openai.answers.choice import Choice
from kvrelay_router.openai.answers.logprob_format import TOKEN_IDS, are_large, chat_logprobs
from kvrelay_router.openai.answers.prompt_scores import PromptScores
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.openai.schema.chat_request import ChatRequest
from kvrelay_router.text.tokenizer import Tokenizer

NO_DETAILS = b',"logprobs":null,"finish_reason":null'


class ChatStream(PartedEventFormat):
    """Sends the role of each choice first, and then its text. `head`: the fields that all events begin with."""

    def __init__(self, head: dict[str, Any], tokenizer: Tokenizer, request: ChatRequest) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._request = request
        self._head = head
        self._prefix = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        self._usage = EventUsage(is_included=request.include_usage, is_continuous=request.running_usage)
        self._has_details = request.logprobs or request.return_token_ids
        self._opened: set[int] = set()
        self._prompt_ids = b""  # the field of the first events, once it was written
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # see `_open`

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        """Returns the events for new text of a choice."""
        around = self._around_text.get(choice.index)
        if around is not None and choice.finish_reason is None:
            return b"".join((around[0], orjson.dumps(text), around[1])) if text else b""
        opening = b"" if choice.index in self._opened else self._open(run, choice)
        if not text and choice.finish_reason is None:
            return opening
        delta = b'{"content":' + orjson.dumps(text) + b"}" if text else b"{}"  # without a dictionary for each event
        return self._event_with_details(run, choice, delta, opening)

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the event with the usage, if it was asked for."""
        return self._usage.last_event(self._head, usage)

    def _open(self, run: PromptRun, choice: Choice) -> bytes:
        self._opened.add(choice.index)
        usage = self._usage.field(run, choice, 0)
        if not self._has_details and not self._usage.is_continuous:
            # Events of this choice bring text alone until the last one, so everything around it is written once.
            before = b'%b%d,"delta":{"content":' % (self._prefix, choice.index)
            self._around_text[choice.index] = before, b"}%b}]%b}\n\n" % (NO_DETAILS, usage)
        prompt = b""
        if self._request.return_token_ids:
            if not self._prompt_ids:
                self._prompt_ids = b',"prompt_token_ids":' + orjson.dumps(run.request.prompt_ids)
            prompt = self._prompt_ids
        opening = self._event(choice, b'{"role":"assistant","content":""}', NO_DETAILS, usage + prompt)
        if echoed := self._request.echoed:
            opening += self._event(choice, b'{"content":' + orjson.dumps(echoed) + b"}", NO_DETAILS, usage)
        return opening

    def _event_with_details(self, run: PromptRun, choice: Choice, delta: bytes, opening: bytes) -> bytes:
        """`opening`: an event that comes before."""
        records = choice.take_records()
        usage = self._usage.field(run, choice, len(records.token_ids))
        if not self._has_details and choice.finish_reason is None:
            return opening + self._event(choice, delta, NO_DETAILS, usage)
        details: dict[str, Any] = {
            "logprobs": _logprobs(self._tokenizer, self._request, records.logprobs),
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
            **beam_scores(choice),
        }
        if self._request.return_token_ids:
            details["token_ids"] = records.token_ids
        if are_large(len(records.logprobs), self._request.top_logprobs):
            return self._keep_large(self._in_parts(opening, choice, delta, details, usage))
        return opening + self._event(choice, delta, b"," + dump_at_once(details)[1:-1], usage)

    def _event_without_tokens(self, run: PromptRun, choice: Choice, delta: bytes) -> bytes:
        """The tokens behind `delta` are left to a later event."""
        details: dict[str, Any] = {"logprobs": _logprobs(self._tokenizer, self._request, []), "finish_reason": None}
        if self._request.return_token_ids:
            details["token_ids"] = []
        return self._event(choice, delta, b"," + dump_at_once(details)[1:-1], self._usage.field(run, choice, 0))

    def _in_parts(
        self, opening: bytes, choice: Choice, delta: bytes, details: dict[str, Any], usage: bytes
    ) -> Iterator[bytes]:
        """Yields `opening` and the event that `_event` would return, in parts."""
        yield b'%b%b%d,"delta":%b' % (opening, self._prefix, choice.index, delta)
        for name, value in details.items():
            yield b",%b:" % orjson.dumps(name)
            yield from json_parts(value)
        yield b"}]%b}\n\n" % usage

    def _finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    def _event(self, choice: Choice, delta: bytes, details: bytes, end: bytes) -> bytes:
        return b'%b%d,"delta":%b%b}]%b}\n\n' % (self._prefix, choice.index, delta, details, end)


class ChatAnswer(DocumentFormat):
    """One JSON object with all choices. Several runs are conversations of their own, with one choice each."""

    def __init__(
        self,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        request: ChatRequest,
        runs: Sequence[PromptRun],
        scores: PromptScores | None,
    ) -> None:
        self._head, self._tokenizer, self._request, self._scores = head, tokenizer, request, scores
        self._runs = runs
        self._texts = CollectedTexts()

    def add(self, run: PromptRun, choice: Choice, text: str) -> bytes:
        """Keeps the text."""
        self._texts.add(choice, text)
        return b""

    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {
            **self._head,
            "choices": [self._choice(choice) for run in self._runs for choice in run.choices],
            "usage": usage,
        }
        if len(self._runs) > 1:
            return answer
        (run,) = self._runs
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = run.request.prompt_ids
        if self._scores is not None:
            answer["prompt_logprobs"] = self._scores.of(run)
        return answer

    def _choice(self, choice: Choice) -> dict[str, Any]:
        records = choice.take_records()
        content: dict[str, Any] = {
            "index": choice.index,
            "message": self._message(choice),
            "logprobs": _logprobs(self._tokenizer, self._request, records.logprobs),
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
            **beam_scores(choice),
        }
        if self._request.return_token_ids:
            content["token_ids"] = records.token_ids
        return content

    def _message(self, choice: Choice) -> dict[str, Any]:
        return {"role": "assistant", "content": self._echoed(choice) + self._texts.of(choice), "refusal": None}

    def _echoed(self, choice: Choice) -> str:
        return self._request.echoed

    def _finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason


def _logprobs(tokenizer: Tokenizer, request: ChatRequest, entries: list[TokenLogprobs]) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    texts = TOKEN_IDS if request.return_tokens_as_token_ids else tokenizer
    return chat_logprobs(texts, entries, request.top_logprobs)
