"""The tokens that grammars, allowed tokens and bad words allow, for the sampler.

A sequence's mask is computed in a thread of its own as soon as its newest token has landed, so it is ready before the
next step's logits are: the thread releases the GIL and runs beside the bookkeeping between steps and the forward. A
grammar is compiled in another thread, so that a new sequence does not delay the masks of those that run.

With jump-forward (Zheng et al., SGLang, 2024, section 4: runs of states with one way out are passed in one step) the
tokens that a grammar forces join the output behind the token that was sampled before them. They are the only ones that
the masks at their places allow. So the tokens of an output are those of sampling each under its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from threading import Lock
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.batch import GrammarWork, RowsFailed
from kvrelay.engine.device import to_device
from kvrelay.engine.draft_rows import DraftRows
from kvrelay.engine.token_limits import TokenLimits, remove
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError, GrammarMatcher, TokenMask
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.grammar import Grammar
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey

LONGEST_WAIT_S = 5.0
"""A mask takes microseconds, and milliseconds where the library's limits end it. If it takes this long, its sequence
fails, and its thread is left to itself."""


_TOO_LONG = f"a mask of its grammar takes longer than {LONGEST_WAIT_S:g} s"

MAX_RUN_TOKENS = 64
"""Forced tokens that join an output at once. The rest of a longer run follows behind the next token."""


class GrammarFailed(RowsFailed):
    """The grammars of the sequences in `keys` cannot go on. No token was sampled or recorded."""


class NoTokenAllowed(RowsFailed):
    """Grammar, allowed tokens and bad words leave the sequences in `keys` no token. None was sampled or recorded."""

    kind = FailureKind.NO_TOKEN_ALLOWED


class TokenMasks:
    """The grammar states of the sampler's slots. Not thread-safe; the owner locks."""

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler],
        vocab_size: int,
        device: torch.device,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`make_compiler` is called at the first use, in a thread. `waiting` releases the owner's lock."""
        self.limits = TokenLimits(vocab_size)
        self._done = _WorkDone()
        self._make_compiler = make_compiler
        self._vocab_size = vocab_size
        self._device = device
        self._waiting = waiting
        self._work: dict[int, _MaskWork] = {}  # key: slot
        self._compiling = _Thread("grammar-compile")
        self._computing = _Thread("grammar-masks")

    def add(self, slot: int, sampling: Sampling, output_ids: Sequence[int]) -> None:
        """Starts a sequence, with the output that it has already."""
        self.limits.add(slot, sampling, output_ids)
        if sampling.grammar is not None:
            self._work[slot] = _MaskWork(self._compiling, partial(self._begin, sampling.grammar, list(output_ids)))

    def drop(self, slot: int) -> None:
        self.limits.drop(slot)
        work = self._work.pop(slot, None)
        if work is not None:
            work.future.cancel()

    def accept(
        self, slots: NDArray[np.int64], token_ids: NDArray[np.int64], jumps: NDArray[np.bool_]
    ) -> dict[int, list[int]]:
        """Appends landed tokens `[rows]` to the sequences that have grammars, and has their next masks computed. A
        sequence with several new tokens has a row for each, in their order.

        Returns the tokens that grammars force behind them, by the last row of their sequence, for the rows that
        `jumps`. They are appended too.
        """
        new: dict[int, list[int]] = {}  # by slot
        last: dict[int, int] = {}  # rows, by slot
        for row, (slot, token_id) in enumerate(zip(slots.tolist(), token_ids.tolist(), strict=True)):
            new.setdefault(slot, []).append(token_id)
            last[slot] = row
        runs: dict[int, _MaskWork] = {}
        for slot, row in last.items():
            before = self._work.get(slot)
            if before is None:
                continue
            if jumps[row]:
                runs[row] = self._work[slot] = _MaskWork(self._computing, partial(_jump, before.future, new[slot]))
            else:
                self._work[slot] = _MaskWork(self._computing, partial(_go_on, before.future, new[slot]))
        if not runs:
            return {}
        # All runs are computed before the first of the next masks, which nobody waits for here.
        with self._waiting():
            _wait([*runs.values()])
        return {row: run for row, work in runs.items() if (run := self._end_run(int(slots[row]), work))}

    def _end_run(self, slot: int, work: _MaskWork) -> list[int]:
        """Returns the run, and has the mask behind it computed. Empty if the grammar failed, which `apply` raises."""
        run: list[int] = []
        is_late = not work.future.done()
        if not is_late and not work.future.cancelled() and work.future.exception() is None:
            run = work.future.result().run
        if self._work.get(slot) is work:  # the sequence was not dropped meanwhile
            self._work[slot] = _MaskWork(self._computing, partial(_fill_later, None if is_late else work.future))
        return run

    def draft(self, slot: int, drafts: Sequence[int]) -> None:
        """Has the masks at the places of drafts computed, for the next `apply`."""
        before = self._work.get(slot)
        if before is not None:
            self._work[slot] = _MaskWork(self._computing, partial(_look_ahead, before.future, drafts))

    def apply(
        self,
        logits: torch.Tensor,
        keys: Sequence[SequenceKey],
        slots: NDArray[np.int64],
        ends: dict[int, NDArray[np.int64]],
        drafts: DraftRows | None = None,
    ) -> None:
        """Sets the logits `[rows, vocab]` of the tokens that are not allowed to minus infinity, in place.

        `drafts`: the places of the rows. A draft that the grammar does not allow, and one that no token may follow, are
        taken out of them.

        `ends`, by row: tokens that are allowed only if there are no others. Raises GrammarFailed, NoTokenAllowed.
        """
        if not self._work and not self.limits:
            return
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._work or slot in self.limits]
        if not rows:
            return
        masks = self._grammar_masks(rows, keys, slots, drafts)
        if self.limits or ends:
            self._restrict(masks, rows, keys, slots, ends, drafts)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        forbidden = to_device(bits == 0, self._device)
        if len(rows) == len(slots):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            where = to_device(np.array(rows, np.int64), self._device)
            logits.index_copy_(0, where, logits.index_select(0, where).masked_fill_(forbidden, -torch.inf))

    def _grammar_masks(
        self, rows: Sequence[int], keys: Sequence[SequenceKey], slots: NDArray[np.int64], drafts: DraftRows | None
    ) -> TokenMask:
        """The masks of the rows `[rows, words]`. Rows without a grammar may sample every token."""
        with_grammar = [at for at, row in enumerate(rows) if int(slots[row]) in self._work]
        found = None
        if with_grammar:
            work = [self._work[int(slots[rows[at]])] for at in with_grammar]
            depths = [0 if drafts is None else int(drafts.depths[rows[at]]) for at in with_grammar]
            with self._waiting():
                found = _collect([keys[rows[at]] for at in with_grammar], work, depths)
            if drafts is not None:
                for at, item, depth in zip(with_grammar, work, depths, strict=True):
                    if depth > len(item.future.result().ahead):
                        drafts.drafts[rows[at] - 1] = -1
            if len(with_grammar) == len(rows):
                return found
        masks = np.tile(self.limits.all_tokens, (len(rows), 1))
        if found is not None:  # a tokenizer may have more tokens than the model
            masks[with_grammar] = found[:, : masks.shape[1]]
        return masks

    def _restrict(
        self,
        masks: TokenMask,
        rows: Sequence[int],
        keys: Sequence[SequenceKey],
        slots: NDArray[np.int64],
        ends: dict[int, NDArray[np.int64]],
        drafts: DraftRows | None,
    ) -> None:
        """Applies limits and `ends` to the masks, in place. Raises NoTokenAllowed."""
        num_words = len(self.limits.all_tokens)
        failed: list[SequenceKey] = []
        for row, mask in zip(rows, masks[:, :num_words], strict=True):
            mask &= self.limits.all_tokens
            self.limits.restrict(int(slots[row]), mask, () if drafts is None else drafts.before(row))
            if row in ends:
                others = mask.copy()
                remove(others, ends[row])
                if others.any():
                    mask[:] = others
            if mask.any():
                continue
            if drafts is None or not drafts.depths[row]:
                failed.append(keys[row])
            else:  # the draft before it may be wrong, so only the run ends
                drafts.drafts[row - 1] = -1
                mask[:] = self.limits.all_tokens
        if failed:
            raise NoTokenAllowed(
                "no token can continue the output: its grammar, allowed_token_ids and bad_words contradict each other",
                failed,
            )

    def take_work(self) -> GrammarWork | None:
        """What was done since the last call, or None for nothing."""
        return self._done.take()

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """Used on the compiling thread alone. If that hangs while it makes this, its successor makes another one."""
        return self._make_compiler()

    def _begin(self, grammar: Grammar, output_ids: list[int]) -> _GrammarState:
        compiler = self._compiler
        is_known, started = compiler.knows(grammar), perf_counter()
        matcher = compiler.compile(grammar)
        self._done.compiled(perf_counter() - started, is_known=is_known)
        state = _GrammarState(matcher, compiler.mask_words, self._done)
        state.accept(output_ids)
        state.fill()
        return state


