"""Log-probabilities of outputs as OpenAI's two APIs write them, and of prompts as vLLM does (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_router.openai.generation import PromptRun

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


def chat_logprobs(tokenizer: TokenSpellings, entries: list[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """The chat form: one object a token, with its bytes."""
    return {"content": [_chat_entry(tokenizer, entry, num_top) for entry in entries], "refusal": None}


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
