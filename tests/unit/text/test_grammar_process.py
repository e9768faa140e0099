"""Grammars are compiled in a process of their own, with limits that the kernel keeps."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import BufferedRWPair
from pathlib import Path

import pytest
import tokenizers

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text import grammar_check
from kvrelay.text.grammar_check import TOO_LARGE, TOO_LONG, CompilerSpec, GrammarCheck, GrammarProcess
from kvrelay.text.tokenizer import Tokenizer
from tests.fakes.hostile_grammars import ENDLESS
from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_file(str(ROOT / "models" / "demo" / "tokenizer.json")))
SPEC = CompilerSpec(TOKENIZER.backend.to_str(), TOKENIZER.vocab_size, (0,), max_cpu_s=0.2)
PATIENT = CompilerSpec(SPEC.tokenizer_json, SPEC.vocab_size, SPEC.end_token_ids, max_cpu_s=60.0)
GOOD = Grammar(kind=GrammarKind.REGEX, text="a+")
BAD = Grammar(kind=GrammarKind.REGEX, text="(a")
ENDLESS_REGEX = Grammar(kind=GrammarKind.REGEX, text=ENDLESS["optional characters"]["guided_regex"])


@pytest.fixture
def process() -> Iterator[GrammarProcess]:
    process = GrammarProcess(SPEC)
    yield process
    process.close()


def pid_of(process: GrammarProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_a_grammar_that_takes_long_is_refused_and_the_next_one_is_compiled(process: GrammarProcess) -> None:
    assert "unclosed group" in process.verdict(BAD).refusal
    pid = pid_of(process)
    assert process.verdict(ENDLESS_REGEX).refusal in (TOO_LONG.format(SPEC.max_cpu_s), TOO_LARGE)
    assert "unclosed group" in process.verdict(BAD).refusal
    assert pid_of(process) == pid


def test_a_process_that_was_started_compiles_the_first_grammar() -> None:
    process = GrammarProcess(PATIENT)
    try:
        process.start()
        pid = pid_of(process)
        process.start()
        assert process.verdict(GOOD).refusal == ""
        assert pid_of(process) == pid
    finally:
        process.close()
    process.start()
    assert process._process is None


def test_a_process_that_does_not_start_is_started_by_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    process = GrammarProcess(PATIENT)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere/python")
            process.start()
        assert process._process is None
        assert process.verdict(GOOD).refusal == ""
    finally:
        process.close()


def test_a_killed_process_is_replaced() -> None:
    process = GrammarProcess(PATIENT)
    try:
        assert process.verdict(GOOD).refusal == ""
        first = process._process
        assert first is not None
        first.kill()
        first.wait()
        assert process.verdict(GOOD).refusal == ""
        assert pid_of(process) != first.pid
    finally:
        process.close()


def test_close_ends_a_compilation() -> None:
    process = GrammarProcess(PATIENT)
    process.verdict(BAD)
    pid, failed = pid_of(process), threading.Event()

    def ask() -> None:
        try:
            process.verdict(ENDLESS_REGEX)
        except OSError:
            failed.set()

    asking = threading.Thread(target=ask)
    asking.start()
    process.close()
    asking.join(PATIENCE_S)
    assert failed.is_set()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_starts_while_it_is_closed_is_not_asked(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = process._start

    def start_late() -> BufferedRWPair:
        process._is_closed = True  # `close` finds no process, and waits for the end of `verdict`
        return start()

    monkeypatch.setattr(process, "_start", start_late)
    with pytest.raises(OSError, match="not compiled any more"):
        process.verdict(GOOD)
    assert process._process is None


def test_a_tokenizer_that_the_library_cannot_read_refuses_all() -> None:
    process = GrammarProcess(CompilerSpec("{}", 10, (0,), max_cpu_s=1.0))
    try:
        assert "tokenizer" in process.verdict(GOOD).refusal
        assert "tokenizer" in process.verdict(GOOD).refusal
    finally:
        process.close()


COMPILERS = {
    "bytearray(1 << 30)": TOO_LARGE,
    "os.abort()": TOO_LARGE,
    "os.kill(os.getpid(), 11)": TOO_LARGE,
    "exec('while True: pass')": TOO_LONG.format(0.1),
    "sys.exit(1)": "it cannot be compiled: SystemExit: 1",
    "raise_(Unprintable())": TOO_LARGE,
    "raise_(GrammarError('no ' + 'x' * 100_000))": "no x",
}
SCRIPT = """
import os, sys
from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.text.grammar_check import CompilerSpec, _verdict_of_fork
def raise_(error): raise error
class Unprintable(Exception):
    def __str__(self): raise MemoryError
