"""Steps that were launched on the device and have not ended. A step has these states:

1. LAUNCHED   The device has the work; the host has not waited. Another step may be launched behind this one. Its rows
              with a placeholder take their tokens from device memory, so the device needs no round trip to the host.
2. LANDED     The host waited for this step, read its tokens, and the sampler has recorded them. In rare cases a token
              differs from the one in device memory (`PendingTokens.resampled`). A step that took such a token is STALE:
              it runs again with the right token when its own turn to land comes. Running again is safe. The same rows
              write the same slots of the same blocks, the blocks belong to the rows until the step has landed, and a
              sampled token depends only on sequence, position and logits. No step is launched behind a stale one.
3. DISCARDED  The host waited for the step, and its results are dropped. What it wrote lies behind the committed tokens,
              in blocks that belonged to its sequences until now. A later owner writes each slot before reading it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.batch import BeamCandidates, DeviceLost, RowResult, StepResult, WorkerBatch
from kvrelay.engine.device import Moment, is_settled, to_device, use_on_this_thread
from kvrelay.engine.pending_tokens import PendingTokens
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey

_RowTokens = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]
"""A row's new tokens, and one entry for each of them if log-probabilities are asked for."""

_NO_TOKENS: _RowTokens = ((), ())


@dataclass(frozen=True, slots=True)
class TokensOnDevice:
    """Tokens that the host does not know yet: `token_ids`, `[rows]` int64, belong at `places` of a step's tokens."""

    places: NDArray[np.int64]
    token_ids: torch.Tensor

    def put_into(self, tokens: torch.Tensor) -> None:
        """Puts them among a step's tokens on the device, `[tokens]` int64, in place. Waits for nothing."""
        tokens.index_copy_(0, to_device(self.places, tokens.device), self.token_ids)


@dataclass(slots=True)
class Asked:
    """What was asked of the device for a step: `draw` is about the rows in `drawing`; other fields are known by now.

    `copy_s`: what copies between pool and host took. `begin` comes when the device begins with it, `end` when it has
    done all of it.
    """

    tokens: PendingTokens | None = None
    sampled_rows: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    candidates: dict[int, BeamCandidates] = field(default_factory=dict)
    captured: bool = False
    copy_s: float = 0.0
    begin: Moment | None = None
    end: Moment | None = None


class StepsInFlight:
    """Those of one device, in the order of their launches."""

    def __init__(self, device: torch.device, name: str, lock: Lock) -> None:
        """`name` is the device's, for people; `lock` is the sampler's."""
        self.device = device
        self.name = name
        self.lock = lock
        self._steps: list[StepInFlight] = []
        self._ended_at = 0.0

    def add(self, step: StepInFlight) -> None:
        """It is about to be launched."""
        with self.lock:
            self._steps.append(step)

    def end(self, step: StepInFlight) -> tuple[float, bool]:
        """It has ended. With the lock. Returns the seconds since its launch, or since the end of the one before it, if
        that was later: then the device began with it. And whether it was."""
        self._steps.remove(step)
        before, self._ended_at = self._ended_at, time.perf_counter()
        return self._ended_at - max(before, step.launched_at), before > step.launched_at

    def before(self, step: StepInFlight) -> StepInFlight | None:
        """The one launched before it, unless that has ended. With the lock."""
        index = self._steps.index(step)
        return self._steps[index - 1] if index else None

    @property
    def has_stale(self) -> bool:
        """Whether one of them is to run again. With the lock."""
        return any(step.is_stale for step in self._steps)


