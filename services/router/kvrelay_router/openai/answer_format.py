"""What the forms of answers share: their interface, events, usage and log-probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.text.choice import Choice
from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.generation_fields import GenerationFields
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_router.openai.generation import PromptRun


class AnswerFormat(ABC):
    """Writes an answer, as a stream of events or in one piece. There is an implementation for each API."""

    is_stream = False
    life_sign = b": waiting for a worker\n\n"
    """What a stream sends while its request waits: a comment, which clients of server-sent events skip."""
    done = b"data: [DONE]\n\n"
    """The end of every stream."""

    def add(self, run: PromptRun, choice: Choice) -> bytes:
        """Takes what is new of a choice of a stream. Returns the events for it."""
        return b""

    def keep(self, run: PromptRun, choice: Choice) -> bytes:
        """As `add`, for an answer in one piece. Returns no bytes: the choices keep what they get."""
        return b""

    async def finish(self) -> None:  # noqa: B027 - most answers do nothing here
        """Does what must be done before `end` or `document`. Called once, after the last text."""

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the last events."""
        return b""

    @abstractmethod
    def document(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON values of the answer in one piece."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the event for a failure after the first byte."""
        return b"data: " + orjson.dumps(error.body()) + b"\n\n"


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


class CompletionsFormat(AnswerFormat):
    """What chat and text completions share. `head`: the fields that the answer and all events begin with.

    Without `include_usage` events have no `usage`. With it, the field is null until the last event, or, with
    `continuous_usage_stats`, counts the choice's tokens up to and including the event.
    """

    def __init__(
        self, head: dict[str, Any], tokenizer: Tokenizer, request: GenerationFields, runs: Sequence[PromptRun]
    ) -> None:
        self.is_stream = request.stream
        self._head, self._tokenizer, self._runs = head, tokenizer, runs
        self._has_usage, self._is_continuous = request.include_usage, request.running_usage
        self._num_sent: dict[int, int] = {}  # tokens of each choice in the events so far
        self._opened: set[int] = set()  # the choices that an event has begun
        # By choice: the bytes before and after its text. Filled only if events carry nothing but text.
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def _around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Everything before and after what stands between `before` and `after` in events with a single choice, if their
        usage is not continuous."""
        usage = b',"usage":null' if self._has_usage else b""
        return b'data: %b,"choices":[%b' % (orjson.dumps(self._head)[:-1], before), b"%b]%b}\n\n" % (after, usage)

    def _event(self, run: PromptRun, content: dict[str, Any], num_new_tokens: int = 0, **more: Any) -> bytes:
        """The event for new content of a choice, with `more` fields behind the choices."""
        usage: dict[str, Any] = {"usage": None} if self._has_usage else {}
        if self._is_continuous:
            index, prompt_tokens = content["index"], len(run.request.prompt_ids)
            self._num_sent[index] = num_sent = self._num_sent.get(index, 0) + num_new_tokens
            totals = (prompt_tokens, num_sent, prompt_tokens + num_sent)
            usage["usage"] = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), totals, strict=True))
        return b"data: %b\n\n" % orjson.dumps({**self._head, "choices": [content], **usage, **more})

    def end(self, usage: dict[str, Any]) -> bytes:
        """Returns the event after the last choice, which has no choice but the usage, if it was asked for."""
        if not self._has_usage:
            return b""
        return b"data: %b\n\n" % orjson.dumps({**self._head, "choices": [], "usage": usage})


LOWEST = -9999.0
"""Written for minus infinity, which JSON cannot represent."""


class TokenIdTexts:
    """Writes `token_id:123` in place of the text, which several tokens may share."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"token_id:%d" % token_id


TOKEN_IDS = TokenIdTexts()
TokenSpellings = Tokenizer | TokenIdTexts
"""Gives the bytes of tokens."""


def completion_logprobs(
    tokenizer: TokenSpellings,
    ids: Sequence[int],
    offsets: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_top: int,
) -> dict[str, Any]:
    """The legacy form: parallel lists; the alternatives always contain the token itself."""
    return {
        "text_offset": offsets,
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in logprobs],
        "tokens": [_completion_token(tokenizer, token_id) for token_id in ids],
        "top_logprobs": [_completion_top(tokenizer, entry, num_top) for entry in logprobs],
    }


def chat_logprobs(
    tokenizer: TokenSpellings, entries: list[TokenLogprobs], num_top: int, *, with_own: bool = False
) -> dict[str, Any]:
    """The chat form: one object a token, with its bytes. `with_own`: the alternatives always contain the token."""
    return {"content": [_chat_entry(tokenizer, entry, num_top, with_own) for entry in entries], "refusal": None}


def _chat_entry(tokenizer: TokenSpellings, entry: TokenLogprobs, num_top: int, with_own: bool) -> dict[str, Any]:
    own = _chat_token(tokenizer, entry.token_id, entry.logprob)
    top_ids = entry.top_ids[:num_top]
    top = [_chat_token(tokenizer, *pair) for pair in zip(top_ids, entry.top_logprobs, strict=False)]
    return {**own, "top_logprobs": [own, *top] if with_own and entry.token_id not in top_ids else top}


def _chat_token(tokenizer: TokenSpellings, token_id: int, logprob: float) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes(token_id)
    text = token_bytes.decode(errors="backslashreplace")
    return {"token": text, "logprob": finite(logprob), "bytes": list(token_bytes)}


def _completion_token(tokenizer: TokenSpellings, token_id: int) -> str:
    """Text, or the escaped bytes of a token that is part of a character."""
    token_bytes = tokenizer.token_bytes(token_id)
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _completion_top(tokenizer: TokenSpellings, entry: TokenLogprobs | None, num_top: int) -> dict[str, float] | None:
    if entry is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False):
        top.setdefault(_completion_token(tokenizer, token_id), finite(logprob))
    top.setdefault(_completion_token(tokenizer, entry.token_id), finite(entry.logprob))
    return top


def finite(logprob: float) -> float:
    """Replaces minus infinity by `LOWEST`: JSON cannot represent it."""
    return logprob if logprob > LOWEST else LOWEST


def prompt_scores(
    tokenizer: Tokenizer, num_top: int, run: PromptRun, first_run: PromptRun
) -> list[dict[str, Any] | None]:
    """One object per token of the prompt, with token ids as keys, and None for tokens that are not scored: the first
    one, which follows nothing, and those before `logprob_start_len`. `first_run` has scored what the request's prompts
    have in common (`shared_scores`)."""
    first, own_first = first_run.request.sampling.logprob_start_len, run.request.sampling.logprob_start_len
    entries = [*first_run.prompt_logprobs[: max(0, own_first - first)], *run.prompt_logprobs[:]]
    return [*[None] * first, *[_prompt_token(tokenizer, entry, num_top) for entry in entries]]


def _prompt_token(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    """The most likely tokens, and the prompt's own token, whose rank is known only if it is one of them."""

    def score(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    top = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]
    scores = {str(token_id): score(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(top, start=1)}
    scores.setdefault(str(entry.token_id), score(entry.token_id, entry.logprob, None))
    return scores
