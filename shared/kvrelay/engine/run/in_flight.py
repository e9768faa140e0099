"""Steps that were launched on the device and have not ended. A step has these states:

1. LAUNCHED   The device has the work; the host has not waited. Another step may be launched behind this one. Its rows
              with a placeholder take their tokens from device memory, so the device needs no round trip to the host.
2. LANDED     The host waited for this step, read its tokens, and the sampler has recorded them. In rare cases a token
              differs from the one in device memory (`PendingTokens.resampled`). A step that took such a token is STALE:
              it runs again with the right token when its own turn to land comes. Running again is safe. The same rows
              write the same slots of the same blocks, the blocks belong to the rows until the step has landed, and a
              sampled token depends only on sequence, position and logits. No step is launched behind a stale one.
   Rows whose sampling depends on all earlier tokens, as with a grammar, are not sampled at a launch behind another
   step, but as soon as that one has landed: at the next launch, or at the landing of their own step. The device
   computes the forward meanwhile. A grammar may have forced tokens behind the one that such a row computes; then the
   row brings none. If the step before had no token for the sequence, as its mask was late, the row is late too.
3. DISCARDED  The host waited for the step, and its results are dropped. Its writes lie behind the committed tokens,
              in blocks that belonged to its sequences until now. A later owner writes each slot before reading it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from kvrelay.engine.run.device import Moment, is_settled, to_device, use_on_this_thread
from kvrelay.engine.sample.pending_tokens import PendingTokens
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import Candidates, DeviceLost, GrammarWork, RowResult, StepResult, WorkerBatch


class Sampled(NamedTuple):
    """Tokens of these rows of a step."""

    tokens: PendingTokens
    rows: list[int]


@dataclass(frozen=True, slots=True)
class TokensOnDevice:
    """Tokens that the host does not have yet: `token_ids`, `[rows]` int64, belong at `places` of a step's tokens."""

    places: NDArray[np.int64]
    token_ids: torch.Tensor

    def put_into(self, tokens: torch.Tensor) -> None:
        """Writes them into a step's tokens on the device, `[tokens]` int64, in place. Does not wait."""
        tokens.index_copy_(0, to_device(self.places, tokens.device), self.token_ids)


@dataclass(slots=True)
class Asked:
    """The work of a step that was launched on the device. `sampled`: new tokens, those that were sampled at the launch
    and those that were sampled later. `sample_later`: samples the rest; `error` is what it raised. The other fields are
    known at the launch, but rows may join `late_rows` later; they get their token in a later step.

    `copy_s`: seconds of the copies between pool and host. `begin` and `end`: when the device begins the step and has
    done all of it, without `sample_later`.
    """

    sampled: list[Sampled] = field(default_factory=list)
    sample_later: Callable[[], None] | None = None
    error: Exception | None = None
    late_rows: set[int] = field(default_factory=set)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    captured: bool = False
    copy_s: float = 0.0
    begin: Moment | None = None
    end: Moment | None = None


class StepsInFlight:
    """The steps in flight on one device, in the order of their launches."""

    def __init__(self, device: torch.device, name: str, lock: Lock) -> None:
        """`name` is the device's for display. `lock` is the sampler's."""
        self.device = device
        self.name = name
        self.lock = lock
        self._steps: list[StepInFlight] = []
        self._ended_at = 0.0

    def add(self, step: StepInFlight) -> None:
        """Adds a step that is about to be launched."""
        with self.lock:
            self._steps.append(step)

    def end(self, step: StepInFlight) -> tuple[float, bool]:
        """Removes a step that has ended; needs the lock. Returns the seconds since the device began with it, which is
        its launch or the end of the previous step, whichever is later; and whether that was the end of the previous
        step."""
        self._steps.remove(step)
        before, self._ended_at = self._ended_at, time.perf_counter()
        return self._ended_at - max(before, step.launched_at), before > step.launched_at

    def before(self, step: StepInFlight) -> StepInFlight | None:
        """The step launched before this one, or None if that has ended; needs the lock."""
        index = self._steps.index(step)
        return self._steps[index - 1] if index else None

    def sample_later(self) -> None:
        """Samples the rows of the step in flight that waited for the tokens of the one before, which has landed."""
        with self.lock:
            step = self._steps[-1] if self._steps else None
        if step is not None:
            step.sample_later()

    @property
    def has_stale(self) -> bool:
        """Returns whether a step in flight has to run again; needs the lock."""
        return any(step.is_stale for step in self._steps)


