"""How many texts a request asks for, and vLLM's fields of a beam search that finds them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator

from kvrelay.protocol.sampling import BeamSpec
from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.parsing import Flag, RequestModel, or_default, wrong_type

MAX_CHOICES = 128
MAX_LENGTH_PENALTY = 5.0

HARMLESS_ALONE: dict[str, tuple[object, ...]] = {"length_penalty": (None, 1.0), "early_stopping": (None, False)}
"""Values that are harmless without a beam search."""
UNUSED_VALUES: dict[str, float] = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0}
"""Harmless values of the sampling fields. A beam search does not sample, so other values are mistakes."""
_LIMITED = "the tokens of a beam search cannot be limited; 'logit_bias' can make them unlikely"
EXCLUDED = {
    "logprob_token_ids": "a beam search has none",
    "allowed_token_ids": _LIMITED,
    "bad_words": _LIMITED,
    "stop": "stop strings do not end beams; 'stop_token_ids' do",
    "prompt_logprobs": "a beam search does not score its prompt",
}


def _early_stopping(value: Any, _: Any) -> Any:
    """Replaces pydantic's messages, of which there would be one for each type of the union."""
    if value is None or value == "never" or isinstance(value, bool):
        return value
    raise wrong_type("it must be true, false or 'never'")


class BeamFields(RequestModel):
    """A beam search returns `n` texts of `best_of` beams; `best_of` defaults to `n`."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), or_default(1)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: Flag = False
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

    @property
    def num_samples(self) -> int:
        """The number of sequences that workers run for each prompt. A beam search is one, whatever its width."""
        return 1 if self.use_beam_search else self.num_sequences

    def check_search(self, *, wants_logprobs: bool, max_tokens: int | None, is_constrained: bool) -> None:
        """Raises ApiError for fields that contradict a beam search, or that need one."""
        if self.best_of is not None and self.best_of < self.n:
            raise wrong("best_of", "it must not be less than 'n'")
        if not self.use_beam_search:
            for name, harmless in HARMLESS_ALONE.items():
                if getattr(self, name) not in harmless:
                    raise wrong(name, "it needs 'use_beam_search' to be true")
            return
        for name, unused in UNUSED_VALUES.items():
            if getattr(self, name) not in (None, unused):
                raise wrong(name, f"a beam search draws nothing: leave it out, or set it to {unused:g}")
        for name, reason in EXCLUDED.items():
            if getattr(self, name) not in (None, []):
                raise wrong(name, reason)
        if wants_logprobs:
            raise wrong("logprobs", "a beam search has no log-probabilities of tokens, but a score of each text")
        if max_tokens == 0:
            raise wrong("max_tokens", "a beam search needs at least 1")
        if is_constrained:
            raise wrong("use_beam_search", "the output of a beam search cannot be constrained")
