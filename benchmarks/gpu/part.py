"""What a part finds when it runs: the device, the scale, the floors that were measured, and an engine on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from benchmarks.gpu import journal
from benchmarks.gpu.figures import median
from benchmarks.gpu.journal import Recorder
from benchmarks.gpu.scale import BLOCK_SIZE, Scale, write_model
from kvrelay.backends.backend import KV_DTYPES, LayerKind
from kvrelay.backends.choose_backend import select_backend
from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.run.graphs import GraphSettings
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import WorkerBatch, WorkerRow

TOKEN_BUDGET = 2048
_FILLED_BLOCKS = 64  # drawn at a time
Name = TypeVar("Name")


class WrongResults(AssertionError):
    """What would be measured is not what transformers computes."""


@dataclass(frozen=True)
class Floors:
    """What the device can do, measured in this run. Bandwidths in bytes a second, counting reads and writes."""

    copy_rate: float
    matmul_rate: float  # floating-point operations a second, in the model's type
    to_host_rate: float  # bytes a second, from the device to pinned memory
    to_device_rate: float


@dataclass
class Part:
    device: torch.device
    scale: Scale
    recorder: Recorder
    folder: Path
    floors: Floors | None = None
    argument: str = ""
    _model: CausalModel | None = field(default=None, init=False)

    @property
    def known_floors(self) -> Floors:
        assert self.floors is not None, "the floors were not measured"
        return self.floors

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.scale.dtype == "bfloat16" else torch.float32

    def model_dir(self) -> Path:
        """The model's config and tokenizer."""
        directory = self.folder / "model"
        return directory if directory.exists() else write_model(self.scale, directory)

    def model(self) -> CausalModel:
        """The model with random weights, made once."""
        if self._model is None:
            started = time.monotonic()
            name = str(self.model_dir())
            source = open_source(name, self.scale.dtype, self.device, self.scale.max_model_len, "dummy")
            self._model = load_model(source, BLOCK_SIZE)
            self.recorder.note(f"Attention by {self._model.backend.name}.")
            print(f"  model made in {time.monotonic() - started:.1f} s", flush=True)
        return self._model

    def runner(self, num_tokens: int, graph_sizes: Sequence[int], kv_dtype: str | None = None) -> TransformersRunner:
        """With a pool for so many tokens, full of normal random numbers: kernels on zeros draw less power.

        On a GPU, decoding steps of these sizes are captured in CUDA graphs. `kv_dtype`: see `KV_DTYPES`.
        """
        model = self.model() if kv_dtype is None else self._with_pool_of(kv_dtype)
        num_blocks = blocks_for(num_tokens, BLOCK_SIZE) + 1
        runner = TransformersRunner(model, num_blocks, with_scratch=True)
        if self.device.type == "cuda":
            runner.try_graphs(GraphSettings(tuple(graph_sizes)))
        if runner._graphs is None:
            self.recorder.note("No CUDA graphs on this device or with this attention.")
        for blocks in runner.pool.split(_FILLED_BLOCKS):
            blocks.copy_(torch.randn(blocks.shape, device=self.device))  # 8-bit numbers cannot be drawn
        return runner

    def worker_flags(self, num_tokens: int, max_running: int) -> list[str]:
        """Of a service with a pool for so many tokens."""
        kind, budget = self.device.type, min(TOKEN_BUDGET, max(64, self.scale.prompt // 4))
        flags = ["--device", kind, "--dtype", self.scale.dtype, "--load-format", "dummy"]
        flags += ["--num-blocks", str(blocks_for(num_tokens, BLOCK_SIZE)), "--token-budget", str(budget)]
        flags += ["--max-running", str(max_running), "--max-model-len", str(min(num_tokens, self.scale.max_model_len))]
        return flags if kind == "cuda" else [*flags, "--threads", "1"]

    def _with_pool_of(self, kv_dtype: str) -> CausalModel:
        """The same weights over another pool."""
        model, kind = copy(self.model()), LayerKind(self.scale.num_heads, self.scale.head_dim**-0.5, None, None)
        model.layout = replace(model.layout, stored=KV_DTYPES[kv_dtype])
        model.backend = select_backend(self.device, model.layout, [kind])
        self.recorder.note(f"Attention over KV in {kv_dtype} by {model.backend.name}.")
        return model

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], times: int = 1) -> float:
        """Of one call, by the wall's clock, from an idle device to an idle device, over so many calls in a row."""
        self.wait()
        started = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return (time.perf_counter() - started) / times


def read_floors(path: Path) -> Floors | None:
    """Of the journal's last run that measured them; None before one did."""
    rates: dict[str, float] = {}
    for attempt in journal.read(path).get("floors", []):
        rates |= {row["cells"]["what"]: median(row["cells"]["rate"]) for row in attempt.rows}
    if not rates:
        return None
    return Floors(rates["copy"] * 1e9, rates["matmul"] * 1e12, rates["to host"] * 1e9, rates["to device"] * 1e9)


def interleaved(works: Mapping[Name, Callable[[], float]], repeats: int) -> dict[Name, list[float]]:
    """Each work's figure of every repeat; they take turns, and the first turn, which warms up, is thrown away."""
    taken: dict[Name, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            figure = work()
            if repeat:
                taken[name].append(figure)
    return taken


GREEDY = Sampling(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


def decoding_batch(runner: TransformersRunner, batch: int, context: int) -> WorkerBatch:
    """A step of `batch` sequences whose tokens attend to `context` tokens, themselves among them; scattered."""
    count = blocks_for(context, BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(runner.spec.num_blocks).astype(np.int32)
    rows = []
    for index in range(batch):
        key: SequenceKey = ("decode", 1, index)
        runner.drop_sequence(key)
        runner.add_sequence(key, GREEDY, [], context - 1)
        blocks = order[index * count : (index + 1) * count]
        rows.append(WorkerRow(key, np.array([5 + index], np.int32), context - 1, blocks, sample=True, is_prefill=False))
    return WorkerBatch(0, rows)