class StepInFlight:
    """A `LaunchedStep` of `TransformersRunner`."""

    def __init__(self, steps: StepsInFlight, batch: WorkerBatch) -> None:
        self.batch = batch
        self.launched_at = time.perf_counter()
        self.took_from: StepInFlight | None = None
        """The step from whose draws it took tokens on the device."""
        self.resampled: frozenset[SequenceKey] = frozenset()
        """Sequences whose tokens on the device were not those that it landed with."""
        self._steps = steps
        self._asked = Asked()
        self._ask: Ask | None = None

    @property
    def is_stale(self) -> bool:
        """Whether it took a token that is not the one drawn."""
        if self.took_from is None or not self.took_from.resampled:
            return False
        return any(row.has_placeholder and row.key in self.took_from.resampled for row in self.batch.rows)

    def launch(self, ask: Ask) -> None:
        """Asks the device. Raises what that does, and DeviceLost."""
        self._ask = ask
        self._steps.add(self)
        try:
            ask(self, self._asked)
        except Exception as error:
            self._failed(error)
            raise

    @torch.inference_mode()
    def land(self) -> StepResult:
        """See `LaunchedStep.land`."""
        use_on_this_thread(self._steps.device)
        try:
            if self._is_to_run_again():
                self._run_again()
            tokens, forward_s = self._land_tokens()
        except Exception as error:
            self._failed(error)
            raise
        asked, self._asked, self._ask, self.took_from = self._asked, Asked(), None, None  # steps form no chain
        results = []
        for index in range(len(self.batch.rows)):
            token_ids, logprobs = tokens.get(index, _NO_TOKENS)
            scores, candidates = asked.prompt_logprobs.get(index, ()), asked.candidates.get(index)
            results.append(RowResult(token_ids, logprobs, scores, candidates))
        took_s = forward_s - asked.copy_s if results else 0.0
        return StepResult(self.batch.step, results, took_s, asked.copy_s, asked.captured)

    def discard(self) -> None:
        """See `LaunchedStep.discard`."""
        use_on_this_thread(self._steps.device)
        try:
            self._await()
        except Exception as error:
            self._failed(error)
            return
        with self._steps.lock:
            self._steps.end(self)

    def _is_to_run_again(self) -> bool:
        with self._steps.lock:
            return self.is_stale

    def _run_again(self) -> None:
        """With the tokens that have landed. Raises as a launch does."""
        assert self._ask is not None
        self._await()
        self.took_from, self._asked = None, Asked()
        self._ask(self, self._asked)
        # Whoever took a token of this step, which nobody should have, is stale as well.
        self.resampled = frozenset(self.batch.rows[index].key for index in self._asked.sampled_rows)

    def _land_tokens(self) -> tuple[dict[int, _RowTokens], float]:
        """Waits for the step, and ends it. Returns the new tokens by row, and the seconds that the step took."""
        tokens, rows = self._asked.tokens, self._asked.sampled_rows
        if tokens is None:
            self._await()
            with self._steps.lock:
                ended = self._steps.end(self)
            return {}, self._took_s(*ended)
        with self._steps.lock:
            token_ids, logprobs = tokens.land()
            # In one hold of the lock with the end: whoever took tokens before took them on the device, and knows now if
            # they were wrong; whoever does from now on finds them on the host.
            changed = np.flatnonzero(tokens.resampled).tolist()
            self.resampled |= {self.batch.rows[rows[index]].key for index in changed}
            ended = self._steps.end(self)
        by_row: dict[int, _RowTokens] = {
            row: ((token_id,), () if entry is None else (entry,))
            for row, token_id, entry in zip(rows, token_ids.tolist(), logprobs, strict=True)
        }
        return by_row, self._took_s(*ended)

    def _took_s(self, seconds: float, began_behind: bool) -> float:
        """`seconds` as the host saw them, or as the device did, if that is more.

        Where the host was late to see the end of the step before, this one would seem to have taken next to nothing.
        What learns from steps' times weighs them by their relative errors: one such step would outweigh thousands.
        """
        begin, end = self._asked.begin, self._asked.end
        if not began_behind or begin is None or end is None:
            return seconds
        with suppress(RuntimeError):  # of a device that is lost by now: whoever needs it next finds out
            seconds = max(seconds, end.seconds_since(begin))
        return seconds

    def _await(self) -> None:
        """It has ended; its draw is given up."""
        if self._asked.tokens is not None:
            with self._steps.lock:
                self._asked.tokens.discard()
        if self._asked.end is not None:
            self._asked.end.wait()

    def _failed(self, error: Exception) -> None:
        """Nothing of it is under way when this returns, and nothing remembered. Raises DeviceLost."""
        # What was asked for before it failed may still write into blocks that others get next.
        settled = is_settled(self._steps.device)
        with self._steps.lock:
            if self._asked.tokens is not None:
                with suppress(RuntimeError):  # of a device that is lost
                    self._asked.tokens.discard()
            self._steps.end(self)
        self._asked, self._ask, self.took_from = Asked(), None, None
        if not settled:
            raise DeviceLost(f"{self._steps.name}: {error}") from error


Ask = Callable[[StepInFlight, Asked], None]
"""Asks the device for a step, and notes what it asked as it goes on: for the first time, or again."""
