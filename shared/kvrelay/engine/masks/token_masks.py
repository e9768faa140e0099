"""The tokens that grammars, allowed tokens and bad words allow, for the sampler.

A sequence's mask is computed in a thread of its own as soon as its newest token has landed, so it is ready before the
next step's logits are: the thread releases the GIL and runs beside the bookkeeping between steps and the forward. A
grammar is compiled in another thread, so that a new sequence does not delay the masks of those that run. A mask that is
not ready then delays its own sequence, which gets its token in a later step (`late`).

Masks are computed one by one and not by the library's call for a batch: that took a quarter more CPU time for 32 masks,
and returns with the slowest of them.

With jump-forward (Zheng et al., SGLang, 2024, section 4: runs of states with one way out are passed in one step) the
tokens that a grammar forces join the output behind the token that was sampled before them. They are the only ones that
the masks at their places allow. So the tokens of an output are those of sampling each under its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from kvrelay.engine.load.model_files import find_model_dir
from kvrelay.engine.masks.grammar_state import GrammarCounters, GrammarState, WorkThreads, wait
from kvrelay.engine.masks.matchers import AllTokens, NoTokenLeft, add_limits, packed
from kvrelay.engine.sample.draft_rows import DraftRows
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError, GrammarMatcher, TokenMask, remove
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import Grammar, Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import GrammarWork, RowsFailed

LONGEST_WAIT_S = 5.0
"""A mask takes microseconds, and milliseconds where the library's limits end it. If it takes this long, its sequence
fails, and its thread is left to itself."""

PATIENCE_S = 0.001
"""A step waits for masks, or for forced tokens, this long before the rows that lack them are left out of it. Less than
a row costs that is computed again in vain, in a step of ordinary size."""

PATIENCE_ALONE_S = 0.02
"""The wait if no row of the step could be sampled. Requests that arrive meanwhile join the next step."""

MAX_MASK_THREADS = 3

_TOO_LONG = "a mask of its grammar takes longer than {:g} s"


class GrammarFailed(RowsFailed):
    """The grammars of the sequences in `keys` cannot go on. No token was sampled or recorded."""

    kind = FailureKind.GRAMMAR_FAILED


class NoTokenAllowed(RowsFailed):
    """Grammar, allowed tokens and bad words leave the sequences in `keys` no token. None was sampled or recorded."""

    kind = FailureKind.NO_TOKEN_ALLOWED


class TokenMasks:
    """The grammar states of the sampler's slots. Not thread-safe; the owner locks."""

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`make_compiler` is called by `prepare`, or in a thread at the first use. `waiting`: releases the lock."""
        self._vocab_size = vocab_size
        self._all_tokens = packed(np.ones(vocab_size, np.bool_))
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._done = GrammarCounters()
        self._make_compiler = make_compiler
        self._waiting = waiting
        self._states: dict[int, GrammarState] = {}  # key: slot
        self._compiling = WorkThreads("grammar-compile", 1, _longest_wait_s)
        self._computing = WorkThreads("grammar-masks", MAX_MASK_THREADS, _longest_wait_s)

    def prepare(self) -> None:
        """Makes the compiler. Raises GrammarError."""
        self._compiler  # noqa: B018

    def add(self, slot: int, sampling: Sampling, output_ids: Sequence[int]) -> None:
        """Starts a sequence, with the output that it has already."""
        if sampling.is_constrained or sampling.limits_tokens:
            state = self._states[slot] = GrammarState(self._done)
            state.put(partial(self._begin, state, sampling, list(output_ids)))
            # Steps are planned behind rows whose mask does not follow the output, so those are never late.
            state.is_constant = not sampling.follows_output
            self._submit(state, self._compiling)

    def drop(self, slot: int) -> None:
        state = self._states.pop(slot, None)
        if state is not None:
            state.error = GrammarError("the sequence has ended")  # skips the work that waits for it

    def accept(
        self, slots: NDArray[np.int64], token_ids: NDArray[np.int64], jumps: NDArray[np.bool_]
    ) -> dict[int, list[int]]:
        """Appends landed tokens `[rows]` to the sequences that have grammars, and has their next masks computed. A
        sequence with several new tokens has a row for each, in their order.

        Returns the tokens that grammars force behind them, by the last row of their sequence, for the rows that
        `jumps`. They are appended too. If finding them takes longer than `PATIENCE_S`, the mask allows the first alone.
        """
        new: dict[GrammarState, list[int]] = {}
        last: dict[GrammarState, int] = {}  # rows
        for row, (slot, token_id) in enumerate(zip(slots.tolist(), token_ids.tolist(), strict=True)):
            state = self._states.get(slot)
            if state is None:
                continue
            if state in new:
                new[state].append(token_id)
            elif state.is_done and state.allows_all:
                del self._states[slot]  # the rest of the output needs no mask
                continue
            else:
                new[state] = [token_id]
            last[state] = row
        runs: dict[int, list[int]] = {}
        jumping: dict[int, GrammarState] = {}
        jump_of_row = jumps.tolist()
        for state, row in last.items():
            if jump_of_row[row]:
                jumping[row] = state
                state.put(partial(state.jump, new[state]))
            else:
                state.put(partial(state.go_on, new[state]))
        self._computing.submit(last)
        if jumping:
            with self._waiting():
                self._wait([*jumping.values()], PATIENCE_S)
            # All runs are computed before the first of the next masks, and no mask is waited for here.
            runs = {row: run for row, state in jumping.items() if (run := state.end_run())}
            self._computing.submit(jumping.values())
        return runs

    @property
    def is_unused(self) -> bool:
        """Returns whether no sequence needs masks."""
        return not self._states

    def late(self, slots: NDArray[np.int64], num_others: int) -> NDArray[np.bool_]:
        """Waits a little for the masks of the rows. Returns the rows that get no token in this step, as their masks are
        not ready. `num_others`: rows that the step computes beside these."""
        states = [self._states.get(slot) for slot in slots.tolist()] if self._states else []
        late = [state for state in states if state is not None and not state.is_done]
        if not late:
            return np.zeros(len(slots), np.bool_)
        with self._waiting():
            if len(late) < len(slots) + num_others:
                self._wait(late, PATIENCE_S)
            elif not self._wait(late, PATIENCE_S):
                wait(late, PATIENCE_ALONE_S, for_first=True)
        return np.array([state is not None and not state.is_done and not _hangs(state) for state in states], np.bool_)

    def draft(self, slot: int, drafts: Sequence[int]) -> None:
        """Has the masks at the places of drafts computed, for the next `apply`."""
        state = self._states.get(slot)
        if state is not None:
            state.put(partial(state.look_ahead, drafts))
            self._submit(state, self._computing)

    def masks(
        self,
        keys: Sequence[SequenceKey],
        slots: NDArray[np.int64],
        ends: dict[int, NDArray[np.int64]],
        drafts: DraftRows | None = None,
    ) -> dict[int, TokenMask]:
        """The masks of the rows that have one, by row. Read only, until the next tokens are appended. Waits for masks
        that are not ready.

        `drafts`: the places of the rows. A draft that the grammar does not allow, and one that no token may follow, are
        taken out of them.

        `ends`, by row: tokens that are allowed only if there are no others. Raises GrammarFailed, NoTokenAllowed.
        """
        states = {
            row: state for row, slot in enumerate(slots.tolist()) if (state := self._states.get(slot)) is not None
        }
        if not all(state.is_done for state in states.values()):
            with self._waiting():
                while waiting := [state for state in states.values() if not state.is_done and not _hangs(state)]:
                    self._wait(waiting, LONGEST_WAIT_S / 10)
        _check(keys, states)
        masks = {row: state.mask for row, state in states.items()}
        if drafts is not None:
            for row, state in states.items():
                depth = int(drafts.depths[row])
                if depth > len(state.ahead):  # it gives no token, so its mask does not matter
                    drafts.drafts[row - 1] = -1
                elif depth:
                    masks[row] = state.ahead[depth - 1]
        for row, end_ids in ends.items():
            others = masks.get(row, self._all_tokens).copy()
            remove(others, end_ids)
            if others.any():
                masks[row] = others
        return masks

    def take_work(self) -> GrammarWork | None:
        """Returns the work since the last call; None without any."""
        return self._done.take()

    def _submit(self, state: GrammarState, threads: WorkThreads) -> None:
        if state.is_constant:
            state.perform()
        else:
            threads.submit([state])

    def _wait(self, states: Collection[GrammarState], timeout_s: float) -> bool:
        if wait(states, timeout_s / 2):
            return True
        self._computing.help()
        self._compiling.help()
        return wait(states, timeout_s / 2)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return self._make_compiler()

    def _begin(self, state: GrammarState, sampling: Sampling, output_ids: list[int]) -> None:
        matcher: GrammarMatcher = AllTokens(self._all_tokens)
        mask_words = len(self._all_tokens)
        if sampling.grammar is not None:
            matcher, mask_words = self._compile(sampling.grammar), self._compiler.mask_words
        matcher = add_limits(matcher, sampling, self._vocab_size, self._all_tokens, self._eos_token_ids)
        state.begin(matcher, mask_words, output_ids)

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        compiler = self._compiler
        is_known, started = compiler.knows(grammar), perf_counter()
        matcher = compiler.compile(grammar)
        self._done.compiled(perf_counter() - started, is_known=is_known)
        return matcher


def _check(keys: Sequence[SequenceKey], states: Mapping[int, GrammarState]) -> None:
    """Raises GrammarFailed for masks that are not there. `states` are those of the rows that have one, by row."""
    failed: dict[SequenceKey, str] = {}
    without_token: dict[SequenceKey, str] = {}
    for row, state in states.items():
        if not state.is_done:
            failed[keys[row]] = _TOO_LONG.format(LONGEST_WAIT_S)
        elif isinstance(state.error, NoTokenLeft):
            without_token[keys[row]] = str(state.error)
        elif isinstance(state.error, GrammarError):
            failed[keys[row]] = str(state.error)
        elif state.error is not None:
            raise state.error
    if failed:
        raise GrammarFailed(f"constrained output cannot go on: {next(iter(failed.values()))}", list(failed))
    if without_token:
        raise NoTokenAllowed(next(iter(without_token.values())), list(without_token))


def _hangs(state: GrammarState) -> bool:
    return state.took_s() > LONGEST_WAIT_S


def _longest_wait_s() -> float:
    return LONGEST_WAIT_S


def make_grammar_compiler(name: str, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler:
    """The compiler for the model in directory `name`, or of the hub name `name` in the local cache.

    Takes up to seconds for a large vocabulary. Raises GrammarError if there is no tokenizer that it can read.
    """
    from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler  # most workers never need it

    return LLGuidanceCompiler(_tokenizer_json(name), vocab_size, eos_token_ids)


def _tokenizer_json(name: str) -> str:
    directory = find_model_dir(name)
    file = directory / "tokenizer.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        return str(tokenizer.backend_tokenizer.to_str())
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise GrammarError(f"grammars cannot be compiled for the tokenizer of {name}: {error}") from None