class _Thread:
    """A thread for work in order. It can be replaced when it hangs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None  # made at the first use

    def submit(self, work: Callable[[], _GrammarState]) -> Future[_GrammarState]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._executor.submit(work)

    def abandon(self) -> None:
        """Further work goes to a new thread. The present one ends when its work does."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None


class _MaskWork:
    """The computation of a sequence's next mask."""

    def __init__(self, thread: _Thread, work: Callable[[], _GrammarState]) -> None:
        self.thread = thread
        self._work = work
        self.future = thread.submit(work)

    def move_to_new_thread(self) -> bool:
        """Returns False if it has begun."""
        if not self.future.cancel():
            return False
        self.future = self.thread.submit(self._work)
        return True


class _WorkDone:
    """Sums up work of several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._work: GrammarWork | None = None

    def compiled(self, seconds: float, *, is_known: bool) -> None:
        self._add(GrammarWork(num_compiled=not is_known, num_found=is_known, compile_s=seconds))

    def forced(self, num_tokens: int) -> None:
        if num_tokens:
            self._add(GrammarWork(num_forced_tokens=num_tokens))

    def filled(self, seconds: float) -> None:
        self._add(GrammarWork(num_masks=1, mask_s=seconds))

    def take(self) -> GrammarWork | None:
        with self._lock:
            work, self._work = self._work, None
        return work

    def _add(self, work: GrammarWork) -> None:
        with self._lock:
            if self._work is None:
                self._work = work
            else:
                self._work.add(work)


class _GrammarState:
    """A matcher, and the mask of the token that comes next."""

    def __init__(self, matcher: GrammarMatcher, mask_words: int, done: _WorkDone) -> None:
        self._matcher = matcher
        self._done = done
        self.mask: TokenMask = np.zeros(mask_words, np.int32)
        self.run: list[int] = []
        """The forced tokens that were appended behind the last token."""
        self.ahead: list[TokenMask] = []
        """The masks behind the first drafts, as far as the grammar allows these."""

    def accept(self, token_ids: Sequence[int]) -> None:
        self.ahead = []
        self._matcher.accept(token_ids)

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """Computes the masks behind drafts. The drafts are not appended."""
        self.ahead = []
        matcher, mask = self._matcher.copy(), self.mask
        with suppress(GrammarError):  # if too complex behind a draft, that is no failure: the draft may be wrong
            for draft in drafts:
                if not mask[draft >> 5] >> (draft & 31) & 1:
                    return
                matcher.accept([draft])
                mask, started = np.zeros_like(mask), perf_counter()
                matcher.fill(mask)
                self._done.filled(perf_counter() - started)
                self.ahead.append(mask)

    def jump(self) -> None:
        """Appends the tokens that are forced now."""
        self.run = []
        while len(self.run) < MAX_RUN_TOKENS and (forced := self._matcher.forced()):
            part = forced[: MAX_RUN_TOKENS - len(self.run)]
            self._matcher.accept(part)
            self.run += part
        self._done.forced(len(self.run))

    def fill(self) -> None:
        started = perf_counter()
        self._matcher.fill(self.mask)
        self._done.filled(perf_counter() - started)


def _go_on(before: Future[_GrammarState], token_ids: Sequence[int]) -> _GrammarState:
    state = before.result()
    for token_id in token_ids:  # one by one: end-of-sequence tokens may be among them
        state.accept([token_id])
    state.fill()
    return state


def _jump(before: Future[_GrammarState], token_ids: Sequence[int]) -> _GrammarState:
    state = before.result()
    for token_id in token_ids:
        state.accept([token_id])
    state.jump()
    return state


def _look_ahead(before: Future[_GrammarState], drafts: Sequence[int]) -> _GrammarState:
    state = before.result()
    state.look_ahead(drafts)
    return state


def _fill_later(before: Future[_GrammarState] | None) -> _GrammarState:
    """`before`: the run that the mask follows, or None if that took too long: it may not end behind an output without
    the run."""
    if before is None:
        raise GrammarError(_TOO_LONG)
    state = before.result()
    state.fill()
    return state


def _collect(keys: Sequence[SequenceKey], work: Sequence[_MaskWork], depths: Sequence[int]) -> TokenMask:
    """Waits for the masks `[rows, words]`, each behind so many drafts. Raises GrammarFailed."""
    _wait(work)
    masks, failed = [], {}
    for key, item, depth in zip(keys, work, depths, strict=True):
        if not item.future.done():
            failed[key] = _TOO_LONG
        elif (error := item.future.exception()) is None:
            state = item.future.result()
            # A row behind a draft that is not allowed gives no token, so its mask does not matter.
            masks.append(state.ahead[depth - 1] if 0 < depth <= len(state.ahead) else state.mask)
        elif isinstance(error, GrammarError):
            failed[key] = str(error)
        else:
            raise error
    if failed:
        raise GrammarFailed(f"constrained output cannot go on: {next(iter(failed.values()))}", list(failed))
    return np.stack(masks)


def _wait(work: Sequence[_MaskWork]) -> None:
    """Returns when all are done, except for those that hang. What waits behind such a one goes to a new thread."""
    while True:
        _, late = wait([item.future for item in work], LONGEST_WAIT_S)
        if not late:
            return
        for thread in {item.thread for item in work if item.future in late}:
            thread.abandon()
        moved = [item.move_to_new_thread() for item in work if item.future in late]
        if not any(moved):
            return
