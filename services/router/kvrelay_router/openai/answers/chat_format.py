"""Chat completions as JSON and as server-sent events."""

from __future__ import annotations

from typing import Any

import orjson

from kvrelay_router.openai.answers.answer_format import Collected, beam_scores
from kvrelay_router.openai.answers.choice import ChoiceOutput
from kvrelay_router.openai.answers.logprob_format import chat_logprobs
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.generation import Step
from kvrelay_router.openai.schema.chat_request import ChatRequest

NOTHING_ELSE = b',"logprobs":null,"finish_reason":null'


class ChatFormat:
    """Writes chat completions."""

    def __init__(self, service: ApiService, answer_id: str, request: ChatRequest) -> None:
        self._tokenizer = service.text.tokenizer
        self._request = request
        self._head = service.answer_head(answer_id, "chat.completion")
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._prefix = b"data: " + orjson.dumps(self._chunk_head)[:-1] + b',"choices":[{"index":'
        self._suffix = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"
        self._is_plain = not request.logprobs and not request.return_token_ids

    def chunk(self, step: Step) -> bytes:
        """The role at first; then an event a output, none while everything is withheld."""
        output, choice = step.output, step.choice
        opening = b""
        if not choice.started:
            choice.started = True
            opening = self._opening(step)
        if not output.text and output.finish_reason is None:
            return opening
        around = self.around_text(choice.index) if output.finish_reason is None else None
        if around is not None:
            return opening + around[0] + orjson.dumps(output.text) + around[1]
        delta = b'{"content":' + orjson.dumps(output.text) + b"}" if output.text else b"{}"
        rest: dict[str, Any] = {
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        rest |= beam_scores(output)
        if self._request.return_token_ids:
            rest["token_ids"] = output.token_ids
        return opening + self._event(choice.index, delta, b"," + orjson.dumps(rest)[1:-1])

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """See `AnswerFormat`."""
        if not self._is_plain:
            return None
        return b'%b%d,"delta":{"content":' % (self._prefix, index), b"}%b%b" % (NOTHING_ELSE, self._suffix)

    def _opening(self, step: Step) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        event = self._event(step.choice.index, delta, NOTHING_ELSE)
        if not self._request.return_token_ids:
            return event
        prompt = b',"prompt_token_ids":' + orjson.dumps(step.run.request.prompt_ids) + b"}\n\n"
        return event[: -len(b"}\n\n")] + prompt

    def _event(self, index: int, delta: bytes, rest: bytes) -> bytes:
        return b'%b%d,"delta":%b%b%b' % (self._prefix, index, delta, rest, self._suffix)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last event: no choice, but the usage."""
        return b"data: " + orjson.dumps({**self._chunk_head, "choices": [], "usage": usage}) + b"\n\n"

    def whole(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain answer."""
        answer: dict[str, Any] = {
            **self._head,
            "choices": [self._choice(each.choice.index, each.whole()) for each in choices],
            "usage": usage,
        }
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = choices[0].run.request.prompt_ids
        return answer

    def _choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        content: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **beam_scores(output),
        }
        if self._request.return_token_ids:
            content["token_ids"] = output.token_ids
        return content

    def _logprobs(self, output: ChoiceOutput) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._tokenizer, output.logprobs, self._request.top_logprobs)
