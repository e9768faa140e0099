"""The request fields of beam searches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator

from kvrelay.protocol.sampling import BeamSpec
from kvrelay_router.http.api_error import wrong
from kvrelay_router.openai.schema.generation_fields import MAX_CHOICES, Flag
from kvrelay_router.openai.schema.grammar_fields import GrammarFields
from kvrelay_router.openai.schema.parsing import wrong_type

MAX_LENGTH_PENALTY = 5.0

NO_BEAMS: dict[str, tuple[object, ...]] = {"length_penalty": (None, 1.0), "early_stopping": (None, False)}
"""Values that are harmless without a beam search."""

UNUSED_VALUES: dict[str, float] = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0}
"""Harmless values of the sampling fields. A beam search does not sample, so other values are mistakes."""


def _early_stopping(value: Any, _: Any) -> Any:
    """Replaces pydantic's messages, of which there would be one for each type of the union."""
    if value is None or value == "never" or isinstance(value, bool):
        return value
    raise wrong_type("it must be true, false or 'never'")


class BeamFields(GrammarFields):
    """vLLM's fields: `n` texts of `best_of` beams are returned; `best_of` defaults to `n`."""

    use_beam_search: Flag = False
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    early_stopping: Annotated[bool | Literal["never"] | None, WrapValidator(_early_stopping)] = None

    @property
    def beams(self) -> BeamSpec | None:
        """The beam search to run, if any."""
        if not self.use_beam_search:
            return None
        return BeamSpec(
            width=self.best_of or self.n,
            num_returned=self.n,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=bool(self.early_stopping) if self.early_stopping != "never" else "never",
        )

    @property
    def num_sequences(self) -> int:
        """The number of texts to generate for each prompt."""
        return self.n if self.use_beam_search else self.best_of or self.n

    def check_beams(self, *, wants_logprobs: bool, max_tokens: int | None) -> None:
        """Raises ApiError for fields that contradict a beam search, or that need one."""
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "scores of a prompt cannot be streamed")
        if self.logprob_start_len is not None and self.prompt_logprobs is None:
            raise wrong("logprob_start_len", "it needs 'prompt_logprobs'")
        if self.logprob_token_ids and (self.use_beam_search or not wants_logprobs):
            reason = "a beam search has none" if self.use_beam_search else "it needs 'logprobs'"
            raise wrong("logprob_token_ids", reason)
        if self.best_of is not None and self.best_of < self.n:
            raise wrong("best_of", "it must not be less than 'n'")
        if not self.use_beam_search:
            for name, harmless in NO_BEAMS.items():
                if getattr(self, name) not in harmless:
                    raise wrong(name, "it needs 'use_beam_search' to be true")
            return
        for name, unused in UNUSED_VALUES.items():
            if getattr(self, name) not in (None, unused):
                raise wrong(name, f"a beam search draws nothing: leave it out, or set it to {unused:g}")
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise wrong(name, "the tokens of a beam search cannot be limited; 'logit_bias' can make them unlikely")
        if self.stop:
            raise wrong("stop", "stop strings do not end beams; 'stop_token_ids' do")
        if self.prompt_logprobs is not None:
            raise wrong("prompt_logprobs", "a beam search does not score its prompt")
        if wants_logprobs:
            raise wrong("logprobs", "a beam search has no log-probabilities of tokens, but a score of each text")
        if max_tokens == 0:
            raise wrong("max_tokens", "a beam search needs at least 1")
