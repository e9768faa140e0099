"""Compiles the grammars of requests, so that a wrong one is refused before anything is queued."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import msgspec

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.grammar import Grammar
from kvrelay_router.text.grammar_process import CompilerSpec, GrammarProcess
from kvrelay_router.text.tokenizer import Tokenizer

MAX_KNOWN = 4096
ANY_END_TOKEN = (0,)
"""Whether a grammar compiles does not depend on which token ends the output, and the router does not know it."""
MAX_CPU_S = 0.2


class GrammarCheck:
    """Remembers what it found for the latest grammars."""

    def __init__(self, tokenizer: Tokenizer, max_cpu_s: float = MAX_CPU_S) -> None:
        """`max_cpu_s`: for one grammar."""
        self._tokenizer = tokenizer
        self._max_cpu_s = max_cpu_s
        self._known: OrderedDict[bytes, str] = OrderedDict()  # refusals by digest; a grammar may have 128 KiB
        self._running: dict[bytes, asyncio.Future[str]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")
        self._process: GrammarProcess | None = None

    async def check(self, grammar: Grammar) -> None:
        """Raises GrammarError for a grammar that workers could not follow. Does not block the event loop."""
        digest = blake2b(msgspec.msgpack.encode(grammar), digest_size=16).digest()
        refusal = self._known.get(digest)
        if refusal is None:
            refusal = await asyncio.shield(self._running.get(digest) or self._begin(digest, grammar))
        else:
            self._known.move_to_end(digest)
        if refusal:
            raise GrammarError(refusal)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()

    def _begin(self, digest: bytes, grammar: Grammar) -> asyncio.Future[str]:
        if self._process is None:
            written = self._tokenizer.backend.to_str()
            spec = CompilerSpec(written, self._tokenizer.vocab_size, ANY_END_TOKEN, self._max_cpu_s)
            self._process = GrammarProcess(spec)
        process = self._process
        found = asyncio.get_running_loop().run_in_executor(self._thread, lambda: process.verdict(grammar).refusal)
        self._running[digest] = found
        found.add_done_callback(lambda _: self._ended(digest, found))
        return found

    def _ended(self, digest: bytes, found: asyncio.Future[str]) -> None:
        del self._running[digest]
        if not found.cancelled() and found.exception() is None:
            self._known[digest] = found.result()
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
