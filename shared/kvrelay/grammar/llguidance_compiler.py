"""Grammars by llguidance: https://github.com/guidance-ai/llguidance.

Its matchers compute masks from the state of an Earley parser over a lexer of derivatives, with limits on the work of
each step, so that no grammar can hold up a worker for long.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvrelay.excerpts import shortened
from kvrelay.grammar.exact_numbers import ExactSchema, exact_schema, may_be_rounded
from kvrelay.grammar.grammar_compiler import GrammarError, TokenMask, address_of, allow_only
from kvrelay.grammar.schema_rewrite import rewritten
from kvrelay.grammar.structural_tag import (
    DEFAULT_WHITESPACE,
    lark_grammar,
    lark_of_grammar,
    lark_of_regex,
    structural_tag_to_lark,
)
from kvrelay.protocol.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_COMPILED = 256
MAX_COMPILED_BYTES = 128 << 20
"""Maximum number and estimated bytes of the compiled grammars that a process keeps. The latest one is always kept."""
COMPILED_BASE_BYTES, COMPILED_BYTES_PER_TEXT_BYTE = 256 << 10, 144
"""The estimate for one grammar. Measured (glibc's `mallinfo2`): 0.05 to 0.25 MB for small ones, 5.8 MB for a schema of
57 KB. It leaves out the lexer states that outputs add, up to 3 MB for a long `maxLength`, which `LIMITS` bounds."""
LIMITS = LLParserLimits(max_lexer_states=50_000, precompute_large_lexemes=False)
"""The others are the library's: 20 ms to build a lexer, 14 ms of lexing and 3 ms of parsing for a mask."""

NO_OUTPUT = "no output satisfies it"


class LLGuidanceCompiler:
    """A `GrammarCompiler` that keeps the latest grammars in compiled form."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json`: the content of a tokenizer.json. `vocab_size`: of the model, which may have more tokens
        than the tokenizer; these are never allowed.

        Raises:
            GrammarError: the tokenizer is of a kind that the library cannot read, or no token ends an output.
        """
        if not eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token to end constrained output with")
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
            if vocab_size > self._tokenizer.vocab_size:  # which only a tokenizer that was read tells
                self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except (ValueError, RuntimeError) as error:
            raise GrammarError(f"grammars cannot be compiled for this tokenizer: {error}") from None
        self._eos_token_ids = tuple(eos_token_ids)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._compiled_bytes = 0
        self._lock = Lock()

    @property
    def mask_words(self) -> int:
        return int(self._tokenizer.vocab_size + 31) // 32

    def knows(self, grammar: Grammar) -> bool:
        with self._lock:
            return grammar in self._compiled

    def compile(self, grammar: Grammar) -> LLGuidanceMatcher:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
        if found is None:
            found = self._compile(grammar)
        return LLGuidanceMatcher(found.deep_copy(), self._eos_token_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = self._matcher(grammar)
        if matcher.is_error() and grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG):
            matcher = self._matcher(grammar, rewrites=True)
        _check(matcher)
        self._keep(grammar, matcher)
        return matcher

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> None:
        with self._lock:
            if grammar in self._compiled:  # another thread compiled it meanwhile
                return
            self._compiled[grammar] = matcher
            self._compiled_bytes += _estimated_bytes(grammar)
            while len(self._compiled) > 1 and (
                len(self._compiled) > MAX_COMPILED or self._compiled_bytes > MAX_COMPILED_BYTES
            ):
                oldest, _ = self._compiled.popitem(last=False)
                self._compiled_bytes -= _estimated_bytes(oldest)

    def _matcher(self, grammar: Grammar, *, rewrites: bool = False) -> LLMatcher:
        """`rewrites`: its schemas are rewritten first."""
        return LLMatcher(self._tokenizer, _notation(grammar, rewrites), log_level=0, limits=LIMITS)


def _estimated_bytes(grammar: Grammar) -> int:
    return COMPILED_BASE_BYTES + COMPILED_BYTES_PER_TEXT_BYTE * len(grammar.text.encode())


class LLGuidanceMatcher:
    """Computes each forced run once, at its first token, and keeps it until the output has passed it.

    A tokenizer may split the rest of a run in another way than the run: one that groups digits by threes reads 98761234
    as 987|612|34, and what follows 98 as 876|123|4. So the tokens forced inside a run depend on where the run began,
    and `accept` finds the runs of an output that it is given at once: a matcher made for a retry goes on like the one
    before. This also saves time: to tokenize the rest of 100 KB of forced bytes for each token takes 50 ms each.
    """

    allows_all = False

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._has_ended = False
        self._run: Sequence[int] | None = None  # None: not computed for this place
        self._run_at = 0  # the next token of the run

    def copy(self) -> LLGuidanceMatcher:
        copied = LLGuidanceMatcher(self._matcher.deep_copy(), self._eos_token_ids)
        copied._has_ended, copied._run, copied._run_at = self._has_ended, self._run, self._run_at
        return copied

    def accept(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) == 1 and not self._kept_run():  # nearly every call
            self._run = None
            self._consume(token_ids)
            return
        at = 0
        while at < len(token_ids):
            run = self._kept_run()
            end = min(self._run_at + len(token_ids) - at, len(run))
            forced = run[self._run_at : end]
            if forced and list(token_ids[at : at + len(forced)]) == list(forced):
                part: Sequence[int] = forced
                self._run_at = end
            else:
                part = token_ids[at : at + 1]
                self._run_at = len(run)
            if self._run_at == len(run):
                self._run = None
            self._consume(part)
            at += len(part)

    def _consume(self, token_ids: Sequence[int]) -> None:
        self._has_ended = token_ids[-1] in self._eos_token_ids
        if not self._matcher.consume_tokens(list(token_ids[:-1] if self._has_ended else token_ids)):
            _check(self._matcher)
        # A complete output that nothing can follow stops the library's matcher, which then takes no end either.
        if self._has_ended and not self._matcher.is_stopped():
            self._matcher.consume_token(token_ids[-1])
        _check(self._matcher)

    def forced(self) -> Sequence[int]:
        run = self._kept_run()
        return run[self._run_at :] if self._run_at else run

    def _kept_run(self) -> Sequence[int]:
        """The run that the next token is in, from its first token on; the next token is at `_run_at`."""
        if self._run is None:
            self._run, self._run_at = () if self._has_ended else self._forced_here(), 0
        return self._run

    def _forced_here(self) -> Sequence[int]:
        token_ids = self._matcher.compute_ff_tokens()
        _check(self._matcher)
        if not token_ids and len(self._eos_token_ids) == 1 and self._matcher.is_stopped():
            return self._eos_token_ids
        return token_ids

    def fill(self, mask: TokenMask) -> None:
        if run := self._kept_run():
            allow_only(mask, run[self._run_at])
            return
        self._matcher.unsafe_compute_mask_ptr(address_of(mask), mask.nbytes)
        _check(self._matcher)
        if not np.count_nonzero(mask):  # a quarter of the time of `any`
            raise GrammarError("no token can continue the output")


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_in_words(matcher.get_error()))


