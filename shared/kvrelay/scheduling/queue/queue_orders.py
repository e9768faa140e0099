"""Orders of the waiting queue. Sequences of equal priority go by arrival.

- `fcfs`: first come, first served.
- `lpm`: longest cached prefix first (Zheng et al., SGLang, NeurIPS 2024, section 3). Offline it visits the tree of
  prompts depth first, which gives the best possible hit rate (their theorem 3.1).
- `dfs_weight`: depth first through the tree of waiting prompts, the branch with most of them first (SGLang's order for
  data-parallel workers).
- `priority`: the smallest number first, as in vLLM.
- `sjf`: shortest job first, by prompt tokens to compute plus output tokens to sample at most.
- `random`: by a hash of the sequence's key, as a baseline for the other orders.

No order starves a sequence: `WaitingQueue` bounds the wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.kv.hashing import BlockHash, num_in_common
from kvrelay.scheduling.scheduler_settings import QueueOrderName
from kvrelay.scheduling.sequence import Sequence

Priority = Callable[[Sequence, int], int]
"""(sequence, number of its cached blocks) -> priority; the smallest first. Must not fall as cached blocks get fewer."""


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """`reads_cache`: the priority depends on cached blocks. `depth_first`: `depth_first` gives the priorities.
    `precedes_shares`: the priority decides before fair shares do."""

    name: QueueOrderName
    priority: Priority
    reads_cache: bool = False
    depth_first: bool = False
    precedes_shares: bool = False


def _arrival(sequence: Sequence, num_cached_blocks: int) -> int:
    return 0


def _cached_prefix(sequence: Sequence, num_cached_blocks: int) -> int:
    return -num_cached_blocks


def _priority(sequence: Sequence, num_cached_blocks: int) -> int:
    return sequence.origin.priority


def _job(sequence: Sequence, num_cached_blocks: int) -> int:
    num_to_draw = 0 if sequence.prefill_only else sequence.sampling.max_tokens - sequence.num_output
    return sequence.num_tokens - num_cached_blocks * sequence.table.block_size + num_to_draw


def _hash_of_key(sequence: Sequence, num_cached_blocks: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(sequence.key).encode(), digest_size=8).digest(), "little")


ORDERS: dict[QueueOrderName, QueueOrder] = {
    order.name: order
    for order in (
        QueueOrder("fcfs", _arrival),
        QueueOrder("lpm", _cached_prefix, reads_cache=True),
        QueueOrder("dfs_weight", _arrival, depth_first=True),
        QueueOrder("priority", _priority, precedes_shares=True),
        QueueOrder("sjf", _job, reads_cache=True),
        QueueOrder("random", _hash_of_key),
    )
}


def depth_first(chains: Seq[Seq[BlockHash]]) -> list[int]:
    """Indices of the chains, depth first through their tree: the branch with most chains first, then the first one.

    O(number of chains * branchings above a chain * log blocks): shared stretches are bisected, not walked.
    """
    order: list[int] = []
    stack = [(list(range(len(chains))), 0)]
    while stack:
        group, depth = stack.pop()
        if len(group) == 1 or (group and len(chains[group[0]]) < depth):
            order += group
            continue
        depth = num_in_common([chains[index] for index in group], depth)
        branches: dict[BlockHash | None, list[int]] = {}
        for index in group:
            chain = chains[index]
            branches.setdefault(chain[depth] if depth < len(chain) else None, []).append(index)
        heaviest_last = sorted(branches.values(), key=lambda branch: (len(branch), -branch[0]))
        stack += [(branch, depth + 1) for branch in heaviest_last]
    return order
