"""FlashInfer's kernels for single tokens in CUDA graphs.

Under `use_cuda_graph` a wrapper belongs to one number of rows. The inputs of its kernels beside the pool (the page
table, and the split of the work that `plan` computes on the host) lie in fixed buffers, and the launches depend on the
number of rows alone. `plan` fills the buffers anew for each step, and a captured `run` reads them. `plan` itself is
never captured. Only one graph runs at a time, so all sizes share the buffers of a step, and all steps share the plan
memory of a kind of layer.
"""

from __future__ import annotations

from typing import Any

import torch

from kvrelay.backends.backend import (
    AttentionParams,
    LayerKind,
    NotCapturable,
    PackedRows,
    PoolShape,
    computed_in,
    last_contiguous,
)
from kvrelay.backends.flashinfer_kernels import FlashInferKernels, page_rows

_PLAN_BYTES = 2 * 2**20  # bytes of a split over the device's multiprocessors: some 16 for each of a few thousand pieces
_PLAN_ROW_BYTES = 64  # further bytes for each row of the largest graph
_ALIGNED = 4  # int32 elements in 16 bytes


class FlashInferFixedSteps:
    """The buffers of all fixed steps over a pool."""

    def __init__(self, kernels: FlashInferKernels, pool: torch.Tensor, max_rows: int, max_row_blocks: int) -> None:
        def zeros(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=pool.device)

        self.kernels = kernels
        self.pool = pool
        self.shape = PoolShape(*pool.shape)
        self.max_rows = max_rows
        self.host_query_starts = torch.empty(
            max_rows + 1, dtype=torch.int32, pin_memory=pool.device.type == "cuda"
        ).copy_(torch.arange(max_rows + 1))
        self.query_starts = self.host_query_starts.to(pool.device)
        self.page_starts = zeros(max_rows + 1)
        self.last_page_lens = zeros(max_rows)
        self.positions_and_pages = zeros(aligned(max_rows) + max_rows * max_row_blocks)
        self._plan_memory: dict[LayerKind, torch.Tensor] = {}

    def __call__(self, num_rows: int) -> FlashInferFixedStep:
        return FlashInferFixedStep(self, num_rows)

    def plan_memory(self, kind: LayerKind) -> torch.Tensor:
        """The device memory for the plans of this kind of layer. One step has plans of several kinds at the
        same time."""
        if kind not in self._plan_memory:
            num_bytes = _PLAN_BYTES + _PLAN_ROW_BYTES * self.max_rows
            self._plan_memory[kind] = torch.empty(num_bytes, dtype=torch.uint8, device=self.pool.device)
        return self._plan_memory[kind]


