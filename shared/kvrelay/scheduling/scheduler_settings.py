"""Limits and settings of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvrelay.protocol.sampling import SpeculationMethod

QueueOrderName = Literal["fcfs", "lpm", "dfs_weight", "priority", "sjf", "random"]
Chunking = Literal["fixed", "dynamic"]
Retraction = Literal["latest", "least_progress"]
Preemption = Literal["auto", "recompute", "swap"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`token_budget`: tokens a step may hold; `max_running`: sequences that hold blocks at a time."""

    token_budget: int
    max_running: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_running < 1:
            raise ValueError("token_budget and max_running must be at least 1")
        if self.max_running > self.token_budget:
            raise ValueError(
                f"max_running ({self.max_running}) must not exceed token_budget ({self.token_budget}): each running "
                f"decode takes one token of every step"
            )


NUM_SPECULATIVE_TOKENS = 16
"""Maximum guesses for a sequence in one step. Below it the number adapts to how many are accepted."""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """`method` is for requests that choose none. `prompt_lookup_min`: the shortest n-gram that is looked up;
    `prompt_lookup_max`: the longest match that is distinguished from shorter ones. `suffix_cache_tokens`: tokens of
    earlier outputs that are kept for the method "suffix"."""

    method: SpeculationMethod = "off"
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 16
    suffix_cache_tokens: int = 1 << 18


NO_SPECULATION = SpeculationSettings()


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What a policy may be told.

    `queue_starvation_bound`: admissions that a waiting sequence lets pass before it is next, whatever the order.
    `new_token_ratio`: share of the tokens that running sequences may still draw for which admission leaves room, at
    first; 0 leaves none. `retraction`: who is preempted when blocks run out. `preemption`: the KV of a preempted
    sequence is computed again, copied to the host and back, or whichever is estimated to be faster. `num_host_slots`:
    blocks that the host has room for. `host_block_s`: seconds of a block's copy one way, until measured.
    `jump_forward`: steps may bring tokens that grammars force.
    `samples_behind`: the runner can run a step with a constrained sequence behind one that samples a token of it;
    otherwise no step is planned behind such a one.
    `speculation`: which sequences' tokens are guessed, and how many. `pipeline_depth`: parts of the model's pipeline.
    """

    queue_order: QueueOrderName = "fcfs"
    queue_starvation_bound: int = 64
    chunking: Chunking = "fixed"
    new_token_ratio: float = 0.0
    retraction: Retraction = "latest"
    preemption: Preemption = "auto"
    num_host_slots: int = 0
    host_block_s: float = 0.0
    jump_forward: bool = False
    samples_behind: bool = False
    speculation: SpeculationSettings = NO_SPECULATION
    pipeline_depth: int = 1

    @property
    def max_uncommitted(self) -> int:
        """Steps that are planned or in flight at the same time: one for each part of a pipeline, and one behind."""
        return self.pipeline_depth + 1
