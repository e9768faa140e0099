"""FlashInfer's paged kernels by their documentation, on the CPU in float64: what they refuse, and what they compute.

Written from the documented meaning of the arguments alone; it shares no code with kvrelay's backends.
"""

from __future__ import annotations

from typing import Any

import torch

KVPair = tuple[torch.Tensor, torch.Tensor]


class _Wrapper:
    planned = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.options = options
        self._plan: dict[str, Any] = {}

    def _set_plan(
        self,
        indptr: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        shape: tuple[int, int, int, int],
        options: dict[str, Any],
    ) -> None:
        page_indptr, page_indices, last_page_len = pages
        num_qo_heads, num_kv_heads, head_dim, page_size = shape
        for tensor in (indptr, *pages):
            assert tensor.dtype == torch.int32
            assert tensor.dim() == 1
            assert tensor.is_contiguous()
            assert tensor.device.type == "cpu"  # a plan is made on the host
        assert len(indptr) == len(page_indptr) == len(last_page_len) + 1
        assert indptr[0] == page_indptr[0] == 0
        assert len(page_indices) == int(page_indptr[-1])
        assert bool((page_indptr.diff() > 0).all())
        assert 0 < int(last_page_len.min()) <= int(last_page_len.max()) <= page_size
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim in (64, 128, 256)
        known = {"causal", "sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"}
        assert set(options) <= known
        self._plan = {"indptr": indptr, "pages": pages, "shape": shape, **options}
        type(self).planned += 1

    def run(self, q: torch.Tensor, paged_kv_cache: KVPair, *, out: torch.Tensor | None = None) -> torch.Tensor:
        plan = self._plan
        keys, values = paged_kv_cache
        num_qo_heads, num_kv_heads, head_dim, page_size = plan["shape"]
        assert keys.shape == values.shape
        assert keys.stride() == values.stride()
        assert keys.stride(-1) == q.stride(-1) == 1
        assert tuple(keys.shape[1:]) == (page_size, num_kv_heads, head_dim)
        assert q.shape == (int(plan["indptr"][-1]), num_qo_heads, head_dim)
        assert q.dtype == plan["q_data_type"]
        assert keys.dtype == plan["kv_data_type"]
        assert q.dtype in (torch.float16, torch.bfloat16)
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        assert out.shape == q.shape
        assert out.is_contiguous()
        page_indptr, page_indices, last_page_len = (tensor.long() for tensor in plan["pages"])
        for row in range(len(last_page_len)):
            pages = page_indices[page_indptr[row] : page_indptr[row + 1]]
            num_keys = (len(pages) - 1) * page_size + int(last_page_len[row])
            first, last = int(plan["indptr"][row]), int(plan["indptr"][row + 1])
            row_keys, row_values = (cache[pages].flatten(0, 1)[:num_keys].double() for cache in (keys, values))
            for token in range(first, last):
                # A causal query is one of the last: the row's final query sees all of its keys.
                at = num_keys - (last - token) if plan.get("causal", True) else num_keys - 1
                left = plan["window_left"]
                start = 0 if left < 0 else max(0, at - left)
                out[token] = self._attend(q[token].double(), row_keys[start : at + 1], row_values[start : at + 1])
        return out

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        num_qo_heads, num_kv_heads, _, _ = self._plan["shape"]
        spread = num_qo_heads // num_kv_heads
        keys, values = keys.repeat_interleave(spread, 1), values.repeat_interleave(spread, 1)
        scores = (query * keys).sum(-1) * self._plan["sm_scale"]
        cap = self._plan["logits_soft_cap"]
        if cap:
            scores = cap * torch.tanh(scores / cap)
        return torch.einsum("kh,khd->hd", scores.softmax(0), values)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        options.setdefault("causal", False)
        self._set_plan(qo_indptr, pages, (num_qo_heads, num_kv_heads, head_dim_qk, page_size), options)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert "causal" not in options
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._set_plan(one_each, (indptr, indices, last_page_len), shape, options)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: KVPair,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    keys, values = paged_kv_cache
    assert kv_layout == "NHD"
    assert keys.stride() == values.stride()
    assert append_key.dtype == append_value.dtype == keys.dtype
    assert append_key.stride(-1) == append_value.stride(-1) == 1
    for tensor in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert tensor.dtype == torch.int32
    page_size = keys.shape[1]
    for token, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        length = (int(kv_indptr[row + 1] - kv_indptr[row]) - 1) * page_size + int(kv_last_page_len[row])
        assert 0 <= position < length
        page = int(kv_indices[int(kv_indptr[row]) + position // page_size])
        keys[page, position % page_size] = append_key[token]
        values[page, position % page_size] = append_value[token]
