"""FlashInfer on the pretended CUDA device: plans go to it from pinned memory that the next plan overwrites.

What is checked of a call, and what is computed, is that of `fake_flashinfer`; the order in which it happens is that of
the sources: `plan` writes to a wrapper's pinned memory and copies from there without waiting, `run` launches kernels
that read it on the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.fakes import fake_flashinfer
from tests.fakes.fake_flashinfer import __version__
from tests.fakes.flashinfer_signatures import check_call
from tests.fakes.pretended_cuda import launch

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "__version__",
    "append_paged_kv_cache",
]
_PLAN_WORDS = 1024


class _OnDevice(fake_flashinfer._Wrapper):
    """What both wrappers do on a device."""

    suffix = "buffer"  # of the names of buffers for graphs

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        device = self._workspace.device
        self._pinned = torch.empty(_PLAN_WORDS, dtype=torch.int32, pin_memory=True)
        self._plan_there = torch.empty(_PLAN_WORDS, dtype=torch.int32, device=device)
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._there: tuple[torch.Tensor, ...] = ()
        if options.get("use_cuda_graph"):
            names = ("indptr", "indices", "last_page_len")
            self._buffers = tuple(options[f"paged_kv_{name}_{self.suffix}"] for name in names)
            assert all(each.dtype == torch.int32 and each.device == device for each in self._buffers)

    def reset_workspace_buffer(self, *args: Any) -> None:
        check_call(f"{self.recorded_as}.reset_workspace_buffer", *args)
        self._workspace, plan_memory = args
        self._plan_there = plan_memory.view(torch.int32)[:_PLAN_WORDS]

    def _set_plan(
        self,
        indptr: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        shape: tuple[int, int, int, int],
        options: dict[str, Any],
    ) -> None:
        super()._set_plan(indptr, pages, shape, options)
        device = self._workspace.device
        page_starts, page_ids, last_page_lens = pages
        num_rows = len(last_page_lens)
        self._pinned[0], self._pinned[1 : num_rows + 1] = num_rows, page_starts.diff()
        self._plan_there.copy_(self._pinned, non_blocking=True)
        if not self._buffers:
            self._there = tuple(each.to(device, non_blocking=True) for each in (indptr, *pages))
            return
        if num_rows != len(self._buffers[2]):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        self._buffers[0].copy_(page_starts, non_blocking=True)
        self._buffers[1][: len(page_ids)].copy_(page_ids, non_blocking=True)
        self._buffers[2].copy_(last_page_lens, non_blocking=True)
        self._there = torch.arange(num_rows + 1, dtype=torch.int32, device=device), *self._buffers

    def run(self, *args: Any, **options: Any) -> Any:
        check_call(f"{self.recorded_as}.run", *args, **options)
        q, (keys, values) = args
        plan = self._plan
        num_qo_heads, num_kv_heads, head_dim, page_size = plan["shape"]
        assert keys.stride() == values.stride() and keys.stride(-1) == q.stride(-1) == 1
        assert tuple(keys.shape[1:]) == (num_kv_heads, page_size, head_dim)
        assert tuple(q.shape) == (int(plan["indptr"][-1]), num_qo_heads, head_dim)
        assert q.dtype == plan["q_data_type"] and keys.dtype == plan["kv_data_type"]
        out = options["out"]
        assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        numbers = {name: plan[name] for name in ("sm_scale", "window_left", "logits_soft_cap")}
        numbers["causal"] = plan.get("causal", True)
        launch(_attend, q, keys, values, self._there, self._plan_there, numbers, out, lse)
        return (out, lse) if options.get("return_lse") else out


class BatchPrefillWithPagedKVCacheWrapper(_OnDevice, fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    suffix = "buf"


class BatchDecodeWithPagedKVCacheWrapper(_OnDevice, fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    pass


def append_paged_kv_cache(*args: Any) -> None:
    launch(fake_flashinfer.append_paged_kv_cache, *args)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    planned: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    plan: torch.Tensor,
    numbers: dict[str, Any],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    query_starts, page_starts, page_ids, last_page_lens = (each.tolist() for each in planned)
    num_rows, page_size, group = len(last_page_lens), keys.shape[2], q.shape[1] // keys.shape[1]
    work = plan[: num_rows + 1].tolist()
    assert work == [num_rows, *planned[1].diff().tolist()], "the plan is of another step"
    left, cap = numbers["window_left"], numbers["logits_soft_cap"]
    for row in range(num_rows):
        pages = page_ids[page_starts[row] : page_starts[row + 1]]
        num_keys = (len(pages) - 1) * page_size + last_page_lens[row]
        row_keys, row_values = (
            cache[pages].transpose(1, 2).flatten(0, 1)[:num_keys].double().repeat_interleave(group, 1)
            for cache in (keys, values)
        )
        for token in range(query_starts[row], query_starts[row + 1]):
            at = num_keys - (query_starts[row + 1] - token)
            seen = slice(0 if left < 0 else max(0, at - left), at + 1 if numbers["causal"] else num_keys)
            scores = (q[token].double() * row_keys[seen]).sum(-1) * numbers["sm_scale"]
            scores = cap * torch.tanh(scores / cap) if cap else scores
            out[token] = torch.einsum("kh,khd->hd", scores.softmax(0), row_values[seen])
            lse[token] = scores.logsumexp(0) / math.log(2)
