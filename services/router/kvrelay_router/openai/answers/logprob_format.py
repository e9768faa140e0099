"""Log-probabilities as OpenAI's two APIs write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay_router.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Written for minus infinity, which JSON cannot represent."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token at its place in the text. The first token of a prompt has no logprobs."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


def completion_logprobs(tokenizer: Tokenizer, tokens: list[ScoredToken], num_top: int) -> dict[str, Any]:
    """The legacy form: parallel lists; the alternatives always contain the token itself."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [None if each.logprobs is None else finite(each.logprobs.logprob) for each in tokens],
        "tokens": [_completion_token(tokenizer, token.token_id) for token in tokens],
        "top_logprobs": [_completion_top(tokenizer, token.logprobs, num_top) for token in tokens],
    }


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """The chat form: one object a token, with its bytes."""
    content = []
    for entry in entries:
        top = [
            _chat_token(tokenizer, token_id, logprob)
            for token_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        ]
        content.append({**_chat_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes(token_id)
    text = token_bytes.decode(errors="backslashreplace")
    return {"token": text, "logprob": finite(logprob), "bytes": list(token_bytes)}


def _completion_token(tokenizer: Tokenizer, token_id: int) -> str:
    """Text, or the escaped bytes of a token that is part of a character."""
    token_bytes = tokenizer.token_bytes(token_id)
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _completion_top(tokenizer: Tokenizer, entry: TokenLogprobs | None, num_top: int) -> dict[str, float] | None:
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
