"""The third of three stages: tensors. Turns a `WorkerBatch` into one packed forward and its logits into tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.backends.base import PackedRows, SharingBackend, allocate_pool, bits, dtype_name
from kvrelay.engine.batch import (
    BlockCopy,
    Candidates,
    DeviceLost,
    ModelSpec,
    RowResult,
    SequenceKey,
    StepResult,
    WorkerBatch,
    WorkerRow,
)
from kvrelay.engine.beams import best_candidates
from kvrelay.engine.device import describe_device, is_settled, to_device, use_on_this_thread, wait_for
from kvrelay.engine.device_pool import DevicePool
from kvrelay.engine.fingerprint import find_model_dir, fingerprint
from kvrelay.engine.graphs import DecodeGraphs, GraphSettings, try_to_capture
from kvrelay.engine.host_buffer import HostBuffer
from kvrelay.engine.logprobs import token_logprobs
from kvrelay.engine.model import CausalModel
from kvrelay.engine.packing import pack_rows
from kvrelay.engine.sampler import Sampler
from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from kvrelay.transfer.pool_memory import PoolLike

_NOTHING = RowResult(None)
_PROMPT_SLICE = 512  # prompt positions whose logits exist at a time


@dataclass(frozen=True, slots=True)
class _ScoredPrompt:
    """A prompt whose log-probabilities are asked for."""

    token_ids: NDArray[np.int64]
    num_top: int


class TransformersRunner:
    """A `ModelRunner` over a model of transformers and one pool."""

    def __init__(
        self,
        model: CausalModel,
        num_blocks: int,
        name: str | None = None,
        *,
        num_swap_slots: int = 0,
        with_scratch: bool = False,
    ) -> None:
        """`name` is what the spec calls the model; its path or hub name if there is none.

        `with_scratch`: beside the pool lies one more block, which CUDA graphs take.
        """
        layout, source = model.layout, model.source
        self._model = model
        self._backend = model.backend
        self._device = source.device
        self._blocks = allocate_pool(layout, num_blocks + with_scratch, source.device)
        self._pool = self._blocks[:num_blocks]
        self._graphs: DecodeGraphs | None = None
        self._host = HostBuffer(self._pool, num_swap_slots)
        self._lock = threading.Lock()  # over sampler and scored prompts; nobody waits for the device with it
        self._sampler = Sampler(model.vocab_size, model.eos_token_ids, source.device, self._lock)
        self._scored: dict[SequenceKey, _ScoredPrompt] = {}
        self._kept: dict[int, torch.Tensor] = {}  # hidden states of prompts' last positions, [hidden] each
        self._spec = ModelSpec(
            name=name or source.name,
            vocab_size=model.vocab_size,
            max_model_len=min(source.max_model_len, num_blocks * layout.block_size),
            eos_token_ids=model.eos_token_ids,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            num_blocks=num_blocks,
            block_bytes=layout.block_bytes,
            dtype=dtype_name(layout.dtype),
            fingerprint=fingerprint(find_model_dir(source.name), layout, source.weights_salt),
            num_swap_slots=num_swap_slots,
            swap_block_s=self._host.measure(),
            device=describe_device(source.device),
            kv_dtype=dtype_name(layout.pool_dtype),
        )

    @property
    def spec(self) -> ModelSpec:
        """What the services need to know about the model."""
        return self._spec

    @property
    def pool(self) -> torch.Tensor:
        """The pool, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`."""
        return self._pool

    @property
    def pool_bytes(self) -> NDArray[np.uint8]:
        """The pool's memory as `[num_blocks, block_bytes]`, shared.

        Raises:
            TypeError: the pool is not in the CPU's memory.
        """
        flat = self._pool.view(self._spec.num_blocks, -1).view(torch.uint8)
        return cast("NDArray[np.uint8]", flat.numpy())

    @property
    def pool_memory(self) -> PoolLike:
        """See `ModelRunner.pool_memory`."""
        return self.pool_bytes if self._device.type == "cpu" else self._device_pool

    @cached_property
    def _device_pool(self) -> DevicePool:
        return DevicePool(self._pool)

    def try_graphs(self, graphs: GraphSettings, *, trial: bool = False) -> None:
        """Captures decoding steps, which are replayed from now on, or says why not. The pool must hold nothing yet.

        Raises:
            ValueError: there is no scratch block; see `try_to_capture` for others.
        """
        if len(self._blocks) == len(self._pool):
            raise ValueError("CUDA graphs take a scratch block, and the pool has none")
        self._graphs = try_to_capture(self._model, self._blocks, graphs, trial=trial)

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """See `ModelRunner.add_sequence`."""
        with self._lock:
            self._sampler.add(key, sampling, token_ids, num_prompt)
            if sampling.prompt_logprobs is not None and key not in self._scored:
                prompt = np.asarray(token_ids[:num_prompt], np.int64)
                self._scored[key] = _ScoredPrompt(prompt, sampling.prompt_logprobs)

    def drop_sequence(self, key: SequenceKey) -> None:
        """See `ModelRunner.drop_sequence`."""
        with self._lock:
            self._sampler.drop(key)
            self._scored.pop(key, None)

    @torch.inference_mode()
    def execute(self, batch: WorkerBatch) -> StepResult:
        """See `ModelRunner.execute`. A sequence that was dropped during the step gets no token.

        Raises:
            BadLogits: the model gave NaN or infinity for some sequences; the step may be run again without them.
            KeyError: a row that samples, or follows a draw, is unknown.
            IndexError: a copy names a block or a slot that there is not.
            DeviceLost: an error after which a GPU takes nothing more from this process.
        """
        use_on_this_thread(self._device)
        try:
            return self._execute(batch)
        except Exception as error:
            # What was asked for before it failed may still write into blocks that others get next.
            if not is_settled(self._device):
                raise DeviceLost(f"{self._spec.device}: {error}") from error
            raise

    def _execute(self, batch: WorkerBatch) -> StepResult:
        copy_s = self._host.swap(batch.swap_out, batch.swap_in)
        self._copy_blocks(batch.copies)
        for state in batch.forget:
            self._kept.pop(state, None)
        if not batch.rows:
            wait_for(self._device)
            return StepResult(batch.step, [], 0.0, copy_s)
        started = time.perf_counter()
        with self._lock:
            asked = (row.key for row in batch.rows if row.sample or row.follows_draw)
            unknown = [key for key in asked if key not in self._sampler]
        if unknown:
            raise KeyError(f"sequences never added, or dropped before the step: {unknown}")
        computed = [row for row in batch.rows if not row.after]
        results, replayed = self._compute(computed) if computed else ([], False)
        if len(computed) < len(batch.rows):
            drawn, rest = self._draw([row for row in batch.rows if row.after]), iter(results)
            results = [drawn.get(row.key, _NOTHING) if row.after else next(rest) for row in batch.rows]
        return StepResult(batch.step, results, time.perf_counter() - started, copy_s, replayed)

    def _compute(self, rows: Sequence[WorkerRow]) -> tuple[list[RowResult], bool]:
        """One forward over the rows, and what follows from it for each of them; whether a graph was replayed."""
        packed = pack_rows(rows)
        graphs = self._graphs_for(packed)
        hidden = self._hidden_states(self._token_ids(rows, packed), packed, graphs)
        prompt_logprobs = self._score_prompts(rows, packed, hidden)
        sampled = self._sample(rows, packed, hidden)
        candidates = self._find_candidates(rows, packed, hidden)
        results = []
        for index in range(len(rows)):
            token_id, logprobs = sampled.get(index, (None, None))
            results.append(RowResult(token_id, logprobs, prompt_logprobs.get(index, []), candidates.get(index)))
        if not sampled:
            wait_for(self._device)  # whoever pushes this step's blocks now must find them written
        for index, row in enumerate(rows):
            if row.keep:
                self._kept[row.keep] = hidden[int(packed.query_starts[index + 1]) - 1].clone()
        return results, graphs is not None

    def _draw(self, rows: Sequence[WorkerRow]) -> dict[SequenceKey, RowResult]:
        """A token each from the kept positions that the rows name, for those that are still known."""
        logits = self._model.logits(torch.stack([self._kept[row.after] for row in rows]))
        with self._lock:
            known = [index for index, row in enumerate(rows) if row.key in self._sampler]
            if not known:
                with self._sampler.waiting():
                    wait_for(self._device)  # copies of blocks may be under way
                return {}
            keys = [rows[index].key for index in known]
            positions = np.array([rows[index].position for index in known], np.int64)
            if len(known) < len(rows):
                logits = logits[to_device(np.array(known, np.int64), self._device)]
            token_ids, logprobs = self._sampler.sample(keys, positions, logits)
        return dict(zip(keys, map(RowResult, token_ids.tolist(), logprobs), strict=True))

    def _hidden_states(
        self, token_ids: NDArray[np.int64], packed: PackedRows, graphs: DecodeGraphs | None
    ) -> torch.Tensor:
        """The backbone over the step, `[tokens, hidden]`, good until the next one."""
        if graphs is not None:
            return graphs.hidden_states(token_ids, packed)
        positions = to_device(packed.token_positions.astype(np.int64), self._device)
        step = self._backend.plan(self._pool, packed)
        return self._model.hidden_states(to_device(token_ids, self._device), positions, step)

    def _graphs_for(self, packed: PackedRows) -> DecodeGraphs | None:
        """What replays this step; None: it is launched kernel by kernel."""
        if self._graphs is None or not self._graphs.can_run(packed):
            return None
        backend = self._backend
        launched = isinstance(backend, SharingBackend) and backend.prefers_launches(self._pool, packed)
        return None if launched else self._graphs

    def _token_ids(self, rows: Sequence[WorkerRow], packed: PackedRows) -> NDArray[np.int64]:
        """The step's tokens; placeholders are replaced by what was drawn."""
        token_ids = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
        following = [index for index, row in enumerate(rows) if row.follows_draw]
        if following:
            with self._lock:
                drawn = self._sampler.last_drawn([rows[index].key for index in following])
            token_ids[packed.query_starts[1:][following] - 1] = drawn
        return token_ids

    def _sample(
        self, rows: Sequence[WorkerRow], packed: PackedRows, hidden: torch.Tensor
    ) -> dict[int, tuple[int, TokenLogprobs | None]]:
        """Token and log-probability by row, of the rows that sample and are still known."""
        wanted = [index for index, row in enumerate(rows) if row.sample and row.beam is None]
        if not wanted:
            return {}
        logits = self._last_logits(wanted, packed, hidden)
        with self._lock:
            known = [at for at, index in enumerate(wanted) if rows[index].key in self._sampler]
            if not known:
                return {}
            if len(known) < len(wanted):
                logits = logits[to_device(np.array(known, np.int64), self._device)]
                wanted = [wanted[at] for at in known]
            drawn = (packed.positions + packed.query_lens)[wanted].astype(np.int64)
            token_ids, logprobs = self._sampler.sample([rows[index].key for index in wanted], drawn, logits)
        return dict(zip(wanted, zip(token_ids.tolist(), logprobs, strict=True), strict=True))

    def _find_candidates(
        self, rows: Sequence[WorkerRow], packed: PackedRows, hidden: torch.Tensor
    ) -> dict[int, Candidates]:
        """Candidates by row, of the beams' rows that sample and are still known."""
        wanted = [(index, row.key, row.beam) for index, row in enumerate(rows) if row.sample and row.beam is not None]
        if not wanted:
            return {}
        logits = self._last_logits([index for index, _, _ in wanted], packed, hidden)
        with self._lock:
            known = [at for at, (_, key, _) in enumerate(wanted) if key in self._sampler]
            if not known:
                return {}
            indices, keys, beams = zip(*(wanted[at] for at in known), strict=True)
            if len(known) < len(wanted):
                logits = logits[to_device(np.array(known, np.int64), self._device)]
            positions = (packed.positions + packed.query_lens)[list(indices)].astype(np.int64)
            found = best_candidates(self._sampler, keys, beams, positions, logits)
        return dict(zip(indices, found, strict=True))

    def _last_logits(self, rows: list[int], packed: PackedRows, hidden: torch.Tensor) -> torch.Tensor:
        """The logits after the last token of these rows, `[rows, vocab]`."""
        last = to_device(packed.query_starts[1:][rows].astype(np.int64) - 1, self._device)
        return self._model.logits(hidden[last])

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """All copies at once; every source is read before any target is written."""
        if copies:
            sources = to_device(np.array([copy.source for copy in copies], np.int64), self._device)
            targets = to_device(np.array([copy.target for copy in copies], np.int64), self._device)
            pool = bits(self._pool)
            pool.index_copy_(0, targets, pool.index_select(0, sources))

    def _score_prompts(
        self, rows: Sequence[WorkerRow], packed: PackedRows, hidden: torch.Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """By row: log-probabilities of the prompt tokens that follow each of the row's positions."""
        with self._lock:
            scored = {index: self._scored[row.key] for index, row in enumerate(rows) if row.key in self._scored}
        results: dict[int, list[TokenLogprobs]] = {}
        for index, prompt in scored.items():
            position, start = rows[index].position, int(packed.query_starts[index])
            targets = prompt.token_ids[position + 1 : position + len(rows[index].token_ids) + 1]
            entries: list[TokenLogprobs] = []
            for at in range(0, len(targets), _PROMPT_SLICE):
                part = targets[at : at + _PROMPT_SLICE]
                logits = self._model.logits(hidden[start + at : start + at + len(part)])
                entries += token_logprobs(logits, part, np.full(len(part), prompt.num_top, np.int64))
            results[index] = entries
        return results
