"""What becomes of a preempted sequence's K/V, as a pure function of what either way is estimated to take.

Recomputation pays for the tokens whose K/V is gone by the time the sequence is resumed; swapping pays for copying the
blocks to the host, and those that are gone back (Kwon et al., SOSP 2023, sections 4.5 and 7.3). Not everything goes:
blocks that other running sequences share stay, and of the others the prefix cache keeps what nobody needed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.scheduler_settings import Preemption
from kvrelay.scheduling.step_cost import StepCost, pairs

COPY_BLOCK_S = 25e-6
"""Where no copy was measured: 100 KB at 4 GB/s."""
WEIGHT = 0.25
"""Of the latest observation in a running mean."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence about to lose its blocks. Lengths in tokens; `num_shared`: of its prefix that others hold, too."""

    num_computed: int
    num_shared: int
    num_new_blocks: int  # that the swap space does not have yet

    def num_lost(self, lost_share: float, block_size: int) -> int:
        """Tokens whose K/V will be gone, if `lost_share` of the blocks that nobody else holds go, last ones first."""
        num_own_blocks = self.num_computed // block_size - self.num_shared // block_size
        return self.num_computed - self.num_shared - int((1 - lost_share) * num_own_blocks) * block_size


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds."""

    recompute_s: float
    out_s: float
    back_s: float

    @property
    def gain_s(self) -> float:
        """What swapping saves; negative where it costs more."""
        return self.recompute_s - self.out_s - self.back_s

    @property
    def gain_of_copy_s(self) -> float:
        """What a copy that is made already saves."""
        return self.recompute_s - self.back_s


def estimate(preempted: Preempted, cost: StepCost, block_s: float, lost_share: float, block_size: int) -> Estimate:
    """What each way takes. `block_s`: copying a block, one way. A step's fixed cost counts for neither: others run."""
    num_lost = preempted.num_lost(lost_share, block_size)
    position = preempted.num_computed - num_lost
    recompute_s = cost.token_s * num_lost + cost.pair_s * pairs(position, num_lost)
    return Estimate(recompute_s, block_s * preempted.num_new_blocks, block_s * blocks_for(num_lost, block_size))


def prefers_swap(preemption: Preemption, estimate: Estimate, given_up_s: float) -> bool:
    """Whether to copy. `given_up_s`: what the copies are worth that have to be given up for it."""
    return preemption == "swap" or (preemption == "auto" and estimate.gain_s > given_up_s)


class RunningMean:
    """An exponentially weighted mean that starts from a guess."""

    def __init__(self, guess: float) -> None:
        self.value = guess

    def observe(self, value: float) -> None:
        """One more observation."""
        self.value += WEIGHT * (value - self.value)
