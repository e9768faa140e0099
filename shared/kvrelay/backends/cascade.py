"""Plans cascade attention: which decoding rows of a step read a common prefix of blocks together, once for all of them.

Rows with the same leading blocks form groups. A first kernel attends with the queries of a group over its shared
blocks, a second one with each row's query over the rest of its own blocks. Both also return the log-sum-exp of the
scores, by which the two outputs are merged into the result of one softmax over all keys. Ye et al., "Cascade Inference:
Memory Bandwidth Efficient Shared Prefix Batch Decoding", 2024; Juravsky et al., "Hydragen: High-Throughput LLM
Inference with Shared Prefixes", 2024. This module decides, on plain arrays, which groups to form and when that pays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.backends.backend import Int32Array
from kvrelay.backends.paging import PagedRows

# Times as the bytes that a GPU with 3.3 TB/s reads meanwhile. From the data sheet and known launch times; not measured
# here yet.
_STEP_BYTES = 32 * 2**20  # two more kernels: 10 us a layer
_GRAPH_BYTES = 512 * 2**20  # the host launches a layer's kernels one by one: 160 us


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """Costs of sharing. The unit is one token of one layer whose keys and values are not read again."""

    row_tokens: int
    """Cost per row of a group: its second output is written, read and merged."""
    step_tokens: int
    """Cost per step: two more kernels run, one of them to merge."""
    graph_tokens: int = 0
    """Cost per step that would otherwise be a CUDA graph: it is launched kernel by kernel."""

    @classmethod
    def of(cls, group: int, token_bytes: int) -> CascadeCosts:
        """The costs for layers with `group` query heads per KV head, and `token_bytes` of keys and values per token.

        A row's output has half of `token_bytes` times `group` bytes (twice that many heads for 16 bits beside a pool of
        8). It is written once more, and to merge, both outputs are read and one is written.
        """
        return cls(2 * group, -(-_STEP_BYTES // token_bytes), -(-_GRAPH_BYTES // token_bytes))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows, at least two and in ascending order, whose first `num_blocks` blocks are the same."""

    rows: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """The decoding rows of a step, reordered: the rows of each group are adjacent, ungrouped rows come last."""

    order: Int32Array  # [rows], the row at each place
    prefixes: PagedRows  # one row per group: the queries of the group's rows, the pages of the shared blocks
    suffixes: PagedRows  # pages by place: those behind the shared blocks
    saved_tokens: int

    @property
    def num_shared(self) -> int:
        """Number of rows in groups. They occupy the first places."""
        return int(self.prefixes.query_starts[-1])

    @property
    def keeps_order(self) -> bool:
        """Returns whether the order of the rows is unchanged."""
        return bool((self.order[:-1] < self.order[1:]).all())


def plan_cascade(tables: Int32Array, num_keys: Int32Array, block_size: int, costs: CascadeCosts) -> CascadePlan | None:
    """Returns the plan for decoding rows, or None if sharing saves less than it costs.

    `tables` are their block tables `[rows, longest]`, padded with anything. `num_keys` is the number of tokens that
    each row sees, `[rows]`, including the one that it writes. Time: rows times blocks.
    """
    groups = find_groups(tables, num_keys, block_size, costs)
    saved = sum(saved_tokens(len(group.rows), group.num_blocks, block_size, costs) for group in groups)
    return _lay_out(tables, num_keys, block_size, groups, saved) if groups and saved >= costs.step_tokens else None


def saved_tokens(num_rows: int, num_blocks: int, block_size: int, costs: CascadeCosts) -> int:
    """The tokens that a group saves: its shared tokens are read once instead of once per row."""
    return (num_rows - 1) * num_blocks * block_size - num_rows * costs.row_tokens


def find_groups(tables: Int32Array, num_keys: Int32Array, block_size: int, costs: CascadeCosts) -> list[SharedPrefix]:
    """Returns the groups worth forming. Each row is in at most one.

    Prefixes form a forest, with rows as leaves and a node wherever rows diverge. From the bottom up, a node becomes
    either one group of all its rows, or keeps the groups of its children and forms a group of the remaining rows,
    whichever saves more. The block that a row writes into is never shared.
    """
    num_full = (num_keys - 1) // block_size  # each row's blocks without the one that receives its token
    firsts, counts = np.unique(tables[num_full > 0, 0], return_counts=True)
    rows = np.flatnonzero((num_full > 0) & np.isin(tables[:, 0], firsts[counts > 1]))
    # Upper bound of the savings: the full blocks of each row but one.
    reach = int(num_full[rows].sum()) - int(num_full[rows].max(initial=0))
    if reach * block_size < max(costs.step_tokens, 1):
        return []
    width = int(num_full[rows].max())
    full = np.where(np.arange(width) < num_full[rows, None], tables[rows, :width], -1)
    order, common = _sort_rows(full)
    return _group_sorted(rows[order], common, block_size, costs)


