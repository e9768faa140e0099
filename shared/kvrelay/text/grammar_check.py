"""Compiles the grammars of requests, so that a wrong one is refused before anything is queued."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import takewhile

import msgspec

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.grammar import Grammar
from kvrelay.protocol.messages import unpack_tokens
from kvrelay.text.grammar_process import CompilerSpec, GrammarProcess, Verdict
from kvrelay.text.tokenizer import Tokenizer

MAX_KNOWN = 1024
ANY_END_TOKEN = (0,)
"""Whether a grammar compiles does not depend on which token ends the output, and the router does not know it. Nor do
the tokens that it forces first, up to this one, unless this one has a text of several bytes: others could extend to it.
"""
MAX_CPU_S = 0.2


class GrammarCheck:
    """Remembers what it found for the latest grammars."""

    def __init__(self, tokenizer: Tokenizer, max_cpu_s: float = MAX_CPU_S) -> None:
        """`max_cpu_s`: for one grammar."""
        # Writing a large vocabulary takes 0.1 s with the GIL held, so it is done before requests come.
        written = tokenizer.backend.to_str()
        spec = CompilerSpec(written, tokenizer.vocab_size, ANY_END_TOKEN, max_cpu_s)
        self._known: dict[bytes, Verdict] = {}  # key: digest of the grammar; changed by the thread alone
        end = ANY_END_TOKEN[0]
        self._special_ids = tokenizer.special_ids
        self._knows_openings = end in self._special_ids or len(tokenizer.bytes_of[end]) <= 1
        self._thread = ThreadPoolExecutor(1, "grammar-check")
        self._process = GrammarProcess(spec)

    def start(self) -> None:
        """Starts the process that compiles, so that the first request with a grammar does not wait for that."""
        self._thread.submit(self._process.start)

    async def check(self, grammar: Grammar) -> None:
        """Raises GrammarError for a grammar that workers could not follow. Does not block the event loop."""
        digest = _digest(grammar)
        verdict = self._known.get(digest)
        if verdict is None:
            # If the client leaves, its job is cancelled, unless it runs.
            verdict = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, digest, grammar)
        if verdict.refusal:
            raise GrammarError(verdict.refusal)

    def _compile(self, digest: bytes, grammar: Grammar) -> Verdict:
        verdict = self._known.get(digest)  # from an earlier job for the same grammar
        if verdict is None:
            verdict = self._known[digest] = self._process.verdict(grammar)
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return verdict

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
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()


def _digest(grammar: Grammar) -> bytes:
    return blake2b(msgspec.msgpack.encode(grammar), digest_size=16).digest()