class StepInFlight:
    """A `LaunchedStep` of `TransformersRunner`."""

    def __init__(self, steps: StepsInFlight, batch: WorkerBatch) -> None:
        self.batch = batch
        self.launched_at = time.perf_counter()
        self.took_from: StepInFlight | None = None
        """The step from whose tokens in device memory it took its placeholders."""
        self.resampled: frozenset[SequenceKey] = frozenset()
        """Sequences whose tokens in device memory differ from those that landed."""
        self._steps = steps
        self._asked = Asked()
        self._ask: Ask | None = None
        self._sampling_later = Lock()

    @property
    def is_stale(self) -> bool:
        """Returns whether this step read a token from device memory that differs from the sampled one."""
        if self.took_from is None or not self.took_from.resampled:
            return False
        return any(row.has_placeholder and row.key in self.took_from.resampled for row in self.batch.rows)

    def launch(self, ask: Ask) -> None:
        """Launches the step. Raises the error of the launch, and DeviceLost."""
        self._ask = ask
        self._steps.add(self)
        try:
            ask(self, self._asked)
        except BaseException as error:  # also an interrupt, behind which an embedded engine goes on
            self._failed(error)
            raise

    def sample_later(self) -> None:
        """Samples the rows that wait for the tokens of the step before, which has landed. `land` raises what fails."""
        # The next launch and this step's landing are on two threads. The one that comes second waits for the first.
        with self._sampling_later:
            asked = self._asked
            sample, asked.sample_later = asked.sample_later, None
            if sample is not None:
                try:
                    sample()
                except Exception as error:
                    asked.error = error

    @torch.inference_mode()
    def land(self) -> StepResult:
        use_on_this_thread(self._steps.device)
        try:
            if self._is_to_run_again():
                self._run_again()
            self.sample_later()
            found, forward_s = self._land_tokens()
        except BaseException as error:
            self._failed(error)
            raise
        # References are dropped so that steps do not keep each other alive.
        asked, self._asked, self._ask, self.took_from = self._asked, Asked(), None, None
        results = _results(len(self.batch.rows), found, asked)
        took_s = forward_s - asked.copy_s if results else 0.0
        return StepResult(self.batch.step, results, took_s, asked.copy_s, asked.captured, _work(asked))

    def discard(self) -> None:
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
        """Runs the step again with the tokens that have landed. Raises as a launch does."""
        assert self._ask is not None
        self._await()
        self.took_from, self._asked = None, Asked()
        self._ask(self, self._asked)
        # No step should have taken a token of this one. One that did is stale as well.
        rows = self.batch.rows
        self.resampled = frozenset(rows[index].key for sampled in self._asked.sampled for index in sampled.rows)

    def _land_tokens(self) -> tuple[dict[int, RowResult], float]:
        """Waits for the step, and ends it. Returns its tokens by row, and the seconds that it took."""
        asked = self._asked
        if asked.error is not None:
            raise asked.error
        if not asked.sampled:
            self._await()
            with self._steps.lock:
                ended = self._steps.end(self)
            return {}, self._took_s(*ended)
        found: dict[int, RowResult] = {}
        with self._steps.lock:
            if len(asked.sampled) > 1:
                for sampled in asked.sampled:  # nothing is recorded if one of them fails
                    sampled.tokens.check()
            for tokens, rows in asked.sampled:
                token_ids, logprobs = tokens.land()
                # The lock is held until the end of the step. A step that took its tokens from device memory before
                # finds out now whether they were wrong; a step that takes them from now on finds them on the host.
                changed = np.flatnonzero(tokens.resampled).tolist()
                self.resampled |= {self.batch.rows[rows[index]].key for index in changed}
                found |= _by_row(rows, tokens, token_ids, logprobs)
            ended = self._steps.end(self)
        return found, self._took_s(*ended)

    def _took_s(self, seconds: float, began_behind: bool) -> float:
        """The seconds that the step took: as the host measured them, or as the device did if that is more.

        If the host noticed the end of the previous step late, this step seems to have taken almost no time. Cost models
        weigh steps by relative error, so one such step would outweigh thousands of others.
        """
        begin, end = self._asked.begin, self._asked.end
        if not began_behind or begin is None or end is None:
            return seconds
        with suppress(RuntimeError):  # raised if the device is lost; the next call reports that
            seconds = max(seconds, end.seconds_since(begin))
        return seconds

    def _await(self) -> None:
        """Waits until the step has ended, and discards its tokens."""
        with self._steps.lock:
            for sampled in self._asked.sampled:
                sampled.tokens.discard()
        if self._asked.end is not None:
            self._asked.end.wait()

    def _failed(self, error: BaseException) -> None:
        """Waits until nothing of the step is running, and drops its results. Raises DeviceLost."""
        # Work that was launched before the error may still write into blocks that are about to be freed.
        settled = is_settled(self._steps.device)
        with self._steps.lock:
            for sampled in self._asked.sampled:
                with suppress(RuntimeError):  # raised if the device is lost
                    sampled.tokens.discard()
            self._steps.end(self)
        self._asked, self._ask, self.took_from = Asked(), None, None
        if not settled:
            raise DeviceLost(f"{self._steps.name}: {error}") from error


