"""Compiles the grammars of requests, so that a wrong one is refused before anything is queued."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.grammar import Grammar
from kvrelay_router.text.grammar_process import CompilerSpec, GrammarProcess
from kvrelay_router.text.tenant_threads import NO_TENANT, TenantThreads, current_share
from kvrelay_router.text.tokenizer import Tokenizer

MAX_KNOWN = 4096
MAX_KNOWN_BYTES = 4 << 20
"""Of the texts of refusals, which quote what is wrong and may be long."""
ANY_END_TOKEN = (0,)
"""Whether a grammar compiles does not depend on which token ends the output, and the router does not know it."""
MAX_CPU_S = 0.2


@dataclass(slots=True)
class _Compilation:
    job: Future[str]
    refusal: asyncio.Future[str]
    num_waiting: int = 0


class KnownRefusals:
    """The refusals of the grammars that were asked for last, by digest of the grammar, which may have 128 KiB itself.
    Empty: the grammar compiles.
    """

    def __init__(self, max_entries: int = MAX_KNOWN, max_bytes: int = MAX_KNOWN_BYTES) -> None:
        self.num_bytes = 0
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._refusals: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refusals)

    def get(self, digest: bytes) -> str | None:
        """None if it is not known."""
        refusal = self._refusals.get(digest)
        if refusal is not None:
            self._refusals.move_to_end(digest)
        return refusal

    def put(self, digest: bytes, refusal: str) -> None:
        """Adds a refusal, and drops those that were not asked for the longest time. One that is too long for all the
        bytes is not kept.
        """
        self.num_bytes += len(refusal.encode()) - len(self._refusals.pop(digest, "").encode())
        self._refusals[digest] = refusal
        while len(self._refusals) > self._max_entries or self.num_bytes > self._max_bytes:
            _, oldest = self._refusals.popitem(last=False)
            self.num_bytes -= len(oldest.encode())


class GrammarCheck:
    """Remembers what it found for the latest grammars."""

    def __init__(self, tokenizer: Tokenizer, max_cpu_s: float = MAX_CPU_S) -> None:
        """`max_cpu_s`: for one grammar."""
        # Writing a large vocabulary takes 0.1 s with the GIL held, so it is done before requests come.
        written = tokenizer.backend.to_str()
        self._spec = CompilerSpec(written, tokenizer.vocab_size, ANY_END_TOKEN, max_cpu_s)
        self._known = KnownRefusals()
        self._running: dict[bytes, _Compilation] = {}
        self._thread = TenantThreads(1, "grammar-check")
        self._process: GrammarProcess | None = None

    def start(self) -> None:
        """Starts the process that compiles, so that the first request with a grammar does not wait for that."""
        process = self._process = self._process or GrammarProcess(self._spec)
        self._thread.submit(process.start, 0.0, NO_TENANT)

    async def check(self, grammar: Grammar) -> None:
        """Raises GrammarError for a grammar that workers could not follow. Does not block the event loop."""
        digest = blake2b(msgspec.msgpack.encode(grammar), digest_size=16).digest()
        refusal = self._known.get(digest)
        if refusal is None:
            refusal = await self._wait(digest, self._running.get(digest) or self._begin(digest, grammar))
        if refusal:
            raise GrammarError(refusal)

    def close(self) -> None:
        self._thread.close()
        if self._process is not None:
            self._process.close()

    async def _wait(self, digest: bytes, compilation: _Compilation) -> str:
        compilation.num_waiting += 1
        try:
            return await asyncio.shield(compilation.refusal)
        finally:
            compilation.num_waiting -= 1
            # Clients that leave must not fill the queue. One that runs goes on: its refusal is worth knowing.
            if not compilation.num_waiting and compilation.job.cancel():
                del self._running[digest]

    def _begin(self, digest: bytes, grammar: Grammar) -> _Compilation:
        process = self._process = self._process or GrammarProcess(self._spec)
        # All grammars cost the same: their CPU time is limited, and their texts do not show it.
        job = self._thread.submit(lambda: process.verdict(grammar).refusal, 1.0, current_share.get())
        compilation = self._running[digest] = _Compilation(job, asyncio.wrap_future(job))
        compilation.refusal.add_done_callback(lambda refusal: self._ended(digest, refusal))
        return compilation

    def _ended(self, digest: bytes, refusal: asyncio.Future[str]) -> None:
        if refusal.cancelled():
            return
        del self._running[digest]
        if refusal.exception() is None:
            self._known.put(digest, refusal.result())
