"""Turns a `WorkerBatch` into one packed forward, and its logits into tokens. Layers above use no tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from kvrelay.backends.backend import PackedRows, allocate_pool
from kvrelay.backends.host_pages import populate_in_background
from kvrelay.engine.load.causal_model import CausalModel, spec_of
from kvrelay.engine.masks.token_masks import make_grammar_compiler
from kvrelay.engine.run.block_copies import DevicePool, HostBuffer
from kvrelay.engine.run.device import Moment, to_device, use_on_this_thread
from kvrelay.engine.run.graphs import DecodeGraphs, GraphSettings, try_to_capture
from kvrelay.engine.run.in_flight import Asked, Sampled, StepInFlight, StepsInFlight, TokensOnDevice
from kvrelay.engine.run.step_forward import Lockstep, StepForward, pack_rows
from kvrelay.engine.sample.candidates import best_candidates
from kvrelay.engine.sample.draft_rows import DraftRows
from kvrelay.engine.sample.logprobs import ScoredPrompts
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import Candidates, DeviceLost, ModelSpec, StepResult, WorkerBatch, WorkerRow

log = logging.getLogger(__name__)


class TransformersRunner:
    """A `ModelRunner` over a model of transformers and one pool."""

    def __init__(
        self,
        model: CausalModel,
        num_blocks: int,
        *,
        num_host_slots: int = 0,
        with_scratch: bool = False,
        launches_ahead: bool | None = None,
    ) -> None:
        """`with_scratch`: the pool has one more block, for CUDA graphs. `launches_ahead`: see `ModelRunner`; None:
        only on GPUs, because on a CPU a step is computed when its launch returns, and with the model in one process.
        """
        layout, source = model.layout, model.source
        self._model = model
        self._device = source.device
        # Other ranks need a step's tokens on the host.
        ahead = source.device.type == "cuda" and not model.is_divided and model.gathered_mlps is None
        self.launches_ahead = ahead if launches_ahead is None else launches_ahead
        self._blocks = allocate_pool(layout, num_blocks + with_scratch, source.device)
        self._populating: threading.Thread | None = None
        self._pool = self._blocks[:num_blocks]
        self._graphs: DecodeGraphs | None = None
        self._host = HostBuffer(self._pool, num_host_slots)
        # Guards the sampler and the scored prompts. Released while waiting for the device.
        self._lock = threading.Lock()
        compiler = partial(make_grammar_compiler, source.name, model.vocab_size, model.eos_token_ids)
        self._sampler = Sampler(model.vocab_size, model.eos_token_ids, source.device, self._lock, compiler)
        self._scored = ScoredPrompts(self._lock)
        self._lockstep = Lockstep() if model.is_divided else None
        self._spec = spec_of(model, num_blocks, num_host_slots, self._host.measure())
        self._steps = StepsInFlight(source.device, self._spec.device, self._lock)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def pool(self) -> torch.Tensor:
        """The pool, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""
        return self._pool

    @property
    def pool_bytes(self) -> NDArray[np.uint8]:
        """The pool's memory as `[num_blocks, block_bytes]`, shared. Raises TypeError if the pool is not in the CPU's
        memory."""
        flat = self._pool.view(self._spec.num_blocks, -1).view(torch.uint8)
        return cast("NDArray[np.uint8]", flat.numpy())

    @cached_property
    def pool_memory(self) -> PoolLike:
        return self.pool_bytes if self._device.type == "cpu" else DevicePool(self._pool)

    def try_graphs(self, graphs: GraphSettings, *, trial: bool = False) -> None:
        """Captures decoding steps and replays them from now on, or logs why it cannot. The pool must be empty. Raises
        ValueError if there is no scratch block, and as `try_to_capture` does."""
        if len(self._blocks) == len(self._pool):
            raise ValueError("CUDA graphs take a scratch block, and the pool has none")
        self._graphs = try_to_capture(self._model, self._blocks, graphs, trial=trial)

    def prepare_grammars(self) -> None:
        """Makes the compiler of grammars before the first request needs it: reading a tokenizer holds the GIL for up to
        seconds (0.5 s for 32,000 tokens), in which no step would run. Logs it if the tokenizer cannot be read."""
        try:
            self._sampler.prepare_grammars()
        except GrammarError as error:
            log.warning("requests with grammars will fail: %s", error)

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        with self._lock:
            self._sampler.add(key, sampling, token_ids, num_prompt)
            if sampling.prompt_logprobs is not None:
                self._scored.add(key, token_ids[:num_prompt], sampling.prompt_logprobs, sampling.logprob_start_len)

    def drop_sequence(self, key: SequenceKey) -> None:
        with self._lock:
            self._sampler.drop(key)
            self._scored.drop(key)

    @property
    def follows(self) -> bool:
        """Whether this is another rank than the first of a group, so that it runs steps by `follow`."""
        return self._model.follows

    def resolve(self, batch: WorkerBatch) -> WorkerBatch:
        """The batch as all ranks of a group compute it, for `follow` on other ranks and then `execute` on this one.

        Placeholders are replaced by the tokens sampled last, and rows of prompts whose log-probabilities are requested
        have `first_scored` and `num_scored`. Raises KeyError for an unknown row with a placeholder.
        """
        with self._lock:
            rows = [self._resolved(row) for row in batch.rows]
        return replace(batch, rows=rows)

    def _resolved(self, row: WorkerRow) -> WorkerRow:
        """Needs the lock."""
        if row.has_placeholder:
            token_ids = row.token_ids.copy()
            position = row.position + len(token_ids) - 1
            token_ids[-1] = self._sampler.last_sampled([row.key], np.array([position], np.int64))[0]
            row = structs.replace(row, token_ids=token_ids, has_placeholder=False)
        scored = self._scored.scored_positions(row)
        return structs.replace(row, first_scored=scored.start, num_scored=len(scored)) if scored else row

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for hidden states of the one before it in a pipeline."""
        pipeline = self._model.source.ranks.pipeline
        return 0.0 if pipeline is None else pipeline.waited_s

    @torch.inference_mode()
    def follow(self, batch: WorkerBatch) -> None:
        """Computes this rank's share of a step while rank 0 executes it: copies, the forward, and with divided
        heads the head for the same rows. It samples nothing, and needs no `add_sequence` and `drop_sequence`.

        The batch is what `resolve` returned on rank 0. The group remains in step if rank 0's `execute` raises anything
        but DeviceLost. Raises IndexError for a copy of a block or a slot that does not exist, as rank 0 does, and
        DeviceLost if another rank is lost.
        """
        use_on_this_thread(self._device)
        self._host.copy(batch)
        if batch.rows:
            forward = self._follow_rows(batch.rows)
            for hidden in forward.head_inputs() if self._model.has_divided_head else ():
                self._model.logits(hidden)

    def _follow_rows(self, rows: Sequence[WorkerRow]) -> StepForward:
        """Runs the backbone over rows without placeholders."""
        packed = pack_rows(rows)
        token_ids = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
        return StepForward(rows, packed, self._hidden_states(token_ids, None, packed))

    def populate(self) -> None:
        """Takes the pages of the pool in the background, so that no step waits for them."""
        if self._device.type == "cpu":
            self._populating = populate_in_background(self._blocks)

    def wait_for_pages(self) -> None:
        """Returns once steps no longer wait for pages of the pool: after about a second per GiB at most."""
        if self._populating is not None:
            self._populating.join()

    @staticmethod
    def use_threads(num_threads: int) -> None:
        """Sets how many threads compute the steps of the calling thread on a CPU. No result depends on it."""
        torch.set_num_threads(num_threads)

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
        """See `ModelRunner.can_launch_behind`. False for drafts, and for log-probabilities of prompts, which come
        to the host in slices."""
        if not self.launches_ahead or not batch.is_plain:
            return False
        with self._lock:
            if self._steps.has_stale or any(row.num_drafts or self._scored.scored_positions(row) for row in batch.rows):
                return False
            following = [row.key for row in batch.rows if row.has_placeholder and row.key in self._sampler]
            return not (following and self._sampler.resamples_often)

    @torch.inference_mode()
    def launch(self, batch: WorkerBatch) -> StepInFlight:
        """See `ModelRunner.launch`. Waits for the device only for batches that `can_launch_behind` refuses. Raises
        KeyError, IndexError and DeviceLost as `execute` does."""
        use_on_this_thread(self._device)
        self._steps.sample_later()  # this step may take these tokens
        step = StepInFlight(self._steps, batch)
        step.launch(self._ask)
        return step

    def _ask(self, step: StepInFlight, asked: Asked) -> None:
        """Launches all work of a step on the device. If it fails, what other ranks compute of it is computed first."""
        lockstep, gathered_mlps = self._lockstep, self._model.gathered_mlps
        if lockstep is None:
            with nullcontext() if gathered_mlps is None else gathered_mlps.step():
                self._ask_all(step, asked)
            return
        lockstep.begin_step()
        try:
            self._ask_all(step, asked)
        except DeviceLost:
            raise
        except Exception as error:
            if lockstep.has_begun or not isinstance(error, IndexError):  # all ranks raise one for copies
                rows = step.batch.rows
                lockstep.complete(error, lambda: self._follow_rows(rows), self._logits)
            raise

    def _ask_all(self, step: StepInFlight, asked: Asked) -> None:
        batch, asked.begin = step.batch, Moment(self._device)
        asked.copy_s = self._host.copy(batch)
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
        asked.prompt_logprobs = self._scored.score(forward, self._logits, as_resolved=self._lockstep is not None)
        self._begin_sampling(step, forward, asked)
        asked.candidates = self._find_candidates(forward)

    def _compute(self, step: StepInFlight, asked: Asked) -> StepForward:
        """Runs the backbone over the rows of the step."""
        rows = step.batch.rows
        packed = pack_rows(rows)
        asked.captured = self._graphs is not None and self._graphs.can_run(packed)
        token_ids, on_device = self._token_ids(step, rows, packed)
        forward = StepForward(rows, packed, self._hidden_states(token_ids, on_device, packed, captured=asked.captured))
        if self._lockstep is not None:
            self._lockstep.set_forward(forward)
        return forward

    def _begin_sampling(self, step: StepInFlight, forward: StepForward, asked: Asked) -> None:
        """Launches sampling for each row that samples, is still known and can be sampled now, with drafts at the places
        of these too."""
        rows = forward.rows
        wanted, drafts = forward.sampled()
        if not wanted:
            return
        logits = self._logits(forward.last_hidden(wanted, drafts))
        wait = self._that_wait(step, rows, wanted)
        if not wait.any():
            self._sample(rows, wanted, logits, drafts, asked)
            return
        later, now = ([wanted[at] for at in np.flatnonzero(each)] for each in (wait, ~wait))
        asked.sample_later = partial(self._sample, rows, later, self._at(logits, np.flatnonzero(wait)), None, asked)
        if now:
            self._sample(rows, now, self._at(logits, np.flatnonzero(~wait)), None, asked)

    def _that_wait(self, step: StepInFlight, rows: Sequence[WorkerRow], wanted: Sequence[int]) -> NDArray[np.bool_]:
        """Which rows can only be sampled once the step in flight before this one has landed, `[wanted]`. A step that is
        launched behind another one has no drafts."""
        wait = np.zeros(len(wanted), np.bool_)
        with self._lock:
            if self._steps.before(step) is not None:
                follow = [row.has_placeholder and row.key in self._sampler for row in map(rows.__getitem__, wanted)]
                keys = [rows[index].key for index, follows in zip(wanted, follow, strict=True) if follows]
                wait[follow] = self._sampler.needs_landed(keys)
        return wait

    def _sample(
        self,
        rows: Sequence[WorkerRow],
        wanted: Sequence[int],
        logits: torch.Tensor,
        drafts: DraftRows | None,
        asked: Asked,
    ) -> None:
        """Launches sampling for those of the rows `wanted` that are still known and can be sampled now. `logits`: at
        the places of these rows, and of their drafts."""
        with self._lock:
            known = self._await_masks(rows, wanted, asked)
            if not known:
                return
            logits = self._at(logits, known)
            drafts = None if drafts is None else drafts.take(known)
            sampled_rows = [wanted[at] for at in known]
            sampled = [rows[index] for index in sampled_rows]
            positions = np.array([row.position + len(row.token_ids) for row in sampled], np.int64)
            if drafts is not None:
                positions += drafts.offsets
            jumps = np.array([row.jumps for row in sampled], np.bool_)
            keys = [row.key for row in sampled]
            tokens = self._sampler.begin(keys, positions, logits, jumps, drafts, may_overwrite=True)
            asked.sampled.append(Sampled(tokens, sampled_rows))

    def _begin_masks_of_drafts(self, rows: Sequence[WorkerRow]) -> None:
        """Has the masks at drafts computed beside the forward."""
        for row in rows:
            if row.num_drafts:
                with self._lock:
                    self._sampler.begin_masks(row.key, row.token_ids[-row.num_drafts :].tolist())

    def _await_masks(self, rows: Sequence[WorkerRow], wanted: Sequence[int], asked: Asked) -> Sequence[int]:
        """Notes the rows whose masks are late. Returns the indices into `wanted` of other rows that are still known."""
        if self._sampler.can_sample_all([rows[index].key for index in wanted]):
            return range(len(wanted))
        at_known = [at for at, index in enumerate(wanted) if rows[index].key in self._sampler]
        at_known = self._at_next_tokens(rows, wanted, at_known, asked)
        num_others = len(rows) - len({wanted[at] for at in at_known})
        late = self._sampler.late([rows[wanted[at]].key for at in at_known], num_others)
        if not late.any():
            return at_known
        asked.late_rows |= {wanted[at_known[at]] for at in np.flatnonzero(late)}
        # Waiting released the lock, so sequences may have been dropped.
        return [at for at in at_known if wanted[at] not in asked.late_rows and rows[wanted[at]].key in self._sampler]

    def _at_next_tokens(
        self, rows: Sequence[WorkerRow], wanted: Sequence[int], at_known: list[int], asked: Asked
    ) -> list[int]:
        """Those of `at_known` whose rows sample the next token of their sequence. That is not so for rows planned
        behind a step that brought more tokens than one, since a grammar forced some, or none, since a mask was late;
        the latter are noted as late too."""
        following = [at for at in at_known if rows[wanted[at]].has_placeholder]
        if not following:
            return at_known
        keys = [rows[wanted[at]].key for at in following]
        places = np.array([rows[wanted[at]].position + len(rows[wanted[at]].token_ids) for at in following], np.int64)
        others = self._sampler.needs_landed(keys) * self._sampler.num_landed_from(keys, places)
        if not others.any():
            return at_known
        asked.late_rows |= {wanted[following[at]] for at in np.flatnonzero(others < 0)}
        dropped = {following[at] for at in np.flatnonzero(others)}
        return [at for at in at_known if at not in dropped]

    def _hidden_states(
        self,
        token_ids: NDArray[np.int64],
        on_device: TokensOnDevice | None,
        packed: PackedRows,
        *,
        captured: bool = False,
    ) -> torch.Tensor:
        """Runs the backbone over the step. Returns `[tokens, hidden]`, valid until the next forward."""
        if captured and self._graphs is not None:
            return self._graphs.hidden_states(token_ids, packed, on_device)
        positions = to_device(packed.token_positions.astype(np.int64), self._device)
        step, tokens = self._model.backend.plan(self._pool, packed), to_device(token_ids, self._device)
        if on_device is not None:
            on_device.put_into(tokens)
        if self._lockstep is not None:
            return self._lockstep.run(lambda: self._model.hidden_states(tokens, positions, step))
        return self._model.hidden_states(tokens, positions, step)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._lockstep is not None:
            return self._lockstep.run(lambda: self._model.logits(hidden))
        return self._model.logits(hidden)

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
        positions = (packed.positions + packed.query_lens)[following].astype(np.int64) - 1
        with self._lock:
            step.took_from = self._steps.before(step)
            if step.took_from is not None:
                newest = self._sampler.last_on_device(keys, positions)
                return token_ids, TokensOnDevice(places.astype(np.int64), newest)
            token_ids[places] = self._sampler.last_sampled(keys, positions)
        return token_ids, None

    def _find_candidates(self, forward: StepForward) -> dict[int, Candidates]:
        """The candidates of the rows that want some and are still known, by row of the step."""
        places, rows = forward.with_candidates(), forward.rows
        if not places:
            return {}
        logits = self._logits(forward.last_hidden(places))
        with self._lock:
            known = [at for at, place in enumerate(places) if rows[place].key in self._sampler]
            if not known:
                return {}
            places, logits = [places[at] for at in known], self._at(logits, known)
            packed = forward.packed
            positions = (packed.positions + packed.query_lens)[places].astype(np.int64)
            keys, wanted = zip(*((rows[place].key, rows[place].wanted) for place in places), strict=True)
            found = best_candidates(self._sampler, keys, wanted, positions, logits)
        return dict(zip(places, found, strict=True))

    def _at(self, logits: torch.Tensor, places: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """The logits at some of their places, in ascending order."""
        return logits if len(places) == len(logits) else logits[to_device(np.asarray(places, np.int64), self._device)]
