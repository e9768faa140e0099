"""Reads the answer of one request: time of each piece of text, and how the answer ended. No I/O.

Servers stream different chunks. A chunk counts as a piece if any choice has text (`text`, or in its delta `content`,
`reasoning_content`, `reasoning`, `refusal` or `tool_calls`) or `token_ids`. A first chunk with only the role, a chunk
with only `usage`, comments and empty chunks do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

SAID = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")
ERROR_BYTES = 300
NOT_WHOLE = "the stream ended without [DONE] or a finish_reason"


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the load began.

    `intended_s`: when it was due; latencies count from there. `started_s`: when the generator sent it. `num_output`:
    tokens counted by the server, or None. `error`: empty for a complete answer. `piece_ids`: token ids per piece, 0 if
    the server sends none.
    """

    intended_s: float
    started_s: float = float("nan")
    ended_s: float = float("nan")
    pieces_s: list[float] = field(default_factory=list)
    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    error: str = ""
    piece_ids: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first piece."""
        return self.pieces_s[0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended_s - self.intended_s

    @property
    def num_tokens(self) -> int:
        """Output tokens counted by the server, or else the number of pieces."""
        return len(self.pieces_s) if self.num_output is None else self.num_output

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token from the first to the last piece; None for one token or piece."""
        if self.num_tokens < 2 or len(self.pieces_s) < 2:
            return None
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between pieces. A piece may have several tokens."""
        return [after - before for before, after in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


class AnswerReader:
    """Parses the body of an answer and fills in `record`. `status` is the HTTP status."""

    def __init__(self, record: Record, status: int, content_type: str) -> None:
        self._record = record
        self._status = status
        self._is_stream = status == 200 and "text/event-stream" in content_type
        self._rest = b""
        self._done = False
        self._finished_s: float | None = None

    def feed(self, data: bytes, at_s: float) -> None:
        """Takes bytes of the body received at `at_s`."""
        if not self._is_stream:
            self._rest += data
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), at_s)

    def end(self, at_s: float) -> None:
        """Ends the body."""
        record = self._record
        record.ended_s = at_s
        if not self._is_stream:
            self._end_of_whole(at_s)
            return
        if self._rest.startswith(b"data:"):
            self._take(self._rest[5:].strip(), at_s)
        if record.num_output is None and any(record.piece_ids):
            record.num_output = sum(record.piece_ids)
        if not record.error and not self._done and self._finished_s is None:
            record.error = NOT_WHOLE
        if not record.error and not record.pieces_s:
            self._end_without_text()

    def _end_without_text(self) -> None:
        """Valid if the server counted tokens: some tokens have no text, such as half a character."""
        if self._finished_s is not None and self._record.num_output:
            self._record.pieces_s.append(self._finished_s)
        else:
            self._record.error = "the answer has no text"

    def _take(self, event: bytes, at_s: float) -> None:
        if event == b"[DONE]":
            self._done = True
            return
        if not event:
            return
        try:
            self._take_object(orjson.loads(event), at_s)
        except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError, ValueError) as error:
            self._record.error = self._record.error or f"a chunk that cannot be read: {error}"

    def _take_object(self, chunk: dict[str, Any], at_s: float) -> None:
        if chunk.get("error"):
            self._record.error = f"in the stream: {_message(chunk)}"
            return
        spoke, num_ids = False, 0
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            tokens = choice.get("token_ids") or delta.get("token_ids")
            spoke |= bool(choice.get("text") or tokens or any(delta.get(name) for name in SAID))
            num_ids += len(tokens or ())
            if choice.get("finish_reason") is not None:
                self._finished_s = at_s
        if spoke:
            self._record.pieces_s.append(at_s)
            self._record.piece_ids.append(num_ids)
        self._take_usage(chunk)

    def _take_usage(self, answer: dict[str, Any]) -> None:
        usage = answer.get("usage")
        if usage:
            self._record.num_prompt = usage.get("prompt_tokens")
            self._record.num_output = usage.get("completion_tokens") or self._record.num_output
            self._record.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def _end_of_whole(self, at_s: float) -> None:
        """Handles an error, or an unstreamed answer, which counts as one piece."""
        record = self._record
        try:
            answer = orjson.loads(self._rest)
        except orjson.JSONDecodeError:
            answer = None
        if self._status != 200:
            said = _message(answer) if isinstance(answer, dict) else self._rest[:ERROR_BYTES].decode("utf-8", "replace")
            record.error = f"status {self._status}: {said}"
        elif not isinstance(answer, dict) or not answer.get("choices"):
            record.error = "the answer is neither a stream nor a completion"
        else:
            record.pieces_s.append(at_s)
            self._take_usage(answer)


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error", answer)
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:ERROR_BYTES]
