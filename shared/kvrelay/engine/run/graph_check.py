"""Compares captured decoding steps with the same steps launched kernel by kernel, before anything is served.

The capture ran over other tokens, positions and blocks than the check. So a graph that misses a change of its buffers
gives hidden states that differ as much as those of two different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.backends.backend import PackedRows, pad_rows
from kvrelay.engine.load.causal_model import CausalModel
from kvrelay.engine.load.probe import tolerance_of

Replayed = Callable[[NDArray[np.int64], PackedRows], torch.Tensor]
"""Hidden states of a step that is replayed, by its token ids and rows."""
_MOST_CONTEXT_BLOCKS = 64
_ROW_TOKENS = 5  # length of a row with several tokens
_OF_ONE_SIZE = 5.0  # times the tolerance: a small step may contain the one row that rounding changes most


class GraphsDiffer(ValueError):
    """Captured steps give different results. The message has the size and the difference."""


@torch.inference_mode()
def check_graphs(sizes: Sequence[int], replayed: Replayed, model: CausalModel, pool: torch.Tensor) -> None:
    """Runs one step of each captured size both ways over `pool`. Overwrites the pool's blocks and leaves zeros. Raises
    GraphsDiffer if hidden states differ by more than the dtype's rounding."""
    rng = np.random.default_rng(0)
    tolerance = tolerance_of(model.layout)
    most = min(sizes[-1], len(pool) - 2)  # one block for the shared context, one scratch block
    if most < 1:
        return
    for block in pool[: most + 1]:
        block.copy_(torch.randn(block.shape, device=pool.device))  # torch has no random 8-bit floats
    errors = []
    for size in sizes:
        token_ids, rows = _step(rng, min(size, most), model, model.layout.block_size)
        found = _errors(replayed, model, pool, token_ids, rows, size)
        if not found.mean() <= _OF_ONE_SIZE * tolerance:
            raise _differ(f"steps of {size} tokens", found)
        errors.append(found)
    pool[: most + 1].zero_()
    pool[-1].zero_()
    if not np.concatenate(errors).mean() <= tolerance:
        raise _differ("steps", np.concatenate(errors))


def _step(
    rng: np.random.Generator, num_tokens: int, model: CausalModel, block_size: int
) -> tuple[NDArray[np.int64], PackedRows]:
    """Rows with different contexts, every third of several tokens. The last block of row r is block r + 1; all other
    blocks of all rows are block 0."""
    longest = model.source.max_model_len
    lens: list[int] = []
    while (left := num_tokens - sum(lens)) > 0:
        lens.append(min(left, block_size, longest, _ROW_TOKENS) if len(lens) % 3 == 1 else 1)
    query_lens, num_rows = np.array(lens, np.int32), len(lens)
    num_context = rng.integers(0, min(longest // block_size, _MOST_CONTEXT_BLOCKS) or 1, num_rows)
    within = rng.integers(0, block_size, num_rows) % (block_size + 1 - query_lens)
    positions = np.minimum(num_context * block_size + within, longest - query_lens)
    tables = np.zeros((num_rows, int(num_context.max()) + 1), np.int32)
    tables[np.arange(num_rows), num_context] = 1 + np.arange(num_rows)
    rows = PackedRows(query_lens, positions.astype(np.int32), tables)
    vocab_size = int(model.source.config.get_text_config(decoder=True).vocab_size)
    return rng.integers(0, vocab_size, num_tokens), rows


def _errors(
    replayed_of: Replayed,
    model: CausalModel,
    pool: torch.Tensor,
    token_ids: NDArray[np.int64],
    rows: PackedRows,
    size: int,
) -> NDArray[np.float32]:
    """The relative difference of replayed from launched hidden states, by token."""
    count = len(token_ids)
    replayed = replayed_of(token_ids, rows).float()
    padded = pad_rows(rows, size, len(pool) - 1)  # padded, so that both multiply matrices with the same kernels
    all_ids = np.zeros(size, np.int64)
    all_ids[:count] = token_ids
    positions = torch.from_numpy(padded.token_positions.astype(np.int64)).to(pool.device)
    step = model.backend.plan(pool, padded)
    launched = model.hidden_states(torch.from_numpy(all_ids).to(pool.device), positions, step)[:count].float()
    relative = (replayed - launched).norm(dim=-1) / launched.norm(dim=-1)
    errors: NDArray[np.float32] = relative.cpu().numpy()
    return errors


def _differ(what: str, errors: NDArray[np.float32]) -> GraphsDiffer:
    return GraphsDiffer(
        f"cuda_graphs: captured {what} are off by {errors.mean():.2g} (relative) from launched ones; "
        "--no-cuda-graphs does without"
    )


_ATEN = torch.ops.aten
_ASK_THE_DEVICE = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "_unique2", "unique_dim"}
    | {"unique_consecutive"}
)
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_COPIES = frozenset({"_to_copy", "copy_"})


class Waits(TorchDispatchMode):
    """Records in `ops` the names of ops that need a value or a shape from the device before the host can continue, and
    of copies between devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _waits(func, args, kwargs or {}, out):
            self.ops.append(str(func))
        return out


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    name = func.overloadpacket.__name__
    if name in _INDEXED:
        return any(_is_mask(index) for arg in args if isinstance(arg, list | tuple) for index in arg)
    if name == "repeat_interleave":
        return func._overloadname != "self_int" and kwargs.get("output_size") is None
    if name in _COPIES:
        source = args[0] if name == "_to_copy" else args[1]
        return bool(out.device != source.device and source.dim())  # a single number is passed as a kernel's argument
    return name in _ASK_THE_DEVICE


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
