"""Compiles the grammars of requests, so that a wrong one is refused before anything is queued.

Whether a grammar compiles in bounded time cannot be seen from its text: products of `multipleOf`, intersections of
patterns and repetitions within terminals grow beyond any limit of the library. So each is compiled in a fork of
`python -m kvrelay.text.grammar_check FD`, which the kernel ends at its limits. Its connection brings a `CompilerSpec`
and then grammars, each of which it answers with a `Verdict`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from io import BufferedRWPair
from itertools import islice, takewhile
from pathlib import Path
from threading import Lock
from typing import TypeVar

import msgspec
import numpy as np

from kvrelay.excerpts import shortened
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError
from kvrelay.protocol.messages import pack_tokens, unpack_tokens
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.tokenizer import Tokenizer

MAX_KNOWN = 1024
ANY_END_TOKEN = (0,)
"""Whether a grammar compiles does not depend on which token ends the output, and the router does not know it. Nor do
the tokens that it forces first, up to this one, unless this one has a text of several bytes: others could extend to it.
"""
MAX_CPU_S = 0.2
MAX_MEMORY_BYTES = 128 << 20
"""Memory that the compilation of one grammar may take."""
LONGEST_WAIT_S = 60.0
"""Longest wait for a verdict on a busy machine. CPU time is limited to much less."""
TOO_LONG = "it takes more than {:g} s of CPU time to compile"
TOO_LARGE = "it takes too much memory or is nested too deeply to compile"

MAX_OPENING_TOKENS = 64
"""The most tokens of an opening: as many as a worker appends to an output at once."""

_LENGTH_BYTES = 4
_MAX_REFUSAL_CHARS = 2000
_FIRST = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"object","properties":{"a":{"pattern":"b"}}}')


Message = TypeVar("Message", bound=msgspec.Struct)


class CompilerSpec(msgspec.Struct, frozen=True):
    tokenizer_json: str
    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_cpu_s: float


class Verdict(msgspec.Struct, frozen=True):
    """`refusal`: why the grammar is refused; empty if it can be followed. `opening`: packed tokens that every output
    begins with, without the end; not more than `MAX_OPENING_TOKENS`."""

    refusal: str = ""
    opening: bytes = b""


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


class GrammarProcess:
    """The process is started by `start` or at the first grammar, and again if it has ended. Thread-safe; grammars are
    done in turns."""

    def __init__(self, spec: CompilerSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: BufferedRWPair | None = None
        self._lock = Lock()
        self._is_closed = False

    def start(self) -> None:
        """Starts the process, which takes some seconds to be ready. Blocks for a moment. If it does not start, the
        first `verdict` tries again."""
        with self._lock:
            if self._process is None and not self._is_closed:
                with suppress(OSError):
                    self._start()

    def verdict(self, grammar: Grammar) -> Verdict:
        """Blocks. Raises OSError if not even a new process gives a verdict, or after `close`."""
        with self._lock:
            try:
                return self._ask(grammar)
            except OSError:
                return self._ask(grammar)

    def close(self) -> None:
        """A `verdict` that runs fails."""
        self._is_closed = True
        self._kill()
        with self._lock:
            self._end()

    def _ask(self, grammar: Grammar) -> Verdict:
        """Ends the process if it gives no verdict."""
        try:
            stream = self._stream or self._start()
            if self._is_closed:  # `close` may have found no process to kill
                raise BrokenPipeError("grammars are not compiled any more")
            _write(stream, grammar)
            return _read(stream, Verdict)
        except OSError:
            self._end()
            raise

    def _start(self) -> BufferedRWPair:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(LONGEST_WAIT_S)
            stream = self._stream = ours.makefile("rwb")  # its end ends the process, so the router's end does too
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvrelay.text.grammar_check", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},  # threads would not survive a fork
            )
        _write(stream, self._spec)
        return stream

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self) -> None:
        self._kill()
        process, self._process = self._process, None
        stream, self._stream = self._stream, None
        if process is not None:
            process.wait()
        if stream is not None:
            with suppress(OSError):  # the process left buffered data unread
                stream.close()


def _write(stream: BufferedRWPair, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def _read(stream: BufferedRWPair, kind: type[Message]) -> Message:
    """Raises OSError if the other process has ended."""
    data = stream.read(int.from_bytes(stream.read(_LENGTH_BYTES), "big"))
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise BrokenPipeError(f"the other process has ended: {error}") from None


def _verdict(compiler: GrammarCompiler, grammar: Grammar, end_token_ids: tuple[int, ...]) -> Verdict:
    try:
        # Some limits are only met by the first mask or run.
        matcher = compiler.compile(grammar)
        matcher.fill(np.zeros(compiler.mask_words, np.int32))
        forced = takewhile(lambda token_id: token_id not in end_token_ids, matcher.forced())
        return Verdict(opening=pack_tokens(list(islice(forced, MAX_OPENING_TOKENS))))
    except GrammarError as error:
        return Verdict(str(error))
    except MemoryError:
        return Verdict(TOO_LARGE)
    except BaseException as error:  # panics of the library are no Exceptions
        return Verdict(f"it cannot be compiled: {type(error).__name__}: {shortened(str(error), 200)}")


def _verdict_of_fork(compiler: GrammarCompiler, grammar: Grammar, spec: CompilerSpec) -> Verdict:
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        status = os.EX_SOFTWARE  # also if there is no memory for an error's text: no text would mean no refusal
        try:
            _limit(spec.max_cpu_s)
            verdict = _verdict(compiler, grammar, spec.end_token_ids)
            refusal = verdict.refusal[:_MAX_REFUSAL_CHARS].encode(errors="replace").decode()
            os.write(target, msgspec.msgpack.encode(msgspec.structs.replace(verdict, refusal=refusal)))
            status = os.EX_OK
        finally:
            os._exit(status)
    os.close(target)
    with open(source, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return msgspec.msgpack.decode(answer, type=Verdict)
    is_too_long = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return Verdict(TOO_LONG.format(spec.max_cpu_s) if is_too_long else TOO_LARGE)


def _limit(max_cpu_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library's last words
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # SIGPROF ends the process


def main() -> None:
    from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler  # the router itself does without

    with socket.socket(fileno=int(sys.argv[1])) as connection:
        stream = connection.makefile("rwb")
    spec = _read(stream, CompilerSpec)
    compiler, reason = None, ""
    try:
        compiler = LLGuidanceCompiler(spec.tokenizer_json, spec.vocab_size, spec.end_token_ids)
        _verdict(compiler, _FIRST, spec.end_token_ids)  # forks share the library's lazily built state
    except GrammarError as error:
        reason = str(error)
    gc.disable()
    gc.freeze()
    with suppress(OSError):
        while True:
            grammar = _read(stream, Grammar)
            _write(stream, Verdict(reason) if compiler is None else _verdict_of_fork(compiler, grammar, spec))


if __name__ == "__main__":
    main()
