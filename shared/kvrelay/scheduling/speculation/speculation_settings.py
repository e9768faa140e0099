"""Settings of drafts."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.protocol.sampling import SpeculationMethod


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """`method` is for requests that choose none. `num_speculative_tokens`: drafts of a sequence in one step, at most.
    `prompt_lookup_min`: the shortest n-gram that is looked up, `prompt_lookup_max`: the longest match that is
    distinguished from shorter ones. `suffix_cache_tokens`: tokens of earlier outputs that are kept for the method
    "suffix"."""

    method: SpeculationMethod = "off"
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 16
    suffix_cache_tokens: int = 1 << 18

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be from 1 to prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        if self.num_speculative_tokens < 1:
            raise ValueError("num_speculative_tokens must be at least 1")
        if self.suffix_cache_tokens < 0:
            raise ValueError(f"suffix_cache_tokens ({self.suffix_cache_tokens}) must be at least 0")


NO_SPECULATION = SpeculationSettings()
