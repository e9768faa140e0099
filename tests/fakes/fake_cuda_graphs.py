"""CUDA graphs on the CPU: what is launched while a recording runs is launched again, over the same memory.

A replay runs no Python of the model: ATen ops and kernels get the very tensors and the very numbers of the recording.
Whatever a recording made is spoilt before each replay, so that nothing is left over that was not computed anew. Asking
for a value is refused, as a stream refuses it that is being captured.
Kernels that are no ATen ops go through `launch`. FlashInfer's wrappers for graphs are written after their
documentation; they share no code with kvrelay's backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvrelay.backends.backend import AttentionParams, NotCapturable, PackedRows
from kvrelay.backends.torch_sdpa import TorchBackend, TorchStep
from kvrelay.engine.run.graphs import CudaGraphRecorder
from tests.fakes import fake_flashinfer
from tests.fakes.fake_flashinfer import __version__
from tests.fakes.flashinfer_signatures import check_call

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "__version__",
    "append_paged_kv_cache",
]

_recording: Recording | None = None


class Recording(TorchDispatchMode):
    """The launches of one capture."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches: list[Callable[[], None]] = []
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        made = [_memory(tensor) not in given for tensor in _tensors(out)]
        outs = _tensors(out)
        self._made += [tensor for tensor, is_new in zip(outs, made, strict=True) if is_new]

        def again() -> None:
            anew = _tensors(func(*args, **kwargs))
            for old, new, is_new in zip(outs, anew, made, strict=True):
                if is_new:
                    old.copy_(new)

        self._launches.append(again)
        return out

    def note(self, launch: Callable[[], None]) -> None:
        self._launches.append(launch)

    def replay(self) -> None:
        for tensor in self._made:
            if tensor.dtype.is_floating_point:
                tensor.fill_(float("nan"))
        for launch in self._launches:
            launch()


def launch(kernel: Callable[..., None], *arguments: Any) -> None:
    """Runs a kernel, which sees its arguments and the memory that they name, and writes to some of it."""

    def run() -> None:
        with _disable_current_modes():
            kernel(*arguments)

    run()
    if _recording is not None:
        _recording.note(run)


class FakeRecorder(CudaGraphRecorder):
    """Counts captures and replays."""

    def __init__(self, _: torch.device | None = None) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def record(self, forward: Callable[[], None]) -> Callable[[], None]:
        global _recording
        forward()
        recording = Recording()
        _recording = recording
        try:
            with recording:
                forward()
        finally:
            _recording = None
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            recording.replay()

        return replay


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# -- a backend for float32, so that tokens can be compared ------------------------------------------------------------


class CapturableTorchBackend(TorchBackend):
    """Plain torch, and fixed steps whose one kernel reads its rows from fixed tables."""

    def fixed_steps(self, pool: torch.Tensor, max_rows: int, max_row_blocks: int) -> Callable[[int], _FixedTorchStep]:
        positions = torch.zeros(max_rows, dtype=torch.int32)
        tables = torch.zeros(max_rows, max_row_blocks, dtype=torch.int32)
        return lambda num_rows: _FixedTorchStep(pool, positions[:num_rows], tables[:num_rows])


