"""Decoding steps as CUDA graphs: the backbone's forward, captured for several numbers of tokens, and replayed.

A decoding step has hundreds of small kernels, and a host that launches them one by one is slower than the GPU. A graph
is launched as one. It holds addresses and launch sizes, but no data: everything that changes between steps is copied
into fixed buffers first, and the step is padded to the next captured size. Padding rows hold token 0 at position 0 of a
scratch block that no sequence owns; their results are never read.

A row of several tokens (guesses, tokens that a grammar forced, a short chunk of a prompt) is replayed as that many rows
of one token with the same blocks: in each layer all keys and values are written before any are read. So one graph for
each number of tokens is enough, however the tokens are divided among rows. Its price is that each token reads the keys
before it, which a kernel for several tokens reads once.

Steps larger than the largest graph, and steps in which such rows would read too much again, are launched kernel by
kernel.

A step never overwrites buffers that the previous step still reads: copies into the fixed buffers are ordered with the
replays on one stream, and come from pinned memory that is not reused before they are done.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from kvrelay.backends.backend import FixedStep, NotCapturable, PackedRows, PoolShape, pad_rows, split_rows
from kvrelay.engine.load.causal_model import CausalModel
from kvrelay.engine.run.graph_check import Waits, check_graphs
from kvrelay.engine.run.graph_sizes import padded_size
from kvrelay.engine.run.in_flight import TokensOnDevice
from kvrelay.kv.table import blocks_for
from kvrelay.process import deferred_collection

log = logging.getLogger(__name__)

Replay = Callable[[], None]

_REREAD_BYTES = 512 * 2**20
"""Bytes that rows of several tokens may read again in a layer: what a GPU with 3.3 TB/s reads while a host launches the
layer's kernels one by one (160 us). An estimate."""


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps a workspace (32 MiB on Hopper) for each stream on which it was used."""
    return torch.cuda.Stream(device)


class CudaGraphRecorder:
    """CUDA graphs in one memory pool: no two of them run at the same time, and none keeps a result in the pool.

    Other threads of the process may use the device meanwhile. Only this thread's work is captured and restricted by the
    rules of captures.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _capture_stream(device)
        self._memory: Any = None  # the first graph's pool; later graphs share it

    def record(self, forward: Callable[[], None]) -> Replay:
        """Runs `forward`, which enters inference mode itself, to warm it up, then captures it. The returned function
        replays it over the current content of its buffers. Raises RuntimeError if the driver refuses to capture
        something."""
        # Torch's random generator allocates tensors for all captures of a process with the first one. If they were made
        # in inference mode, later captures outside inference mode would fail.
        with torch.inference_mode(mode=False), torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                forward()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            capture = torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local")
            with capture:
                forward()
            self._memory = graph.pool()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured graph of one number of tokens."""

    inputs: torch.Tensor  # token ids, then positions, [2 * size]; fixed
    step: FixedStep
    replay: Replay


class DecodeGraphs:
    """The captured decoding steps over one pool."""

    def __init__(self, graphs: dict[int, _Graph], hidden: torch.Tensor, pool: PoolShape, token_bytes: int) -> None:
        """`hidden`, `[largest size, hidden]`, is the output buffer of all graphs. `token_bytes`: keys and values of a
        token in one layer."""
        self.sizes = tuple(sorted(graphs))
        self._graphs = graphs
        self._hidden = hidden
        self._scratch_block = pool.num_blocks - 1
        self._most_read_again = _REREAD_BYTES // token_bytes

    def can_run(self, rows: PackedRows) -> bool:
        """Returns whether a captured size holds all tokens, and rows of several tokens do not read too much again."""
        num_tokens = int(rows.query_starts[-1])
        if padded_size(self.sizes, num_tokens) is None:
            return False
        if num_tokens == len(rows.query_lens):
            return True
        num_keys = (rows.positions + rows.query_lens).astype(np.int64)
        return int((rows.query_lens - 1) @ num_keys) <= self._most_read_again

    @torch.inference_mode()
    def hidden_states(
        self, token_ids: NDArray[np.int64], rows: PackedRows, on_device: TokensOnDevice | None = None
    ) -> torch.Tensor:
        """Like `CausalModel.hidden_states`, for a step that `can_run` accepts. The result is valid until the next call.
        Does not wait.

        `on_device`: tokens that replace some of `token_ids`.
        """
        count = len(token_ids)
        size = padded_size(self.sizes, count)
        assert size is not None, f"{count} tokens are more than the largest graph's"
        graph = self._graphs[size]
        padded = pad_rows(split_rows(rows), size, self._scratch_block)
        pinned = torch.zeros(2 * size, dtype=torch.int64, pin_memory=self._hidden.device.type == "cuda")
        filled = pinned.numpy()
        filled[:count] = token_ids
        filled[size:] = padded.positions
        # The caching host allocator keeps the pinned memory until the copy is done.
        graph.inputs.copy_(pinned, non_blocking=True)
        if on_device is not None:
            on_device.put_into(graph.inputs)
        graph.step.replan(padded)
        graph.replay()
        return self._hidden[:count]


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """The numbers of tokens to capture, and the recorder."""

    sizes: Sequence[int]
    make_recorder: Callable[[torch.device], CudaGraphRecorder] = CudaGraphRecorder


def try_to_capture(
    model: CausalModel, pool: torch.Tensor, settings: GraphSettings, *, trial: bool = False
) -> DecodeGraphs | None:
    """Returns the captured steps, or None if the model or the backend does not allow capturing.

    Unless it is a `trial`, the captures are checked and the result is logged. The pool's content is lost. Raises
    ValueError if the device refuses to capture, or replays give different results than launches.
    """
    started, recorder = time.perf_counter(), settings.make_recorder(pool.device)
    try:
        graphs = capture_graphs(model, pool, settings.sizes, recorder)
    except NotCapturable as error:
        if not trial:
            log.warning("no CUDA graphs: %s", error)
        return None
    except RuntimeError as error:
        message = f"cuda_graphs: a decoding step cannot be captured, --no-cuda-graphs does without: {error}"
        raise ValueError(message) from error
    if not trial:
        check_graphs(graphs.sizes, graphs.hidden_states, model, pool)
        log.info(
            "%d CUDA graphs captured in %.1f s. Steps of up to %d tokens run as one of them; larger steps are launched "
            "kernel by kernel",
            len(graphs.sizes),
            time.perf_counter() - started,
            graphs.sizes[-1],
        )
    return graphs


@torch.inference_mode()
def capture_graphs(
    model: CausalModel, pool: torch.Tensor, sizes: Sequence[int], recorder: CudaGraphRecorder
) -> DecodeGraphs:
    """Captures a forward for each of `sizes`, the largest first, so that the smaller ones reuse its memory.

    The last block of `pool` is the scratch block, which is written to.

    Raises:
        NotCapturable: the model's forward, or the backend, cannot be captured; nothing is kept then.
        RuntimeError: the device refuses to capture.
    """
    backend, scratch_block = model.backend, len(pool) - 1
    largest = max(sizes)
    steps = backend.fixed_steps(pool, largest, blocks_for(model.source.max_model_len, model.layout.block_size))
    inputs = torch.zeros(2 * largest, dtype=torch.int64, device=pool.device)
    hidden: torch.Tensor | None = None
    graphs = {}
    with _collecting_no_garbage():
        for size in _with_progress(sorted(sizes, reverse=True)):
            step, own = steps(size), inputs[: 2 * size]
            step.replan(pad_rows(_NO_ROWS, size, scratch_block))
            if hidden is None:
                hidden = _checked_forward(model, own, step)
            graphs[size] = _Graph(own, step, recorder.record(_CapturedForward(model, own, step, hidden)))
    assert hidden is not None
    shape = PoolShape(*pool.shape)
    token_bytes = shape.num_kinds * shape.num_kv_heads * shape.head_dim * pool.itemsize
    return DecodeGraphs(graphs, hidden, shape, token_bytes)


_NO_ROWS = PackedRows(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((0, 0), np.int32))


@dataclass(frozen=True, slots=True)
class _CapturedForward:
    """The captured function: from the tokens in `inputs` to the last hidden states in `hidden`."""

    model: CausalModel
    inputs: torch.Tensor
    step: FixedStep
    hidden: torch.Tensor

    @torch.inference_mode()
    def __call__(self) -> None:
        size = len(self.inputs) // 2
        states = self.model.hidden_states(self.inputs[:size], self.inputs[size:], self.step)
        self.hidden[:size].copy_(states)


def _checked_forward(model: CausalModel, inputs: torch.Tensor, step: FixedStep) -> torch.Tensor:
    """A forward's hidden states, `[size, hidden]`. Checks the ops it ran, and raises NotCapturable."""
    size = len(inputs) // 2
    model.hidden_states(inputs[:size], inputs[size:], step)  # the first forward may allocate, compile and wait
    with Waits() as waits:
        hidden = model.hidden_states(inputs[:size], inputs[size:], step)
    if waits.ops:
        raise NotCapturable(f"its forward waits for the device: {', '.join(sorted(set(waits.ops)))}")
    return torch.zeros_like(hidden)


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Garbage that holds device memory must not be freed during a capture."""
    gc.collect()
    with deferred_collection():
        yield


def _with_progress(sizes: list[int]) -> Iterable[int]:
    """Shows a progress bar on terminals. Elsewhere a log line follows instead."""
    return track(
        sizes,
        description="Capturing CUDA graphs",
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