class Compiler:
    def compile(self, grammar): {action}
print(_verdict_of_fork(Compiler(), None, CompilerSpec("", 1, (0,), 0.1)).refusal[:80])
"""


@pytest.mark.parametrize("action", COMPILERS)
def test_however_a_compilation_ends_there_is_a_reason(action: str) -> None:
    script = SCRIPT.format(action=action)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.startswith(COMPILERS[action])


async def test_a_grammar_is_compiled_once_for_all_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Grammar] = []
    may_go_on = threading.Event()

    class Counted(GrammarProcess):
        def verdict(self, grammar: Grammar) -> grammar_check.Verdict:
            asked.append(grammar)
            assert may_go_on.wait(PATIENCE_S)
            return grammar_check.Verdict("wrong" if grammar == BAD else "")

    monkeypatch.setattr("kvrelay.text.grammar_check.GrammarProcess", Counted)
    check = GrammarCheck(TOKENIZER)
    try:
        first, *others = [asyncio.ensure_future(check.check(BAD)) for _ in range(4)]
        await asyncio.sleep(0)
        first.cancel()  # its client has gone, the others still wait
        may_go_on.set()
        assert [str(error) for error in await asyncio.gather(*others, return_exceptions=True)] == ["wrong"] * 3
        with pytest.raises(GrammarError, match="wrong"):
            await check.check(BAD)
        await check.check(GOOD)
        await check.check(GOOD)
        assert asked == [BAD, GOOD]
    finally:
        check.close()


async def test_grammars_whose_clients_have_all_gone_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else clients that leave at once could fill the queue without bound."""
    asked: list[str] = []
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Slow(GrammarProcess):
        def verdict(self, grammar: Grammar) -> grammar_check.Verdict:
            asked.append(grammar.text)
            has_begun.set()
            assert may_go_on.wait(PATIENCE_S)
            return grammar_check.Verdict()

    monkeypatch.setattr("kvrelay.text.grammar_check.GrammarProcess", Slow)
    check = GrammarCheck(TOKENIZER)
    try:
        checks = [
            asyncio.ensure_future(check.check(Grammar(kind=GrammarKind.REGEX, text=text))) for text in "abcdefghb"
        ]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(has_begun.wait, PATIENCE_S)
        for each in checks[:7]:  # the last "b" and "h" are still waited for
            each.cancel()
        await asyncio.gather(*checks[:7], return_exceptions=True)
        again = asyncio.ensure_future(check.check(Grammar(kind=GrammarKind.REGEX, text="c")))
        await asyncio.sleep(0)
        may_go_on.set()
        await asyncio.gather(*checks[7:], again)
        assert asked == ["a", "h", "b", "c"]
        await check.check(Grammar(kind=GrammarKind.REGEX, text="a"))  # its refusal was kept
        assert asked == ["a", "h", "b", "c"]
    finally:
        may_go_on.set()
        check.close()


async def test_no_verdict_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot be started says nothing about the grammar: the next request asks again."""
    check = GrammarCheck(TOKENIZER, max_cpu_s=60.0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", "/nonexistent")
            with pytest.raises(OSError, match="nonexistent"):
                await check.check(GOOD)
        await check.check(GOOD)
    finally:
        check.close()
