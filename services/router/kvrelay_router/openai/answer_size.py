"""Bounds what one answer may hold, before anything of its request is queued."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.text.request.api_error import ApiError

TEXT_BYTES = 4
"""JSON bytes of a token's text, on average."""
ID_BYTES = 8
"""JSON bytes of a token id, at most."""
NULL_BYTES = 5
"""JSON bytes of a token before `logprob_start_len`."""
SCORE_BYTES = 64
"""JSON bytes of a log-probability with its token."""
BEAM_TOKEN_BYTES = 64
"""The beams of a search come from their worker at once, so a token of theirs counts for more."""
PROMPT_TOKEN_BYTES = 48
"""Memory of a token id of a prompt: an integer, its place in a list, and its packed form."""
KEPT_TOKENS = 4096
"""Most outputs are shorter."""
SCORE_MEMORY_BYTES = 160
"""Memory of a log-probability with its token until it is written."""
PACKED_SCORE_BYTES = 16
"""Memory of one as it comes from a worker: those of a prompt come so, once for each of its sequences."""


class AnswerShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for. `prompt_tokens` has the length of each prompt, and `max_tokens` its longest output."""

    prompt_tokens: Sequence[int]
    max_tokens: Sequence[int]
    num_sequences: int  # per prompt
    num_returned: int  # sequences per prompt in the answer
    is_beam_search: bool = False
    has_echo: bool = False
    has_ids: bool = False
    logprobs: int | None = None  # alternatives of each generated token
    echo_logprobs: int | None = None  # alternatives of each echoed token
    prompt_logprobs: int | None = None  # alternatives of each prompt token, beside the answer
    num_prompt_scores: int = 1  # copies of a prompt's scores in the answer
    logprob_start_len: int = 1  # position of the first prompt token that is scored
    is_stream: bool = False

    @property
    def num_scores(self) -> int:
        """Log-probabilities in the answer."""
        if self.logprobs is None and self.echo_logprobs is None and self.prompt_logprobs is None:
            return 0
        prompts, outputs = sum(self.prompt_tokens), sum(self.max_tokens)
        return (
            outputs * self.num_sequences * _entries(self.logprobs)
            + prompts * self.num_returned * _entries(self.echo_logprobs)
            + self._num_scored_prompt_tokens * self.num_prompt_scores * _entries(self.prompt_logprobs)
        )

    @property
    def _num_scored_prompt_tokens(self) -> int:
        return sum(max(0, length + 1 - self.logprob_start_len) for length in self.prompt_tokens)  # token 0 counts too

    @property
    def details_bytes(self) -> int:
        """Bytes of the ids and the log-probabilities, at most."""
        num_ids = 0
        if self.has_ids:
            num_ids = sum(self.prompt_tokens) * self.num_returned + sum(self.max_tokens) * self.num_sequences
        num_bytes = num_ids * ID_BYTES + self.num_scores * SCORE_BYTES
        if self.prompt_logprobs is not None:
            unscored = sum(self.prompt_tokens) - self._num_scored_prompt_tokens
            num_bytes += unscored * self.num_prompt_scores * NULL_BYTES
        return num_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole answer if every sequence becomes as long as it may."""
        per_token = BEAM_TOKEN_BYTES if self.is_beam_search else TEXT_BYTES
        echo = sum(self.prompt_tokens) * self.num_returned * TEXT_BYTES if self.has_echo else 0
        return sum(self.max_tokens) * self.num_sequences * per_token + echo + self.details_bytes

    @property
    def memory_bytes(self) -> int:
        """What the router holds for the request: its prompts, and the log-probabilities of its answer.

        Those of the output are counted for `KEPT_TOKENS`, and not for a stream, which sends them as they come.
        """
        prompts = sum(self.prompt_tokens)
        scores = self._num_scored_prompt_tokens * max(_entries(self.echo_logprobs), _entries(self.prompt_logprobs))
        num_bytes = scores * max(SCORE_MEMORY_BYTES, self.num_sequences * PACKED_SCORE_BYTES)
        if not self.is_stream:
            kept = sum(min(each, KEPT_TOKENS) for each in self.max_tokens)
            num_bytes += kept * self.num_sequences * _entries(self.logprobs) * SCORE_MEMORY_BYTES
        return prompts * PROMPT_TOKEN_BYTES + num_bytes

    def tokens_that_fit(self, limit_bytes: int) -> int:
        """How long the outputs may be at most within the limit; 0 or less if the rest of the answer exceeds it."""
        without = msgspec.structs.replace(self, max_tokens=[0] * len(self.max_tokens))
        with_one = msgspec.structs.replace(self, max_tokens=[1] * len(self.max_tokens))
        return (limit_bytes - without.total_bytes) // (with_one.total_bytes - without.total_bytes)


def _entries(num_alternatives: int | None) -> int:
    return 0 if num_alternatives is None else num_alternatives + 1


def check_answer(shape: AnswerShape, limit_bytes: int) -> None:
    """Raises 400 with the numbers if the answer may exceed the limit."""
    if shape.total_bytes <= limit_bytes:
        return
    prompts, choices = len(shape.prompt_tokens), shape.num_sequences
    raise ApiError(
        f"The answer may take {shape.total_bytes} bytes, and at most {limit_bytes} are allowed: {prompts} prompts with "
        f"{sum(shape.prompt_tokens)} tokens, {choices} choices each with up to {max(shape.max_tokens)} tokens, and "
        f"{shape.num_scores} log-probabilities. Ask for fewer prompts, choices, tokens or log-probabilities at once",
        param=_param(shape),
        code="answer_too_large",
    )


def _param(shape: AnswerShape) -> str:
    """The parameter that contributes most."""
    if shape.num_scores * SCORE_BYTES * 2 > shape.total_bytes:
        return "prompt_logprobs" if shape.logprobs is None else "logprobs"
    return "n" if shape.num_sequences > 1 else "prompt" if len(shape.prompt_tokens) > 1 else "max_tokens"
