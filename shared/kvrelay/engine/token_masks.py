"""The tokens that grammars allow, for the sampler.

A sequence's mask is computed in a thread of its own as soon as its newest token has landed, so it is ready before the
next step's logits are: the thread releases the GIL and runs beside the bookkeeping between steps and the forward. A
grammar is compiled in another thread, so that a new sequence does not delay the masks of those that run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.batch import RowsFailed
from kvrelay.engine.device import to_device
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError, GrammarMatcher, TokenMask
from kvrelay.protocol.grammar import Grammar
from kvrelay.protocol.sequence_key import SequenceKey

LONGEST_WAIT_S = 5.0
"""A mask takes microseconds, and milliseconds where the library's limits end it. If it takes this long, its sequence
fails, and its thread is left to itself."""


class GrammarFailed(RowsFailed):
    """The grammars of the sequences in `keys` cannot go on. No token was sampled or recorded."""


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
        self._make_compiler = make_compiler
        self._vocab_size = vocab_size
        self._device = device
        self._waiting = waiting
        self._work: dict[int, _MaskWork] = {}  # key: slot
        self._compiling = _Thread("grammar-compile")
        self._computing = _Thread("grammar-masks")

    def add(self, slot: int, grammar: Grammar, output_ids: Sequence[int]) -> None:
        """Starts a sequence, with the output that it has already."""
        self._work[slot] = _MaskWork(self._compiling, partial(self._begin, grammar, list(output_ids)))

    def drop(self, slot: int) -> None:
        work = self._work.pop(slot, None)
        if work is not None:
            work.future.cancel()

    def accept(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Appends landed tokens `[rows]` to the sequences that have grammars, and has their next masks computed."""
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            before = self._work.get(slot)
            if before is not None:
                self._work[slot] = _MaskWork(self._computing, partial(_go_on, before.future, token_id))

    def apply(self, logits: torch.Tensor, keys: Sequence[SequenceKey], slots: NDArray[np.int64]) -> None:
        """Sets the logits `[rows, vocab]` of the tokens that are not allowed to minus infinity, in place.

        Raises GrammarFailed.
        """
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._work] if self._work else []
        if not rows:
            return
        work = [self._work[int(slots[row])] for row in rows]
        with self._waiting():
            masks = _collect([keys[row] for row in rows], work)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        forbidden = to_device(bits == 0, self._device)
        if len(rows) == len(slots):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            where = to_device(np.array(rows, np.int64), self._device)
            logits.index_copy_(0, where, logits.index_select(0, where).masked_fill_(forbidden, -torch.inf))

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """Used on the compiling thread alone. If that hangs while it makes this, its successor makes another one."""
        return self._make_compiler()

    def _begin(self, grammar: Grammar, output_ids: list[int]) -> _GrammarState:
        state = _GrammarState(self._compiler.compile(grammar), self._compiler.mask_words)
        state.go_on(output_ids)
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


class _GrammarState:
    """A matcher, and the mask of the token that comes next."""

    def __init__(self, matcher: GrammarMatcher, mask_words: int) -> None:
        self._matcher = matcher
        self.mask: TokenMask = np.zeros(mask_words, np.int32)

    def go_on(self, token_ids: list[int]) -> None:
        self._matcher.accept(token_ids)
        self._matcher.fill(self.mask)


def _go_on(before: Future[_GrammarState], token_id: int) -> _GrammarState:
    state = before.result()
    state.go_on([token_id])
    return state


def _collect(keys: Sequence[SequenceKey], work: Sequence[_MaskWork]) -> TokenMask:
    """Waits for the masks `[rows, words]`. Raises GrammarFailed."""
    _wait(work)
    masks, failed = [], {}
    for key, item in zip(keys, work, strict=True):
        if not item.future.done():
            failed[key] = f"a mask of its grammar takes longer than {LONGEST_WAIT_S:g} s"
        elif (error := item.future.exception()) is None:
            masks.append(item.future.result().mask)
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
