"""Turns a `WorkerBatch` into one packed forward, and its logits into tokens. This is the stage that uses tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.backends.backend import PackedRows, SharingBackend, allocate_pool, bits, dtype_name
from kvrelay.engine.batch import BeamCandidates, BlockCopy, ModelSpec, StepResult, WorkerBatch, WorkerRow
from kvrelay.engine.beam_candidates import best_candidates
from kvrelay.engine.causal_model import CausalModel
from kvrelay.engine.device import Moment, describe_device, to_device, to_host, use_on_this_thread
from kvrelay.engine.device_pool import DevicePool
from kvrelay.engine.draft_rows import DraftRows
from kvrelay.engine.fingerprint import find_model_dir, fingerprint
from kvrelay.engine.graphs import DecodeGraphs, GraphSettings, try_to_capture
from kvrelay.engine.host_buffer import HostBuffer
from kvrelay.engine.in_flight import Asked, StepInFlight, StepsInFlight, TokensOnDevice
from kvrelay.engine.model_grammars import make_grammar_compiler
from kvrelay.engine.packing import pack_rows
from kvrelay.engine.pending_logprobs import token_logprobs
from kvrelay.engine.pending_tokens import BadLogits
from kvrelay.engine.sampler import Sampler
from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.tokenizer_identity import identity_of_file
from kvrelay.transfer.pool_memory import PoolLike

_PROMPT_SLICE = 512  # prompt positions whose logits exist at the same time


@dataclass(frozen=True, slots=True)
class _ScoredPrompt:
    """A prompt for which log-probabilities are requested."""

    token_ids: NDArray[np.int64]
    num_top: int


@dataclass(frozen=True, slots=True)
class _Forward:
    """Output of the backbone for the rows of a step: `hidden`, `[tokens, hidden]`, valid until the next forward."""

    rows: Sequence[WorkerRow]
    packed: PackedRows
    hidden: torch.Tensor


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
        launches_ahead: bool | None = None,
    ) -> None:
        """`name` is the model's name in the spec; by default its path or hub name.

        `with_scratch`: the pool has one more block, for CUDA graphs. `launches_ahead`: see `LaunchingRunner`; None:
        only on GPUs, because on a CPU a step is computed when its launch returns.
        """
        layout, source = model.layout, model.source
        self._model = model
        self._backend = model.backend
        self._device = source.device
        self.launches_ahead = source.device.type == "cuda" if launches_ahead is None else launches_ahead
        self._blocks = allocate_pool(layout, num_blocks + with_scratch, source.device)
        self._pool = self._blocks[:num_blocks]
        self._graphs: DecodeGraphs | None = None
        self._host = HostBuffer(self._pool, num_swap_slots)
        # Guards the sampler and the scored prompts. Released while waiting for the device.
        self._lock = threading.Lock()
        compiler = partial(make_grammar_compiler, source.name, model.vocab_size, model.eos_token_ids)
        self._sampler = Sampler(model.vocab_size, model.eos_token_ids, source.device, self._lock, compiler)
        self._scored: dict[SequenceKey, _ScoredPrompt] = {}
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
            tokenizer=identity_of_file(find_model_dir(source.name) / "tokenizer.json"),
        )
        self._steps = StepsInFlight(source.device, self._spec.device, self._lock)

    @property
    def spec(self) -> ModelSpec:
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
        return self.pool_bytes if self._device.type == "cpu" else self._device_pool

    @cached_property
    def _device_pool(self) -> DevicePool:
        return DevicePool(self._pool)

    def try_graphs(self, graphs: GraphSettings, *, trial: bool = False) -> None:
        """Captures decoding steps and replays them from now on, or logs why it cannot. The pool must be empty.

        Raises:
            ValueError: there is no scratch block; see `try_to_capture` for others.
        """
        if len(self._blocks) == len(self._pool):
            raise ValueError("CUDA graphs take a scratch block, and the pool has none")
        self._graphs = try_to_capture(self._model, self._blocks, graphs, trial=trial)

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        with self._lock:
            self._sampler.add(key, sampling, token_ids, num_prompt)
            if sampling.prompt_logprobs is not None and key not in self._scored:
                prompt = np.asarray(token_ids[:num_prompt], np.int64)
                self._scored[key] = _ScoredPrompt(prompt, sampling.prompt_logprobs)

    def drop_sequence(self, key: SequenceKey) -> None:
        with self._lock:
            self._sampler.drop(key)
            self._scored.pop(key, None)

    def execute(self, batch: WorkerBatch) -> StepResult:
        """Runs one step. A sequence that was dropped during the step gets no token.

        Raises:
            BadLogits: the model gave NaN or infinity for some sequences; the step may be run again without them.
            KeyError: a row that samples, or has a placeholder, is unknown.
            IndexError: a copy names a block or a slot that does not exist.
            DeviceLost: an error after which a GPU accepts no more work from this process.
        """
        return self.launch(batch).land()

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        """See `LaunchingRunner.can_launch_behind`. False for penalties, grammars and bad words, which need all earlier
        tokens on the host, for drafts, and for log-probabilities of prompts, which come to the host in slices."""
        if not self.launches_ahead or not batch.is_plain:
            return False
        with self._lock:
            if self._steps.has_stale or any(row.num_drafts or self._is_scored(row) for row in batch.rows):
                return False
            following = [row.key for row in batch.rows if row.has_placeholder and row.key in self._sampler]
            if following and self._sampler.resamples_often:
                return False
            return not self._sampler.needs_landed(following).any()

    @torch.inference_mode()
    def launch(self, batch: WorkerBatch) -> StepInFlight:
        """See `LaunchingRunner.launch`. Waits for the device only for batches that `can_launch_behind` refuses.

        Raises:
            KeyError, IndexError, DeviceLost: see `execute`.
        """
        use_on_this_thread(self._device)
        step = StepInFlight(self._steps, batch)
        step.launch(self._ask)
        return step

    def _ask(self, step: StepInFlight, asked: Asked) -> None:
        """Launches all work of a step on the device."""
        batch, asked.begin = step.batch, Moment(self._device)
        asked.copy_s = self._host.swap(batch.swap_out, batch.swap_in)
        self._copy_blocks(batch.copies)
        if batch.rows:
            self._ask_rows(step, asked)
        asked.end = Moment(self._device)

    def _ask_rows(self, step: StepInFlight, asked: Asked) -> None:
        rows = step.batch.rows
        with self._lock:
            named = (row.key for row in rows if row.sample or row.has_placeholder)
            unknown = [key for key in named if key not in self._sampler]
        if unknown:
            raise KeyError(f"sequences never added, or dropped before the step: {unknown}")
        self._begin_masks_of_drafts(rows)
        forward = self._compute(step, asked)
        asked.prompt_logprobs = self._score_prompts(forward)
        self._begin_sampling(forward, asked)
        asked.candidates = self._find_candidates(forward)

    def _compute(self, step: StepInFlight, asked: Asked) -> _Forward:
        """Runs the backbone over the rows of the step."""
        rows = step.batch.rows
        packed = pack_rows(rows)
        graphs = self._graphs_for(packed)
        asked.captured = graphs is not None
        token_ids, on_device = self._token_ids(step, rows, packed)
        return _Forward(rows, packed, self._hidden_states(token_ids, on_device, packed, graphs))

    def _begin_sampling(self, forward: _Forward, asked: Asked) -> None:
        """Launches sampling for each row that samples, is still known and can be sampled now, with drafts at the places
        of these too."""
        rows = forward.rows
        wanted = [at for at, row in enumerate(rows) if row.sample and row.beam is None]
        if not wanted:
            return
        drafts = DraftRows.of(rows, wanted)
        if drafts is not None:
            wanted = drafts.rows.tolist()
        logits = self._last_logits(forward, wanted, drafts)
        with self._lock:
            known = self._await_masks(rows, wanted, asked)
            if not known:
                return
            if len(known) < len(wanted):
                logits = logits[to_device(np.array(known, np.int64), self._device)]
                drafts = drafts.take(known) if drafts is not None else None
            asked.sampled_rows = [wanted[at] for at in known]
            sampled = [rows[index] for index in asked.sampled_rows]
            positions = np.array([row.position + len(row.token_ids) for row in sampled], np.int64)
            if drafts is not None:
                positions += drafts.offsets
            jumps = np.array([row.jumps for row in sampled], np.bool_)
            asked.tokens = self._sampler.begin([row.key for row in sampled], positions, logits, jumps, drafts)

    def _begin_masks_of_drafts(self, rows: Sequence[WorkerRow]) -> None:
        """Has the masks at drafts computed beside the forward."""
        drafted = [row for row in rows if row.num_drafts]
        if drafted:
            with self._lock:
                for row in drafted:
                    self._sampler.begin_masks(row.key, row.token_ids[-row.num_drafts :].tolist())

    def _await_masks(self, rows: Sequence[WorkerRow], wanted: Sequence[int], asked: Asked) -> Sequence[int]:
        """Notes the rows whose masks are late. Returns the indices into `wanted` of other rows that are still known."""
        if self._sampler.can_sample_all([rows[index].key for index in wanted]):
            return range(len(wanted))
        at_known = [at for at, index in enumerate(wanted) if rows[index].key in self._sampler]
        num_others = len(rows) - len({wanted[at] for at in at_known})
        late = self._sampler.late([rows[wanted[at]].key for at in at_known], num_others)
        if not late.any():
            return at_known
        asked.late_rows = {wanted[at_known[at]] for at in np.flatnonzero(late)}
        # Waiting released the lock, so sequences may have been dropped.
        return [at for at in at_known if wanted[at] not in asked.late_rows and rows[wanted[at]].key in self._sampler]

    def _hidden_states(
        self,
        token_ids: NDArray[np.int64],
        on_device: TokensOnDevice | None,
        packed: PackedRows,
        graphs: DecodeGraphs | None,
    ) -> torch.Tensor:
        """Runs the backbone over the step. Returns `[tokens, hidden]`, valid until the next forward."""
        if graphs is not None:
            return graphs.hidden_states(token_ids, packed, on_device)
        positions = to_device(packed.token_positions.astype(np.int64), self._device)
        step, tokens = self._backend.plan(self._pool, packed), to_device(token_ids, self._device)
        if on_device is not None:
            on_device.put_into(tokens)
        return self._model.hidden_states(tokens, positions, step)

    def _graphs_for(self, packed: PackedRows) -> DecodeGraphs | None:
        """The graphs that replay this step, or None if it is launched kernel by kernel."""
        if self._graphs is None or not self._graphs.can_run(packed):
            return None
        backend = self._backend
        launched = isinstance(backend, SharingBackend) and backend.prefers_launches(self._pool, packed)
        return None if launched else self._graphs

    def _token_ids(
        self, step: StepInFlight, rows: Sequence[WorkerRow], packed: PackedRows
    ) -> tuple[NDArray[np.int64], TokensOnDevice | None]:
        """The step's tokens. Placeholders are replaced by the newest tokens, or returned separately if those are on the
        device alone."""
        token_ids = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
        following = [index for index, row in enumerate(rows) if row.has_placeholder]
        if not following:
            return token_ids, None
        keys, places = [rows[index].key for index in following], packed.query_starts[1:][following] - 1
        with self._lock:
            step.took_from = self._steps.before(step)
            if step.took_from is not None:
                return token_ids, TokensOnDevice(places.astype(np.int64), self._sampler.last_on_device(keys))
            token_ids[places] = self._sampler.last_sampled(keys)
        return token_ids, None

    def _find_candidates(self, forward: _Forward) -> dict[int, BeamCandidates]:
        """The candidates of the beams' rows that sample and are still known, by row of the step."""
        wanted = [(at, row.key, row.beam) for at, row in enumerate(forward.rows) if row.sample and row.beam is not None]
        if not wanted:
            return {}
        logits = self._last_logits(forward, [at for at, _, _ in wanted])
        with self._lock:
            known = [at for at, (_, key, _) in enumerate(wanted) if key in self._sampler]
            if not known:
                return {}
            places, keys, beams = zip(*(wanted[at] for at in known), strict=True)
            if len(known) < len(wanted):
                logits = logits[to_device(np.array(known, np.int64), self._device)]
            packed = forward.packed
            positions = (packed.positions + packed.query_lens)[list(places)].astype(np.int64)
            found = best_candidates(self._sampler, keys, beams, positions, logits)
        return dict(zip(places, found, strict=True))

    def _last_logits(self, forward: _Forward, places: list[int], drafts: DraftRows | None = None) -> torch.Tensor:
        """The logits after the last token of these rows of a forward, or at the places of drafts, `[rows, vocab]`."""
        if drafts is None and len(places) == len(forward.hidden):
            return self._model.logits(forward.hidden)  # rows of one token, all of which sample
        last = forward.packed.query_starts[1:][places].astype(np.int64) - 1
        if drafts is not None:
            last += drafts.offsets
        return self._model.logits(forward.hidden[to_device(last, self._device)])

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies all blocks at once. Every source is read before any target is written."""
        if copies:
            sources = to_device(np.array([copy.source for copy in copies], np.int64), self._device)
            targets = to_device(np.array([copy.target for copy in copies], np.int64), self._device)
            pool = bits(self._pool)
            pool.index_copy_(0, targets, pool.index_select(0, sources))

    def _score_prompts(self, forward: _Forward) -> dict[int, list[TokenLogprobs]]:
        """The log-probabilities of the prompt tokens that follow each of the row's positions, by row of the step.

        Raises BadLogits.
        """
        with self._lock:
            scored = {at: self._scored[row.key] for at, row in enumerate(forward.rows) if self._is_scored(row)}
        results: dict[int, list[TokenLogprobs]] = {}
        for place, prompt in scored.items():
            row, start = forward.rows[place], int(forward.packed.query_starts[place])
            targets = prompt.token_ids[row.position + 1 : row.position + len(row.token_ids) + 1]
            entries: list[TokenLogprobs] = []
            for at in range(0, len(targets), _PROMPT_SLICE):
                part = targets[at : at + _PROMPT_SLICE]
                logits = self._model.logits(forward.hidden[start + at : start + at + len(part)])
                if not np.isfinite(to_host(logits.amax(dim=-1))[0]).all():
                    raise BadLogits([row.key])
                entries += token_logprobs(logits, part, np.full(len(part), prompt.num_top, np.int64))
            results[place] = entries
        return results

    def _is_scored(self, row: WorkerRow) -> bool:
        """Whether log-probabilities of prompt tokens behind the row's positions are requested; needs the lock."""
        prompt = self._scored.get(row.key)
        return prompt is not None and row.position + 1 < len(prompt.token_ids)
