"""Compiles the grammars of requests, so that a wrong one is refused before anything is queued."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np

from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.grammar import Grammar
from kvrelay_router.text.tokenizer import Tokenizer

MAX_KNOWN = 4096
ANY_END_TOKEN = (0,)
"""Whether a grammar compiles does not depend on which token ends the output, and the router does not know it."""


class GrammarCheck:
    """Remembers what it found for the latest grammars. Compiles in a thread of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()  # the error, if any
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")

    async def check(self, grammar: Grammar) -> None:
        """Raises GrammarError for a grammar that workers could not follow. Does not block the event loop."""
        if grammar in self._known:
            self._known.move_to_end(grammar)
        else:
            reason = await asyncio.get_running_loop().run_in_executor(self._thread, self._reason, grammar)
            self._known[grammar] = reason
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        reason = self._known.get(grammar)
        if reason is not None:
            raise GrammarError(reason)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _reason(self, grammar: Grammar) -> str | None:
        try:
            # Some limits are only met by the first mask.
            self._compiler.compile(grammar).fill(np.zeros(self._compiler.mask_words, np.int32))
        except GrammarError as error:
            return str(error)
        return None

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """Made and used on the thread alone."""
        return LLGuidanceCompiler(self._tokenizer.backend.to_str(), self._tokenizer.vocab_size, ANY_END_TOKEN)