def _in_words(reason: str) -> str:
    """The library's reason without the state of its matcher, which is of no use to clients."""
    reason = reason.partition("\n<state>")[0]
    if reason == "NoExtensionBias":
        return NO_OUTPUT
    return "it is nested too deeply" if "recursion limit exceeded" in reason else shortened(reason)


def _notation(grammar: Grammar, rewrites: bool) -> str:
    """The grammar in the library's notation. Raises GrammarError."""
    whitespace = DEFAULT_WHITESPACE if grammar.whitespace is None else grammar.whitespace
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _of_json_schema(grammar, whitespace, rewrites)
        case GrammarKind.STRUCTURAL_TAG:
            return structural_tag_to_lark(grammar.text, whitespace, rewrites=rewrites)
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(lark_of_regex(grammar.text)))
        case GrammarKind.CHOICE:
            # A terminal, which the lexer decides: as rules, many choices would exceed the parser's limits.
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
        case GrammarKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(lark_of_grammar(grammar.text, "the grammar")))


def _of_json_schema(grammar: Grammar, whitespace: str, rewrites: bool) -> str:
    if grammar.text.strip() == "false":
        raise GrammarError(NO_OUTPUT)
    options: JsonCompileOptions = {"whitespace_pattern": whitespace}
    text = (rewritten(grammar.text) if rewrites else None) or grammar.text
    if (exact := _exact(text, whitespace)) is not None:
        return lark_grammar(exact.start, exact.rules)
    try:
        text = "{}" if text.strip() == "true" else text  # the library takes no schemas but objects
        return str(LLMatcher.grammar_from_json_schema(text, overrides=options))
    except ValueError as error:
        raise GrammarError(_in_words(f"the schema is no JSON: {error}")) from None


def _exact(text: str, whitespace: str) -> ExactSchema | None:
    if not may_be_rounded(text):
        return None
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return None  # the library says what is wrong
    return exact_schema(schema, whitespace, "exact")