class FlashInferFixedStep:
    """A step of `num_rows` rows of one token."""

    def __init__(self, shared: FlashInferFixedSteps, num_rows: int) -> None:
        pages = aligned(num_rows)
        self._shared = shared
        self._num_rows = num_rows
        self._query_starts = shared.query_starts[: num_rows + 1]
        self._page_starts = shared.page_starts[: num_rows + 1]
        self._last_page_lens = shared.last_page_lens[:num_rows]
        self._positions = shared.positions_and_pages[:num_rows]
        self._page_ids = shared.positions_and_pages[pages:]
        self._host: tuple[torch.Tensor, torch.Tensor, int] | None = None  # page starts, lengths of last pages, pages
        self._wrappers: dict[LayerKind, Any] = {}
        self._dtype = shared.pool.dtype  # dtype of queries; with an 8-bit pool it is taken from the first layer

    def replan(self, rows: PackedRows) -> None:
        paged = page_rows(rows, self._shared.shape.block_size)
        starts, lens, pages = paged.page_starts, paged.last_page_lens, paged.page_ids
        num_lens, num_starts, first_page = aligned(len(lens)), aligned(len(starts)), aligned(self._num_rows)
        # In pinned memory, so that the copies do not wait. The caching host allocator keeps it until they are done.
        pinned = torch.empty(
            num_lens + num_starts + first_page + len(pages),
            dtype=torch.int32,
            pin_memory=self._shared.pool.device.type == "cuda",
        )
        host_lens, host_starts, moving = pinned.split([num_lens, num_starts, first_page + len(pages)])
        host_lens[: len(lens)] = torch.from_numpy(lens)
        host_starts[: len(starts)] = torch.from_numpy(starts)
        filled = moving.numpy()
        filled[: self._num_rows] = rows.positions
        filled[first_page:] = pages
        self._shared.positions_and_pages[: len(moving)].copy_(moving, non_blocking=True)
        self._host = (host_starts[: len(starts)], host_lens[: len(lens)], len(pages))
        self._shared.kernels.await_planned()
        for kind, wrapper in self._wrappers.items():
            self._plan(kind, wrapper)
        self._shared.kernels.note_planned()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `StepAttention.attend`. Raises NotCapturable if the layer has attention sinks."""
        if params.sinks is not None:
            raise NotCapturable("its layers have attention sinks")
        pool, kernels = self._shared.pool, self._shared.kernels
        self._dtype = computed_in(pool, key)
        query = last_contiguous(query, self._dtype)
        kind = LayerKind(query.shape[1], params.scaling, params.sliding_window, params.softcap)
        wrapper = self._wrapper(kind)  # its plan also fills the inputs of `write`
        where = (self._query_starts[:-1], self._positions, self._page_ids, self._page_starts, self._last_page_lens)
        pages = kernels.write(pool, layer, key, value, where)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        wrapper.run(query, pages, out=out)
        return out

    def _wrapper(self, kind: LayerKind) -> Any:
        if kind not in self._wrappers:
            self._wrappers[kind] = self._make_wrapper(kind)
            self._plan(kind, self._wrappers[kind])
            self._shared.kernels.note_planned()
        return self._wrappers[kind]

    def _make_wrapper(self, kind: LayerKind) -> Any:
        num_kv_heads, head_dim = self._shared.shape.num_kv_heads, self._shared.shape.head_dim
        kernels = self._shared.kernels
        if kernels.batch_invariant:
            wrapper = kernels.make_prefill(
                kind,
                num_kv_heads,
                head_dim,
                backend="fa2",
                use_cuda_graph=True,
                qo_indptr_buf=self._query_starts,
                paged_kv_indptr_buf=self._page_starts,
                paged_kv_indices_buf=self._page_ids,
                paged_kv_last_page_len_buf=self._last_page_lens,
            )
        else:
            wrapper = kernels.make_decode(
                kind,
                num_kv_heads,
                head_dim,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self._page_starts,
                paged_kv_indices_buffer=self._page_ids,
                paged_kv_last_page_len_buffer=self._last_page_lens,
            )
        group = kind.num_heads // num_kv_heads
        least_bytes = fixed_workspace_bytes(self._shared.max_rows, num_kv_heads, group, head_dim)
        workspace = kernels.workspace_for(group, head_dim, least_bytes)
        wrapper.reset_workspace_buffer(workspace, self._shared.plan_memory(kind))
        return wrapper

    def _plan(self, kind: LayerKind, wrapper: Any) -> None:
        assert self._host is not None, "a fixed step attends before it is planned"
        page_starts, last_page_lens, num_pages = self._host
        kernels = self._shared.kernels
        shape, options = self._shared.shape, plan_options(kernels, kind, self._dtype, self._shared.pool.dtype)
        queries = []
        if kernels.batch_invariant:
            queries, options["causal"] = [self._shared.host_query_starts[: self._num_rows + 1]], True
        wrapper.plan(
            *queries,
            # The pages are on the device already. From the host, plan would copy them and wait.
            page_starts,
            self._page_ids[:num_pages],
            last_page_lens,
            kind.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            **options,
        )


def fixed_workspace_bytes(num_rows: int, num_kv_heads: int, group: int, head_dim: int) -> int:
    """Bytes that plans for graphs of up to `num_rows` rows reserve for partial results on tensor cores.

    Whatever the lengths, there are at most as many tiles of 16, 64 or 128 queries as all rows need, plus one per row.
    FlashInfer before 0.7.2 counts all queries of a tile for each query head of a group.
    """
    tile = next((tile for tile in (16, 64) if group <= tile), 128)
    num_tiles = -(-num_rows * group // tile) + num_rows
    return num_kv_heads * group * num_tiles * tile * (head_dim + 1) * 4


def plan_options(
    kernels: FlashInferKernels, kind: LayerKind, dtype: torch.dtype, pool_dtype: torch.dtype
) -> dict[str, Any]:
    """The arguments of every plan for a kind of layer, with queries (and outputs) of `dtype`."""
    return {
        **({"disable_split_kv": True} if kernels.batch_invariant else {}),
        "sm_scale": kind.scaling,
        "window_left": kind.window_left,
        "logits_soft_cap": kind.softcap,
        "q_data_type": dtype,
        "kv_data_type": pool_dtype,
    }


def aligned(length: int) -> int:
    """`length` int32 rounded up to 16 bytes."""
    return -(-length // _ALIGNED) * _ALIGNED
