"""Compiles the grammars of requests, so that a wrong one is refused before anything is queued."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

import msgspec

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.grammar import Grammar
from kvrelay.protocol.messages import unpack_tokens
from kvrelay_router.text.grammar_process import CompilerSpec, GrammarProcess, Verdict
from kvrelay_router.text.tenant_threads import NO_TENANT, TenantThreads, current_share
from kvrelay_router.text.tokenizer import Tokenizer

MAX_KNOWN = 4096
MAX_KNOWN_BYTES = 4 << 20
"""Of the texts of refusals, which quote what is wrong and may be long, and of openings."""
ANY_END_TOKEN = (0,)
"""Whether a grammar compiles does not depend on which token ends the output, and the router does not know it. Nor do
the tokens that it forces first, up to this one, unless this one has a text of several bytes: others could extend to it.
"""
MAX_CPU_S = 0.2


@dataclass(slots=True)
class _Compilation:
    job: Future[Verdict]
    verdict: asyncio.Future[Verdict]
    num_waiting: int = 0


class KnownVerdicts:
    """The verdicts on the grammars that were asked for last, by digest of the grammar, which may have 128 KiB."""

    def __init__(self, max_entries: int = MAX_KNOWN, max_bytes: int = MAX_KNOWN_BYTES) -> None:
        self.num_bytes = 0
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def __len__(self) -> int:
        return len(self._verdicts)

    def get(self, digest: bytes) -> Verdict | None:
        """None if it is not known."""
        verdict = self._verdicts.get(digest)
        if verdict is not None:
            self._verdicts.move_to_end(digest)
        return verdict

    def put(self, digest: bytes, verdict: Verdict) -> None:
        """Adds a verdict, and drops those that were not asked for the longest time. One that is too long for all the
        bytes is not kept.
        """
        self.num_bytes += verdict.num_bytes - self._verdicts.pop(digest, Verdict()).num_bytes
        self._verdicts[digest] = verdict
        while len(self._verdicts) > self._max_entries or self.num_bytes > self._max_bytes:
            _, oldest = self._verdicts.popitem(last=False)
            self.num_bytes -= oldest.num_bytes


class GrammarCheck:
    """Remembers what it found for the latest grammars."""

    def __init__(self, tokenizer: Tokenizer, max_cpu_s: float = MAX_CPU_S) -> None:
        """`max_cpu_s`: for one grammar."""
        # Writing a large vocabulary takes 0.1 s with the GIL held, so it is done before requests come.
        written = tokenizer.backend.to_str()
        self._spec = CompilerSpec(written, tokenizer.vocab_size, ANY_END_TOKEN, max_cpu_s)
        self._known = KnownVerdicts()
        end = ANY_END_TOKEN[0]
        self._special_ids = tokenizer.special_ids
        self._knows_openings = end in self._special_ids or len(tokenizer.bytes_of[end]) <= 1
        self._running: dict[bytes, _Compilation] = {}
        self._thread = TenantThreads(1, "grammar-check")
        self._process: GrammarProcess | None = None

    def start(self) -> None:
        """Starts the process that compiles, so that the first request with a grammar does not wait for that."""
        process = self._process = self._process or GrammarProcess(self._spec)
        self._thread.submit(process.start, 0.0, NO_TENANT)

    async def check(self, grammar: Grammar) -> None:
        """Raises GrammarError for a grammar that workers could not follow. Does not block the event loop."""
        digest = _digest(grammar)
        verdict = self._known.get(digest)
        if verdict is None:
            verdict = await self._wait(digest, self._running.get(digest) or self._begin(digest, grammar))
        if verdict.refusal:
            raise GrammarError(verdict.refusal)

    def opening(self, grammar: Grammar) -> list[int]:
        """The tokens that every output of a grammar begins with, up to the first place with a choice or with a special
        token, which may end the output. None for a grammar that was not among the latest that were checked."""
        verdict = self._known.get(_digest(grammar)) if self._knows_openings else None
        if verdict is None or not verdict.opening:
            return []
        return list(takewhile(self._is_ordinary, unpack_tokens(verdict.opening).tolist()))

    def _is_ordinary(self, token_id: int) -> bool:
        return token_id not in self._special_ids

    def close(self) -> None:
        self._thread.close()
        if self._process is not None:
            self._process.close()

    async def _wait(self, digest: bytes, compilation: _Compilation) -> Verdict:
        compilation.num_waiting += 1
        try:
            return await asyncio.shield(compilation.verdict)
        finally:
            compilation.num_waiting -= 1
            # Clients that leave must not fill the queue. One that runs goes on: its verdict is worth knowing.
            if not compilation.num_waiting and compilation.job.cancel():
                del self._running[digest]

    def _begin(self, digest: bytes, grammar: Grammar) -> _Compilation:
        process = self._process = self._process or GrammarProcess(self._spec)
        # All grammars cost the same: their CPU time is limited, and their texts do not show it.
        job = self._thread.submit(lambda: process.verdict(grammar), 1.0, current_share.get())
        compilation = self._running[digest] = _Compilation(job, asyncio.wrap_future(job))
        compilation.verdict.add_done_callback(lambda verdict: self._ended(digest, verdict))
        return compilation

    def _ended(self, digest: bytes, verdict: asyncio.Future[Verdict]) -> None:
        if verdict.cancelled():
            return
        del self._running[digest]
        if verdict.exception() is None:
            self._known.put(digest, verdict.result())


def _digest(grammar: Grammar) -> bytes:
    return blake2b(msgspec.msgpack.encode(grammar), digest_size=16).digest()