Ask = Callable[[StepInFlight, Asked], None]
"""Launches a step's work on the device, and notes it in `Asked` as it goes. Called once more if the step runs again."""


def _work(asked: Asked) -> GrammarWork | None:
    """The work done for grammars since the step before; None without any."""
    works = [work for sampled in asked.sampled if (work := sampled.tokens.grammar_work) is not None]
    for work in works[1:]:
        works[0].add(work)
    return works[0] if works else None


def _by_row(
    rows: list[int], tokens: PendingTokens, token_ids: NDArray[np.int64], logprobs: list[TokenLogprobs | None]
) -> dict[int, RowResult]:
    """Orders landed tokens, whose rows in the batch are `rows`, by row."""
    if tokens.accepted is None and not tokens.forced and logprobs.count(None) == len(logprobs):
        # Nearly always: one token for each row. `zip` makes them tuples of one.
        return dict(zip(rows, map(RowResult, zip(token_ids.tolist())), strict=True))
    found: dict[int, RowResult] = {}
    # Rows of several tokens come without those behind rejected guesses.
    places = range(len(rows)) if tokens.accepted is None else np.flatnonzero(tokens.accepted).tolist()
    for at, token_id in zip(places, token_ids[places].tolist(), strict=True):
        before, entry = found.get(rows[at], _NOTHING), logprobs[at]
        entries = before.logprobs if entry is None else (*before.logprobs, entry)
        found[rows[at]] = RowResult((*before.token_ids, token_id), entries)
    for at, run in tokens.forced.items():
        before = found[rows[at]]
        found[rows[at]] = RowResult((*before.token_ids, *run), before.logprobs, num_forced=len(run))
    return found


_NOTHING = RowResult()


def _results(num_rows: int, found: dict[int, RowResult], asked: Asked) -> list[RowResult]:
    """The results of all rows of a step."""
    results = list(map(found.get, range(num_rows), repeat(_NOTHING)))  # a loop would run bytecode for each row
    for row in asked.prompt_logprobs.keys() | asked.candidates.keys() | asked.late_rows:
        results[row] = structs.replace(
            results[row],
            prompt_logprobs=asked.prompt_logprobs.get(row, ()),
            candidates=asked.candidates.get(row),
            is_late=row in asked.late_rows,
        )
    return results
