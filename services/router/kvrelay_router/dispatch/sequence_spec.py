"""The part of a sequence that is the same for all its attempts."""

from __future__ import annotations

import msgspec

from kvrelay.protocol.messages import Prompt, pack_tokens
from kvrelay.protocol.sampling import Sampling

MOST_SCORES_WITH_TOKEN = 64
"""So many log-probabilities of a prompt come with the first token. More are packed, and come in messages of their own:
that takes longer for few of them."""


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that all attempts share. `prompt` is packed once for all sequences of a request, and `ending` is
    what follows it in this one; `num_prompt_tokens` counts both."""

    sequence: int
    prompt: bytes
    ending: bytes = b""
    num_prompt_tokens: int
    sampling: Sampling
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    session: str = ""
    text_owner: str | None = None
    num_samples: int = 1  # sequences of the request with the same prompt
    opening: tuple[int, ...] = ()  # see `GenerateRequest`
    max_attempts: int = 3  # only attempts that count, see `RetryBudget`

    def prompt_after(self, output: list[int], timeout_s: float) -> Prompt:
        """Returns the prompt of an attempt that goes on after these output tokens, of earlier attempts or of
        the opening."""
        sampling = self.sampling
        num_scores = sampling.num_prompt_scores(self.num_prompt_tokens) * (1 + (sampling.prompt_logprobs or 0))
        scores_in_parts = num_scores > MOST_SCORES_WITH_TOKEN
        if output and sampling.prompt_logprobs is not None:  # the scores were delivered with the first token
            sampling, scores_in_parts = msgspec.structs.replace(sampling, prompt_logprobs=None), False
        return Prompt(
            tokens=b"".join((self.prompt, self.ending, pack_tokens(output))) if output or self.ending else self.prompt,
            num_output=len(output),
            sampling=sampling,
            scores_in_parts=scores_in_parts,
            cache_salt=self.cache_salt,
            priority=self.priority,
            tenant=self.tenant,
            weight=self.weight,
            session=self.session,
            text_owner=self.text_owner,
            num_samples=self.num_samples,
            timeout_s=timeout_s,
        )