def _sort_rows(full: Int32Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorts rows so that common prefixes are adjacent. Returns the order, and how many blocks each row shares with the
    next.

    `full` holds -1 behind a row's blocks.
    """
    width = full.shape[1]
    # As byte strings they sort in one pass. Any consistent order will do.
    order = np.argsort(full.view(np.dtype((np.void, width * full.itemsize)))[:, 0], kind="stable")
    full = full[order]
    parted = (full[:-1] != full[1:]) | (full[1:] < 0)
    common = np.zeros(len(full), np.int64)
    common[:-1] = np.where(parted.any(axis=1), parted.argmax(axis=1), width)
    return order, common


class _Node:
    """Rows that share `num_blocks` blocks, while rows below it are still being added."""

    __slots__ = ("free", "groups", "num_blocks", "rows", "saved")

    def __init__(self, num_blocks: int, *rows: int) -> None:
        self.num_blocks = num_blocks
        self.rows = list(rows)
        self.free = list(rows)  # rows in no group
        self.groups: list[SharedPrefix] = []
        self.saved = 0

    def add(self, child: _Node) -> None:
        self.rows += child.rows
        self.free += child.free
        self.groups += child.groups
        self.saved += child.saved

    def close(self, block_size: int, costs: CascadeCosts) -> None:
        """Chooses the groups, when all rows have been added."""
        together = saved_tokens(len(self.rows), self.num_blocks, block_size, costs)
        left = saved_tokens(len(self.free), self.num_blocks, block_size, costs) if len(self.free) > 1 else 0
        if together > max(0, self.saved + max(0, left)):
            self.groups, self.saved, self.free = [self._group(self.rows)], together, []
        elif left > 0:
            self.groups, self.saved, self.free = [*self.groups, self._group(self.free)], self.saved + left, []

    def _group(self, rows: list[int]) -> SharedPrefix:
        return SharedPrefix(tuple(sorted(rows)), self.num_blocks)


def _group_sorted(
    rows: NDArray[np.int64], common: NDArray[np.int64], block_size: int, costs: CascadeCosts
) -> list[SharedPrefix]:
    """Walks the forest in the order of its leaves. A stack holds the open nodes, the deepest on top."""
    groups: list[SharedPrefix] = []
    stack: list[_Node] = []
    for row, depth in zip(rows.tolist(), common.tolist(), strict=True):
        node = _Node(0, row)
        while stack and stack[-1].num_blocks > depth:
            stack[-1].add(node)
            node = stack.pop()
            node.close(block_size, costs)
        if stack and stack[-1].num_blocks == depth:
            stack[-1].add(node)
        elif depth:
            parent = _Node(depth)
            parent.add(node)
            stack.append(parent)
        else:
            groups += node.groups
    return groups


def _lay_out(
    tables: Int32Array, num_keys: Int32Array, block_size: int, groups: list[SharedPrefix], saved: int
) -> CascadePlan:
    grouped = np.concatenate([np.array(group.rows, np.int64) for group in groups])
    depths = np.array([group.num_blocks for group in groups], np.int64)
    sizes = np.array([len(group.rows) for group in groups], np.int64)
    alone = np.setdiff1d(np.arange(len(tables)), grouped)
    order = np.concatenate([grouped, alone]).astype(np.int32)
    skipped = np.concatenate([np.repeat(depths, sizes), np.zeros(len(alone), np.int64)])
    num_pages = -(-num_keys[order] // block_size)
    columns = np.arange(tables.shape[1])
    behind = (columns >= skipped[:, None]) & (columns < num_pages[:, None])
    return CascadePlan(
        order=order,
        prefixes=PagedRows(
            query_starts=_starts(sizes),
            page_starts=_starts(depths),
            page_ids=np.concatenate([tables[group.rows[0], : group.num_blocks] for group in groups]),
            last_page_lens=np.full(len(groups), block_size, np.int32),
        ),
        suffixes=PagedRows(
            query_starts=np.arange(len(tables) + 1, dtype=np.int32),
            page_starts=_starts(num_pages - skipped),
            page_ids=tables[order][behind],
            last_page_lens=((num_keys[order] - 1) % block_size + 1).astype(np.int32),
        ),
        saved_tokens=saved,
    )


def _starts(lengths: NDArray[np.int64]) -> Int32Array:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts
