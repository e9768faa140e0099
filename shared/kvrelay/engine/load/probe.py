"""Runs a model's attention to learn its shapes, and to check that paged attention computes the same.

Configs name only part of it. So a tiny forward records what every layer needs, and a second one, chunked and mixed over
scattered blocks, is compared with the model's own eager attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from kvrelay.backends.backend import (
    AttentionBackend,
    AttentionParams,
    KVLayout,
    LayerKind,
    PackedRows,
    StepAttention,
    allocate_pool,
    dtype_name,
)
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.run.attention import ATTENTION_NAME, Forward, UnsupportedModel, attending, observing

PackedLogits = Callable[[torch.Tensor, torch.Tensor, StepAttention], torch.Tensor]
"""Logits `[tokens, vocab]` of packed token ids and positions, which attend through the step."""

_log = logging.getLogger(__name__)
# Mean over positions of |paged - own| / |own|. A wrong mask, scale or position gives 0.1 or more. Rounding of
# 16-bit weights gives a few hundredths at most.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
_EIGHT_BIT_TOLERANCE = 1e-2
_MAX_SHARE_OF_OWN_ERROR = 1.2  # of the own modules' 16-bit error, for a forward that rounds at other places
_ROUNDED_TOLERANCE = 0.8  # for weights in 8 or 4 bits; wrong kernels differ by more
# Chunks may differ by this share of the error that 8-bit KV causes. For dtypes that are not listed it is 1: they have
# few bits themselves, so matrix products of other shapes round many keys differently.
_MAX_SHARE_OF_QUANTIZATION_ERROR = {torch.float32: 0.2}
_LARGE_QUANTIZATION_ERROR = (
    0.3  # e4m3 rounds to within 6 percent, e5m2 to within 12, and errors of keys add up over layers
)


@dataclass(frozen=True, slots=True)
class ObservedLayers:
    """The properties that all attention layers of a model share, and the kinds of layers (those with sinks
    separately)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    vocab_size: int
    kinds: frozenset[LayerKind]
    params: tuple[AttentionParams, ...]  # one per layer


class _LayerRecorder:
    """Replaces attention: records the shapes of K and V and returns zeros. Raises UnsupportedModel for shapes
    that KV blocks cannot store."""

    def __init__(self, max_model_len: int) -> None:
        self.shapes: dict[int, tuple[int, int, torch.dtype]] = {}
        self.kinds: set[LayerKind] = set()
        self.params: dict[int, AttentionParams] = {}
        self._max_model_len = max_model_len

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        params: AttentionParams,
    ) -> torch.Tensor:
        if key.shape != value.shape:
            raise UnsupportedModel(
                f"layer {layer}: K {tuple(key.shape[1:])} and V {tuple(value.shape[1:])} are unequal"
            )
        if key.shape[0] != query.shape[0] or key.shape[2] != query.shape[2]:
            raise UnsupportedModel(f"layer {layer}: queries {tuple(query.shape)} do not fit keys {tuple(key.shape)}")
        if layer in self.shapes:
            raise UnsupportedModel(f"layer {layer} attends twice")
        self.shapes[layer] = (key.shape[1], key.shape[2], key.dtype)
        self.params[layer] = params
        if params.sinks is None:
            self.kinds.add(LayerKind(query.shape[1], params.scaling, params.sliding_window, params.softcap))
        if mask is not None and not query.is_meta:  # a mask on the meta device has no values
            _check_mask(layer, mask, params.sliding_window, self._max_model_len)
        return torch.zeros_like(query, memory_format=torch.contiguous_format)


@torch.inference_mode()
def observe_layers(model: PreTrainedModel, num_layers: int, max_model_len: int) -> ObservedLayers:
    """Runs a few tokens and returns the shapes that every layer shares. Raises UnsupportedModel for layers without
    attention, of unequal shapes, or with a mask that is not causal or a window."""
    recorder = _LayerRecorder(max_model_len)
    length = min(4, max_model_len)
    token_ids = torch.arange(length, device=model.device)[None]
    try:
        with observing(model, recorder):
            output = model(input_ids=token_ids, position_ids=token_ids, use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:  # custom models fail in ways of their own
        raise UnsupportedModel(f"{type(model).__name__}: a forward over packed tokens fails: {error}") from error
    if not recorder.shapes:
        raise UnsupportedModel(f"{type(model).__name__}: no layer attends through transformers' attention interface")
    if sorted(recorder.shapes) != list(range(num_layers)):
        raise UnsupportedModel(f"{type(model).__name__}: {len(recorder.shapes)} of {num_layers} layers keep KV")
    if len(set(recorder.shapes.values())) != 1:
        raise UnsupportedModel(f"{type(model).__name__}: KV head shapes differ between layers")
    num_kv_heads, head_dim, dtype = recorder.shapes[0]
    kinds = frozenset(recorder.kinds)
    params = tuple(recorder.params[layer] for layer in range(num_layers))
    return ObservedLayers(num_layers, num_kv_heads, head_dim, dtype, output.logits.shape[-1], kinds, params)


def _check_mask(layer: int, mask: object, window: int | None, max_model_len: int) -> None:
    """Calls the mask function with pairs near the edges and far apart. It must be causal within the window."""
    if not callable(mask):
        raise UnsupportedModel(f"layer {layer}: the model builds an attention mask of its own")
    edges = {0, 1, max_model_len - 1, *(int(x) for x in np.linspace(0, max_model_len - 1, 64))}
    if window is not None:
        edges |= {window - 1, window, window + 1, 2 * window}
    queries = sorted(edge for edge in edges if 0 <= edge < max_model_len)
    offsets = {0, 1, *((window - 1, window) if window is not None else ())}
    pairs = [(q, k) for q in queries for k in {*queries, *(q - o for o in offsets), q + 1} if k >= 0]
    q_index, k_index = torch.tensor(pairs).unbind(1)
    zeros = torch.zeros_like(q_index)
    given = torch.as_tensor(mask(zeros, zeros, q_index, k_index))
    expected = k_index <= q_index
    if window is not None:
        expected &= q_index - k_index < window
    if not torch.equal(given.expand_as(expected), expected):
        raise UnsupportedModel(f"layer {layer}: its mask is neither causal nor a sliding window of {window}")


@torch.inference_mode()
def check_paged_forward(
    model: PreTrainedModel, layout: KVLayout, backend: AttentionBackend, max_model_len: int
) -> None:
    """Compares chunked, mixed, paged forwards with the model's own eager attention on two random prompts.

    For a pool of 8 bits this runs plain torch over a pool of the model's dtype. Then the backend over 8 bits is
    compared with plain torch over 8 bits, which computes each prompt in one chunk, and the error caused by 8 bits is
    logged. Raises UnsupportedModel if they differ by more than the dtype's rounding.
    """
    lengths = (min(layout.block_size + 13, max_model_len), min(11, max_model_len))
    prompts = random_prompts(model, lengths)
    own = own_logits(model, prompts)
    cut, exact = _probe_steps(list(lengths)), replace(layout, stored=None)
    by = backend if layout.stored is None else TorchBackend()
    paged = _eager_logits(model)
    error = _furthest(_paged_logits(paged, prompts, exact, by, cut), own)
    if not error <= TOLERANCE[layout.dtype]:
        raise UnsupportedModel(
            f"{type(model).__name__}: paged attention is off by {error:.2g} (relative) from the model's own"
        )
    if layout.stored is None:
        return
    whole = _paged_logits(paged, prompts, layout, TorchBackend(), [[(0, 0, lengths[0]), (1, 0, lengths[1])]])
    cost = _furthest(whole, own)
    error, name = _furthest(_paged_logits(paged, prompts, layout, backend, cut), whole), dtype_name(layout.stored)
    if not error <= max(tolerance_of(layout), cost * _MAX_SHARE_OF_QUANTIZATION_ERROR.get(layout.dtype, 1.0)):
        raise UnsupportedModel(
            f"{type(model).__name__}: attention over KV in {name} is off by {error:.2g} (relative) in chunks"
        )
    _log_cost(name, cost)


def paged_logits(
    forward: Forward,
    prompts: list[torch.Tensor],
    layout: KVLayout,
    backend: AttentionBackend,
    steps: list[list[tuple[int, int, int]]] | None = None,
) -> list[torch.Tensor]:
    """The logits of prompts of a model whose pool has its dtype, in `steps` of `(row, start, end)`; None: in one."""

    def logits(token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        return forward.logits(forward.hidden_states(token_ids, positions, step))

    steps = steps or [[(row, 0, len(prompt)) for row, prompt in enumerate(prompts)]]
    by = backend if layout.stored is None else TorchBackend()
    return _paged_logits(logits, prompts, replace(layout, stored=None), by, steps)


class ForwardCheck:
    """Compares another forward of a model's weights with the logits that the model's own eager modules gave before."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self._prompts = random_prompts(model, (min(150, max_model_len), min(11, max_model_len)))
        self._own = own_logits(model, self._prompts)

    @torch.inference_mode()
    def run(
        self,
        forward: Forward,
        layout: KVLayout,
        backend: AttentionBackend,
        *,
        model: PreTrainedModel | None = None,
    ) -> None:
        """Compares the logits of long and short chunks.

        16 bits can cost a deep model more than the tolerance, whichever way it is computed. With the `model`, whose
        modules still have their weights, the forward may differ more, if it is as near to the logits in float32 as the
        modules are. Raises UnsupportedModel if they differ by more than the dtype's rounding.
        """
        found = self._logits(forward, layout, backend)
        error = self._error(found)
        if model is not None and not error <= TOLERANCE[layout.dtype] and layout.dtype != torch.float32:
            with computing_in_float32(model):
                reference = own_logits(model, self._prompts)
            if _furthest(found, reference) <= _MAX_SHARE_OF_OWN_ERROR * _furthest(self._own, reference):
                return
        self.judge(forward, error, layout)

    def judge(self, forward: Forward, error: float, layout: KVLayout, *, exact: bool = True) -> None:
        """Raises UnsupportedModel, as `run`, for what `measure` returned. If not `exact`, the weights are rounded."""
        if not error <= (TOLERANCE[layout.dtype] if exact else _ROUNDED_TOLERANCE):
            raise UnsupportedModel(f"its {forward.name} layers are off by {error:.2g} (relative) from the model's own")

    @torch.inference_mode()
    def measure(self, forward: Forward, layout: KVLayout, backend: AttentionBackend) -> float:
        """The mean relative difference of the logits, of the worse prompt. 0 on a rank that gets no logits."""
        return self._error(self._logits(forward, layout, backend))

    def _logits(self, forward: Forward, layout: KVLayout, backend: AttentionBackend) -> list[torch.Tensor]:
        steps = _probe_steps([len(prompt) for prompt in self._prompts])
        return paged_logits(forward, self._prompts, layout, backend, steps)

    def _error(self, found: list[torch.Tensor]) -> float:
        return _furthest(found, self._own) if found[0].shape[-1] else 0.0


@contextmanager
def computing_in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Within it, each module of the model computes with a float32 copy of its own weights, which exists only while the
    module runs: the model's logits in float32, without the memory for all of its weights in float32."""
    kept: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}

    def widen(module: torch.nn.Module, _: object) -> None:
        kept[module] = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.float()

    def narrow(module: torch.nn.Module, _: object, __: object) -> None:
        for name, weight in kept.pop(module, {}).items():
            module.get_parameter(name).data = weight

    with ExitStack() as hooks:
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(narrow, always_call=True).remove)
        yield


def tolerance_of(layout: KVLayout) -> float:
    """The allowed difference between two ways to compute the same, over a pool of this layout."""
    # The last bit of a key sometimes decides to which of two 8-bit floats it is rounded.
    return TOLERANCE[layout.dtype] if layout.stored is None else max(TOLERANCE[layout.dtype], _EIGHT_BIT_TOLERANCE)


def _log_cost(name: str, error: float) -> None:
    if error <= _LARGE_QUANTIZATION_ERROR:
        _log.info("kv_cache_dtype = %s: logits of random prompts are off by %.2g (relative)", name, error)
        return
    _log.warning(
        "kv_cache_dtype = %s: logits of random prompts are off by %.2g (relative), and answers suffer: 8 bits do not "
        "hold this model's keys or values",
        name,
        error,
    )


def _furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest over the prompts of the mean relative difference of logits over positions. NaN if any is NaN."""
    errors = [((our - their).norm(dim=-1) / their.norm(dim=-1)).mean() for our, their in zip(ours, theirs, strict=True)]
    return float(torch.stack(errors).max())


def random_prompts(model: PreTrainedModel, lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    return [torch.randint(vocab_size, (length,), generator=generator).to(model.device) for length in lengths]


def _eager_logits(model: PreTrainedModel) -> PackedLogits:
    """Logits of packed tokens by the model's modules."""

    def logits(token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        with attending(step):
            output = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return cast("torch.Tensor", output.logits[0])

    return logits


def own_logits(model: PreTrainedModel, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    model.set_attn_implementation("eager")
    try:
        return [model(input_ids=prompt[None], use_cache=False).logits[0].float() for prompt in prompts]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _paged_logits(
    forward: PackedLogits,
    prompts: list[torch.Tensor],
    layout: KVLayout,
    backend: AttentionBackend,
    steps: list[list[tuple[int, int, int]]],
) -> list[torch.Tensor]:
    """The logits of both prompts, in steps of `(row, start, end)`, over blocks in descending order."""
    tables = _scattered_tables([len(prompt) for prompt in prompts], layout.block_size)
    pool = allocate_pool(layout, int(tables.max()) + 1, prompts[0].device)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in steps:
        rows = PackedRows(
            query_lens=np.array([end - start for _, start, end in step], np.int32),
            positions=np.array([start for _, start, _ in step], np.int32),
            block_tables=tables[[row for row, _, _ in step]],
        )
        token_ids = torch.cat([prompts[row][start:end] for row, start, end in step])
        positions = torch.from_numpy(rows.token_positions.astype(np.int64)).to(prompts[0].device)
        output = forward(token_ids, positions, backend.plan(pool, rows)).float()
        for (row, _, _), part in zip(step, output.split(rows.query_lens.tolist()), strict=True):
            logits[row].append(part)
    return [torch.cat(parts) for parts in logits]


def _probe_steps(lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """`(row, start, end)` of uneven chunks for each step. Each prompt ends with a single token."""
    cuts = [sorted({0, length // 2, length - 1, length}) for length in lengths]
    chunks = [[(row, *span) for span in pairwise(cut)] for row, cut in enumerate(cuts)]
    return [[chunk for chunk in step if chunk is not None] for step in zip_longest(*chunks)]


def _scattered_tables(lengths: list[int], block_size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Block tables in which the rows' blocks alternate, from the pool's end to its start."""
    num_blocks = max(-(-length // block_size) for length in lengths)
    grid = np.arange(num_blocks * len(lengths), dtype=np.int32).reshape(num_blocks, len(lengths)).T
    return np.ascontiguousarray(grid[:, ::-1])
