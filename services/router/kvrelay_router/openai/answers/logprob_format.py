"""Log-probabilities as OpenAI's two APIs write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.dispatch.collected_logprobs import LogprobRows
from kvrelay_router.http.json_parts import Rows

MAX_AT_ONCE = 1024
"""Log-probabilities, alternatives included, that are written at a time: about a millisecond."""

LOWEST = -9999.0
"""Written for minus infinity, which JSON cannot represent."""


class TokenSpellings(Protocol):
    """Gives the bytes of tokens, as `Tokenizer` does."""

    def token_bytes(self, token_id: int) -> bytes: ...


class TokenIdTexts:
    """Writes `token_id:123` in place of the text, which several tokens may share."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"token_id:%d" % token_id


TOKEN_IDS = TokenIdTexts()


class OptionalRows(Protocol):
    """A list of `TokenLogprobs` or None, or something that makes slices of one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Sequence[TokenLogprobs | None]: ...


@dataclass(frozen=True, slots=True)
class EchoedRows:
    """The entries of a prompt and its output. The prompt's first token has none, because it follows nothing."""

    prompt: LogprobRows
    output: list[TokenLogprobs]

    def __len__(self) -> int:
        return 1 + len(self.prompt) + len(self.output)

    def __getitem__(self, index: slice, /) -> list[TokenLogprobs | None]:
        start, stop, _ = index.indices(len(self))
        behind = 1 + len(self.prompt)
        rows: list[TokenLogprobs | None] = [None] if start == 0 < stop else []
        rows += self.prompt[max(0, start - 1) : max(0, stop - 1)]
        rows += self.output[max(0, start - behind) : max(0, stop - behind)]
        return rows


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens at their places in a text: parallel lists. The first token of a prompt has no logprobs."""

    token_ids: Sequence[int]
    offsets: Sequence[int]
    logprobs: OptionalRows


def completion_logprobs(tokenizer: TokenSpellings, tokens: ScoredTokens, num_top: int) -> dict[str, Any]:
    """The legacy form: parallel lists; the alternatives always contain the token itself."""
    ids, offsets, logprobs = tokens.token_ids, tokens.offsets, tokens.logprobs

    def own(start: int, stop: int) -> list[Any]:
        return [None if entry is None else finite(entry.logprob) for entry in logprobs[start:stop]]

    def texts(start: int, stop: int) -> list[Any]:
        return [_completion_token(tokenizer, token_id) for token_id in ids[start:stop]]

    def top(start: int, stop: int) -> list[Any]:
        return [_completion_top(tokenizer, entry, num_top) for entry in logprobs[start:stop]]

    return {
        "text_offset": Rows(len(offsets), lambda start, stop: list(offsets[start:stop])),
        "token_logprobs": Rows(len(logprobs), own, num_top + 1),
        "tokens": Rows(len(ids), texts),
        "top_logprobs": Rows(len(logprobs), top, num_top + 1),
    }


def chat_logprobs(tokenizer: TokenSpellings, entries: list[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """The chat form: one object a token, with its bytes."""

    def content(start: int, stop: int) -> list[Any]:
        return [_chat_entry(tokenizer, entry, num_top) for entry in entries[start:stop]]

    return {"content": Rows(len(entries), content, 2 * (num_top + 1)), "refusal": None}


def _chat_entry(tokenizer: TokenSpellings, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    top = [
        _chat_token(tokenizer, token_id, logprob)
        for token_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
    ]
    return {**_chat_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top}


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


def are_large(num_entries: int, num_top: int) -> bool:
    """Returns whether the log-probabilities of so many tokens are to be written in parts."""
    return num_entries * (1 + num_top) > MAX_AT_ONCE


def finite(logprob: float) -> float:
    """Replaces minus infinity by `LOWEST`: JSON cannot represent it."""
    return logprob if logprob > LOWEST else LOWEST
