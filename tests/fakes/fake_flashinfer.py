"""FlashInfer's paged kernels by their documentation and source, on the CPU in float64: what they refuse and compute.

It shares no code with kvrelay's backends. Every call is held against the recorded signatures of all releases, and
against the limits of the kernels: a block of threads, the host's part of a plan, the room in the workspace.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.fakes.flashinfer_signatures import check_call

__version__ = "0.7.2.post1"

_MAX_THREADS = 1024
_EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2)


def reserved_bytes(num_sms: int, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """What a plan that splits rows sets aside at most before 0.7.2, for tiles of 128 queries (64 from heads of 256)."""
    tile = 128 if head_dim < 256 else 64
    num_tiles = max(1, 2 * num_sms // num_kv_heads)
    return num_qo_heads * num_tiles * tile * (head_dim + 1) * 4


def _check_threads(num_heads: int, head_dim: int) -> None:
    """A kernel of one thread for eight elements of one token."""
    assert head_dim in (64, 128, 256)
    assert num_heads * head_dim // 8 <= _MAX_THREADS, "invalid configuration: too many threads in a block"


class _Wrapper:
    recorded_as = ""
    planned = 0
    backends = ("auto", "fa2", "fa3")

    def __init__(self, *args: Any, **options: Any) -> None:
        check_call(f"{self.recorded_as}.__init__", *args, **options)
        workspace, kv_layout = args
        assert workspace.dtype == torch.uint8
        assert not workspace[: 1 << 16].count_nonzero()  # asked for by the documentation
        assert kv_layout == "HND"
        assert options.get("backend", "auto") in self.backends
        self.options = options
        self._workspace = workspace
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
        for tensor in (indptr, page_indptr, last_page_len):
            assert tensor.device.type == "cpu"  # a plan is made on the host
        assert page_indices.device == self._workspace.device  # only the kernels read them
        assert len(indptr) == len(page_indptr) == len(last_page_len) + 1
        assert indptr[0] == page_indptr[0] == 0
        assert len(page_indices) == int(page_indptr[-1])
        assert bool((page_indptr.diff() > 0).all())
        assert 0 < int(last_page_len.min()) <= int(last_page_len.max()) <= page_size
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim in (64, 128, 256)
        known = {"causal", "sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"}
        assert set(options) <= {*known, "disable_split_kv"}
        self._plan = {"indptr": indptr.clone(), "pages": pages, "shape": shape, **options}
        type(self).planned += 1

    def run(self, *args: Any, **options: Any) -> Any:
        """The output; with `return_lse` also the base-2 logarithm of each query's sum of exponentials, float32."""
        check_call(f"{self.recorded_as}.run", *args, **options)
        q, (keys, values) = args
        plan = self._plan
        num_qo_heads, num_kv_heads, head_dim, page_size = plan["shape"]
        assert keys.shape == values.shape
        assert keys.stride() == values.stride()
        assert keys.stride(-1) == q.stride(-1) == 1
        assert tuple(keys.shape[1:]) == (num_kv_heads, page_size, head_dim)
        assert q.shape == (int(plan["indptr"][-1]), num_qo_heads, head_dim)
        assert q.dtype == plan["q_data_type"]
        assert keys.dtype == plan["kv_data_type"]
        assert q.dtype in (torch.float16, torch.bfloat16)
        if keys.dtype != q.dtype:
            assert keys.dtype in _EIGHT_BIT, "no kernel mixes other types"
            assert self.options["backend"] == "fa2", "fa3 reads 8-bit keys for 8-bit queries only"
        assert set(options) <= {"out", "return_lse"}
        out = options.get("out")
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        lse = torch.empty(q.shape[:2])
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        page_indptr, page_indices, last_page_len = (tensor.long() for tensor in plan["pages"])
        for row in range(len(last_page_len)):
            pages = page_indices[page_indptr[row] : page_indptr[row + 1]]
            num_keys = (len(pages) - 1) * page_size + int(last_page_len[row])
            first, last = int(plan["indptr"][row]), int(plan["indptr"][row + 1])
            row_keys, row_values = (
                cache[pages].transpose(1, 2).flatten(0, 1)[:num_keys].double() for cache in (keys, values)
            )
            for token in range(first, last):
                # The queries stand where the row's last keys stand, causal or not: so the window is counted.
                at = num_keys - (last - token)
                end = at + 1 if plan.get("causal", True) else num_keys
                left = plan["window_left"]
                start = 0 if left < 0 else max(0, at - left)
                out[token], lse[token] = self._attend(q[token].double(), row_keys[start:end], row_values[start:end])
        return (out, lse) if options.get("return_lse") else out

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_qo_heads, num_kv_heads, _, _ = self._plan["shape"]
        spread = num_qo_heads // num_kv_heads
        keys, values = keys.repeat_interleave(spread, 1), values.repeat_interleave(spread, 1)
        scores = (query * keys).sum(-1) * self._plan["sm_scale"]
        cap = self._plan["logits_soft_cap"]
        if cap:
            scores = cap * torch.tanh(scores / cap)
        return torch.einsum("kh,khd->hd", scores.softmax(0), values), scores.logsumexp(0) / math.log(2)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    recorded_as = "BatchPrefillWithPagedKVCacheWrapper"

    def plan(self, *args: Any, **options: Any) -> None:
        check_call(f"{self.recorded_as}.plan", *args, **options)
        qo_indptr, page_indptr, page_indices, last_page_len, *shape = args
        options.setdefault("causal", False)
        self._set_plan(qo_indptr, (page_indptr, page_indices, last_page_len), tuple(shape), options)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    recorded_as = "BatchDecodeWithPagedKVCacheWrapper"

    def plan(self, *args: Any, **options: Any) -> None:
        check_call(f"{self.recorded_as}.plan", *args, **options)
        page_indptr, page_indices, last_page_len, *shape = args
        assert self.options.get("use_tensor_cores") or shape[0] // shape[1] in (1, 2, 3, 4, 8), "unsupported group"
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._set_plan(one_each, (page_indptr, page_indices, last_page_len), tuple(shape), options)


def append_paged_kv_cache(*args: Any, **options: Any) -> None:
    check_call("append_paged_kv_cache", *args, **options)
    key, value, batch_indices, positions, (keys, values), page_ids, page_starts, last_page_lens, kv_layout = args
    assert kv_layout == "HND"
    assert keys.stride() == values.stride()
    assert key.dtype == value.dtype == keys.dtype, "their bytes are copied as they are"
    assert key.stride(-1) == value.stride(-1) == 1
    assert key.shape[1:] == value.shape[1:] == (keys.shape[1], keys.shape[3])
    _check_threads(*key.shape[1:])
    for tensor in (batch_indices, positions, page_ids, page_starts, last_page_lens):
        assert tensor.dtype == torch.int32
        assert tensor.device == keys.device
        assert tensor.is_contiguous()
    page_size = keys.shape[2]
    for token, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        length = (int(page_starts[row + 1] - page_starts[row]) - 1) * page_size + int(last_page_lens[row])
        assert 0 <= position < length
        page = int(page_ids[int(page_starts[row]) + position // page_size])
        keys[page, :, position % page_size] = key[token]
        values[page, :, position % page_size] = value[token]
