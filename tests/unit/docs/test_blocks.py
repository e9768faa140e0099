"""Every block of commands in the documents says how it is tested, and what is not executed names things that exist."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from kvrelay.cli.main import COMMANDS
from kvrelay_bench.program_bench import programs_parser
from tests.document_blocks import KINDS, LANGUAGES, PAGES, ROOT, Block, all_blocks, statements

BLOCKS = [block for block in all_blocks() if block.language in LANGUAGES]
ASSIGNMENT = re.compile(r"^\w+=")
PYTHONS = re.compile(r"^(\.venv/bin/)?python3?$")
GENERAL = frozenset({"pip", "venv"})
"""Modules of Python itself."""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_says_how_it_is_tested(block: Block) -> None:
    assert block.kind in KINDS, f"{block}: ```{block.language} run, checked: REASON, or skip: REASON"
    assert bool(block.reason) == (block.kind != "run"), f"{block}: a reason, unless it runs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_stand_in_marked_blocks(page: Path) -> None:
    text = re.sub(r"^( *)```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {4,}(?:\$ )?(?:kvrelay|docker|make|python|curl|pip) .*$", text, re.MULTILINE) == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "checked"], ids=str)
def test_what_is_only_checked_exists(block: Block) -> None:
    assert block.is_command, f"{block}: a program runs, or is skipped with a reason"
    for statement in statements(block.text):
        check(shlex.split(statement))


INLINE = [
    (page, command)
    for page in PAGES
    if page.name != "CHANGELOG.md"  # where earlier names stand
    for command in re.findall(r"`((?:kvrelay|python -m|make) [^`\n]+)`", page.read_text(encoding="utf-8"))
    if not command.startswith("kvrelay needs")  # a message
]


@pytest.mark.parametrize(("page", "command"), INLINE, ids=[f"{page.name}: {command}" for page, command in INLINE])
def test_a_command_within_a_sentence_exists(page: Path, command: str) -> None:
    check(shlex.split(re.sub(r"[\[\]…]|\.\.\.", " ", command)))


def test_a_wrong_flag_command_module_target_and_file_are_found() -> None:
    for wrong in (
        "kvrelay up --no-such-flag 3",
        "kvrelay upp",
        "kvrelay bench http://x --rat 2",
        "python -m benchmarks.no_such_module",
        "python -m benchmarks.disaggregation --no-such-flag",
        "make no-such-target",
        "scripts/no-such-script",
        ".venv/bin/python scripts/docs.py --no-such-flag",
        "ls",
    ):
        with pytest.raises(AssertionError):
            check(shlex.split(wrong))


def check(words: list[str]) -> None:
    """Raises AssertionError unless the command and everything it names exist."""
    while words and (ASSIGNMENT.match(words[0]) or words[0] == "export"):
        words = words[1:]
    if not words:
        return
    program, rest = words[0], words[1:]
    flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
    if program.removeprefix(".venv/bin/") == "kvrelay":
        if rest and not rest[0].startswith("-"):
            known = known_flags().get(rest[0])
            assert known is not None, f"kvrelay {rest[0]} is no command"
            assert flags - known == set(), f"kvrelay {rest[0]} has no {flags - known}"
    elif program == "make":
        targets = {word for word in rest if "=" not in word}
        assert targets - make_targets() == set()
    elif PYTHONS.match(program) and rest[0] == "-m":
        if rest[1] not in GENERAL:
            sources = sources_of(rest[1])
            assert flags - flags_in("".join(sources)) == set(), f"{rest[1]} has no {flags}"
    elif PYTHONS.match(program):
        assert flags - flags_in((ROOT / rest[0]).read_text(encoding="utf-8")) == set()
    else:
        assert "/" in program, f"{program}: cannot be checked; run it, or skip the block with a reason"
        assert program.startswith(".venv/") or (ROOT / program).exists(), f"{program} does not exist"
        missing = [word for word in rest if "/" in word and word.startswith("tests/") and not (ROOT / word).exists()]
        assert missing == []


@cache
def known_flags() -> dict[str, set[str]]:
    """The flags of every command, also the names of other servers that its help leaves out."""
    parsers = {name: [command.flag_parser()] for name, command in COMMANDS.items()}
    parsers["bench"].append(programs_parser())
    return {name: {flag for parser in of for flag in parser._option_string_actions} for name, of in parsers.items()}


@cache
def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


def sources_of(module: str) -> list[str]:
    """The sources of a module of this repository, or of all in its package, and of those of `benchmarks` it imports."""
    path = ROOT / module.replace(".", "/")
    found = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else sorted(path.rglob("*.py"))
    assert found, f"there is no module {module}"
    sources = [each.read_text(encoding="utf-8") for each in found]
    imported = set(re.findall(r"^from (benchmarks\.[\w.]+) import", "".join(sources), re.MULTILINE))
    files = [ROOT / f"{each.replace('.', '/')}.py" for each in sorted(imported)]
    return sources + [file.read_text(encoding="utf-8") for file in files if file.exists()]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z0-9-]*", text))
