"""One sequence's state in its grammar. Its work is done by the threads of `token_masks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from time import perf_counter

import numpy as np

from kvrelay.engine.masks.ordered_work import OrderedWork
from kvrelay.grammar.grammar_compiler import GrammarError, GrammarMatcher, TokenMask
from kvrelay.step.batch import GrammarWork

MAX_RUN_TOKENS = 64
"""Forced tokens that join an output at once. The rest of a longer run follows behind the next token."""


class GrammarCounters:
    """Sums up work of several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._work = GrammarWork()

    def compiled(self, seconds: float, *, is_known: bool) -> None:
        with self._lock:
            self._work.num_compiled += not is_known
            self._work.num_found += is_known
            self._work.compile_s += seconds

    def forced(self, num_tokens: int) -> None:
        with self._lock:
            self._work.num_forced_tokens += num_tokens

    def filled(self, seconds: float) -> None:
        with self._lock:
            self._work.num_masks += 1
            self._work.mask_s += seconds

    def take(self) -> GrammarWork | None:
        with self._lock:
            work = self._work
            if not (work.num_masks or work.num_compiled or work.num_found or work.num_forced_tokens):
                return None
            self._work = GrammarWork()
        return work


class GrammarState(OrderedWork):
    """A matcher, and the mask of the token that comes next. Other threads read it once all work is done."""

    def __init__(self, done: GrammarCounters) -> None:
        super().__init__()
        self.mask: TokenMask = np.zeros(0, np.int32)
        self.error: Exception | None = None
        self.is_constant = False
        """Whether the mask is the same behind any output."""
        self.allows_all = False
        """Whether every token is allowed from here on: only behind reasoning, if there is no grammar."""
        self._run: list[int] = []
        self._behind_run: GrammarMatcher | None = None
        self._matcher: GrammarMatcher | None = None
        self._done = done
        self._drafts: Sequence[int] = ()
        self.ahead: list[TokenMask] = []
        """The masks behind the first drafts, as far as the grammar allows these."""

    def do(self, work: Callable[[], None]) -> None:
        """Does the work, unless some failed before."""
        if self.error is None:
            try:
                work()
            except Exception as error:  # raised when the mask is read
                self.error = error

    def begin(self, matcher: GrammarMatcher, mask_words: int, output_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self.mask = np.zeros(mask_words, np.int32)
        matcher.accept(output_ids)
        self.fill()

    def go_on(self, token_ids: Sequence[int]) -> None:
        """Appends tokens, and computes the mask of the token behind them."""
        self._accept(token_ids)
        self.fill()

    def _accept(self, token_ids: Sequence[int]) -> None:
        assert self._matcher is not None
        self._drafts, self.ahead = (), []
        for token_id in token_ids:  # one by one: end-of-sequence tokens may be among them
            self._matcher.accept([token_id])

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """Computes the masks behind drafts. The drafts are not appended."""
        # A row that was late may come with the same drafts again: it would be late for ever if they were begun anew.
        if drafts == self._drafts[: len(drafts)]:
            return
        assert self._matcher is not None
        self._drafts, self.ahead = drafts, []
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

    def jump(self, token_ids: Sequence[int]) -> None:
        """Appends tokens, and finds those that are forced behind them."""
        self._accept(token_ids)
        assert self._matcher is not None
        self._run, self._behind_run = [], None
        if self._matcher.forced():
            self._behind_run = self._matcher.copy()
            while len(self._run) < MAX_RUN_TOKENS and (forced := self._behind_run.forced()):
                part = forced[: MAX_RUN_TOKENS - len(self._run)]
                self._behind_run.accept(part)
                self._run += part

    def end_run(self) -> list[int]:
        """Appends the tokens that were forced, returns them, and puts the work for the mask behind them. Empty if they
        are not known yet, so the mask allows the first of them; or if the grammar failed, which `masks` raises."""
        run = self._run if self.is_done and self.error is None else []
        if run:
            self._matcher = self._behind_run
            self._done.forced(len(run))
        self.put(self.fill)
        return run

    def fill(self) -> None:
        assert self._matcher is not None
        started = perf_counter()
        self._matcher.fill(self.mask)
        self.allows_all = self._matcher.allows_all
        self._done.filled(perf_counter() - started)
