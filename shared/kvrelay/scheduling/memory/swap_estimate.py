"""Estimates whether a preempted sequence's KV is cheaper to recompute or to swap (Kwon et al., SOSP 2023, sections 4.5
and 7.3). A pure function.

Recomputation costs the time for tokens whose KV is lost by the time the sequence is resumed. Swapping costs the time to
copy the blocks to the host, and to copy the lost ones back. Not all KV is lost: blocks that other running sequences
hold stay, and the prefix cache keeps those that were not needed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.scheduler_settings import Preemption
from kvrelay.scheduling.step_cost import StepCost, pairs

COPY_BLOCK_S = 25e-6
"""Used until a copy was measured: 100 KB at 4 GB/s."""
WEIGHT = 0.25
"""Weight of the latest observation in a running mean."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence about to lose its blocks. `num_computed` and `num_shared` are tokens; `num_shared`: the prefix that
    other sequences hold."""

    num_computed: int
    num_shared: int
    num_new_blocks: int  # blocks without a copy in the swap space

    def num_lost(self, lost_share: float, block_size: int) -> int:
        """Returns the number of tokens whose KV is lost if `lost_share` of the blocks that only this sequence holds are
        evicted, the last ones first."""
        num_own_blocks = self.num_computed // block_size - self.num_shared // block_size
        return self.num_computed - self.num_shared - int((1 - lost_share) * num_own_blocks) * block_size


@dataclass(frozen=True, slots=True)
class Estimate:
    """Times in seconds."""

    recompute_s: float
    out_s: float
    back_s: float

    @property
    def gain_s(self) -> float:
        """The time that swapping saves; negative if recomputing is faster."""
        return self.recompute_s - self.out_s - self.back_s

    @property
    def gain_of_copy_s(self) -> float:
        """The time that a copy already made saves."""
        return self.recompute_s - self.back_s


def estimate(preempted: Preempted, cost: StepCost, block_s: float, lost_share: float, block_size: int) -> Estimate:
    """Estimates the time of recomputing and of swapping. `block_s`: seconds to copy a block one way. The fixed cost of
    a step counts for neither, as other sequences run in the same steps."""
    num_lost = preempted.num_lost(lost_share, block_size)
    position = preempted.num_computed - num_lost
    recompute_s = cost.token_s * num_lost + cost.pair_s * pairs(position, num_lost)
    return Estimate(recompute_s, block_s * preempted.num_new_blocks, block_s * blocks_for(num_lost, block_size))


def prefers_swap(preemption: Preemption, estimate: Estimate, dropped_s: float) -> bool:
    """Returns whether to swap. `dropped_s`: the time that is lost with copies which must be dropped to make room."""
    return preemption == "swap" or (preemption == "auto" and estimate.gain_s > dropped_s)


class RunningMean:
    """An exponentially weighted mean with an initial guess."""

    def __init__(self, guess: float) -> None:
        self.value = guess

    def observe(self, value: float) -> None:
        self.value += WEIGHT * (value - self.value)