class _FixedTorchStep:
    def __init__(self, pool: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> None:
        self._pool = pool
        self._positions = positions
        self._tables = tables

    def replan(self, rows: PackedRows) -> None:
        assert len(rows.positions) == len(self._positions)
        assert rows.query_lens.tolist() == [1] * len(self._positions)
        width = min(rows.block_tables.shape[1], self._tables.shape[1])
        self._positions.copy_(torch.from_numpy(rows.positions))
        self._tables.fill_(-1)
        self._tables[:, :width].copy_(torch.from_numpy(np.ascontiguousarray(rows.block_tables[:, :width])))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        if params.sinks is not None:
            raise NotCapturable("its layers have attention sinks")
        out = torch.empty(query.shape, dtype=query.dtype)
        launch(_attend, self._pool, self._positions, self._tables, layer, query, key, value, params, out)
        return out


def _attend(
    pool: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    rows = PackedRows(np.ones(len(positions), np.int32), positions.numpy(), tables.numpy())
    out.copy_(TorchStep(pool, rows).attend(layer, query, key, value, params))


# -- FlashInfer -------------------------------------------------------------------------------------------------------


class _Fixed(fake_flashinfer._Wrapper):
    """With `use_cuda_graph`, as documented: a fixed batch size, page tables and plans in buffers given once. Rows have
    one token."""

    suffix = "buffer"  # of the buffers' names

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._plan_memory = torch.zeros(4096, dtype=torch.uint8)
        if options.get("use_cuda_graph"):
            names = ("indptr", "indices", "last_page_len")
            self._buffers = tuple(options[f"paged_kv_{name}_{self.suffix}"] for name in names)
            assert all(buffer.dtype == torch.int32 and buffer.is_contiguous() for buffer in self._buffers)
            assert len(self._buffers[0]) == len(self._buffers[2]) + 1

    def reset_workspace_buffer(self, *args: Any) -> None:
        check_call(f"{self.recorded_as}.reset_workspace_buffer", *args)
        self._workspace, self._plan_memory = args
        assert self._workspace.dtype == self._plan_memory.dtype == torch.uint8

    def plan(self, *args: Any, **options: Any) -> None:
        assert _recording is None, "a plan is not captured"
        if not self._buffers:
            return super().plan(*args, **options)  # type: ignore[misc, no-any-return]
        *queries, indptr, indices, last_page_len, _, _, _, _ = args
        shape = args[-4:]
        page_starts, page_ids, last_page_lens = self._buffers
        if len(last_page_len) != len(last_page_lens):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(page_ids):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        page_starts.copy_(indptr)
        last_page_lens.copy_(last_page_len)
        page_ids[: len(indices)].copy_(indices)
        # The base class looks at everything once, as for a plan without graphs.
        super().plan(*queries, indptr.clone(), indices.clone(), last_page_len.clone(), *shape, **options)  # type: ignore[misc]
        assert self._plan["indptr"].tolist() == list(range(len(last_page_len) + 1))
        _plan_of(self._plan_memory, page_starts)[:] = page_starts.diff()  # a piece of work for each page
        return None

    def run(self, *args: Any, **options: Any) -> Any:
        if not self._buffers:
            return super().run(*args, **options)
        check_call(f"{self.recorded_as}.run", *args, **options)
        q, (keys, values) = args
        out = options["out"]
        num_qo_heads, num_kv_heads, head_dim, page_size = self._plan["shape"]
        assert q.shape == out.shape == (len(self._buffers[2]), num_qo_heads, head_dim)
        assert keys.shape[1:] == values.shape[1:] == (num_kv_heads, page_size, head_dim)
        assert q.dtype == out.dtype == self._plan["q_data_type"]
        assert keys.dtype == values.dtype == self._plan["kv_data_type"]
        assert keys.dtype in (q.dtype, torch.float8_e4m3fn, torch.float8_e5m2)
        assert q.stride(-1) == 1 and out.is_contiguous()
        numbers = tuple(self._plan[name] for name in ("sm_scale", "window_left", "logits_soft_cap"))
        launch(_decode, q, keys, values, *self._buffers, self._plan_memory, numbers, out)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Fixed, fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    pass


class BatchPrefillWithPagedKVCacheWrapper(_Fixed, fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    suffix = "buf"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert not self._buffers or len(options["qo_indptr_buf"]) == len(self._buffers[0])


def _plan_of(plan_memory: torch.Tensor, page_starts: torch.Tensor) -> torch.Tensor:
    num_rows = len(page_starts) - 1
    return plan_memory[: 4 * num_rows].view(torch.int32)


def _decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_starts: torch.Tensor,
    page_ids: torch.Tensor,
    last_page_lens: torch.Tensor,
    plan_memory: torch.Tensor,
    numbers: tuple[float, int, float | None],
    out: torch.Tensor,
) -> None:
    scale, window_left, cap = numbers
    num_kv_heads, page_size = keys.shape[1:3]
    planned, group = _plan_of(plan_memory, page_starts), q.shape[1] // num_kv_heads
    assert planned.tolist() == page_starts.diff().tolist(), "the plan is of another step"
    for row in range(len(last_page_lens)):
        pages = page_ids[int(page_starts[row]) : int(page_starts[row + 1])].long()
        length = (len(pages) - 1) * page_size + int(last_page_lens[row])
        first = 0 if window_left < 0 else max(0, length - 1 - window_left)
        row_keys, row_values = (
            cache[pages].transpose(1, 2).flatten(0, 1)[first:length].double().repeat_interleave(group, 1)
            for cache in (keys, values)
        )
        scores = (q[row].double() * row_keys).sum(-1) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        out[row] = torch.einsum("kh,khd->hd", scores.softmax(0), row_values)


def append_paged_kv_cache(*args: Any) -> None:
    launch(fake_flashinfer.append_paged_kv_cache, *args)
