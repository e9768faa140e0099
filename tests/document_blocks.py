"""The blocks of code in the documents, and how each is tested.

A block of shell or Python says it in the line that opens it, behind the language, which a reader of the page does not
see:

- `run`: a test executes it (`tests/e2e/demo_stack/test_documents.py`).
- `checked: REASON`: it is not executed for that reason; its commands, flags, modules and files must exist
  (`tests/unit/docs/test_blocks.py`).
- `skip: REASON`: nothing is tested, because it needs what a test machine does not have.

A block of another language whose line names a file, as in ```toml fleets.toml, is written beside those that run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    sorted(
        page
        for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "deploy/**/*.md", "examples/*.md", "models/*/*.md")
        for page in ROOT.glob(pattern)
        if page.name != "clients.md"
    )
)
"""All but docs/clients.md, whose programs `tests/e2e/clients` runs with the clients they name."""
COMMANDS = ("sh", "bash", "console")
LANGUAGES = (*COMMANDS, "python")
KINDS = ("run", "checked", "skip")
_BLOCK = re.compile(r"^( *)```(\w*) ?([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One block. `line` counts from 1; `mark` is what follows the language."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def kind(self) -> str:
        return self.mark.partition(":")[0].strip()

    @property
    def reason(self) -> str:
        return self.mark.partition(":")[2].strip()

    @property
    def is_command(self) -> bool:
        return self.language in COMMANDS

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    text = page.read_text(encoding="utf-8")
    return tuple(
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], found[3].strip(), _dedented(found[4], found[1]))
        for found in _BLOCK.finditer(text)
    )


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def statements(text: str) -> list[str]:
    """The commands of a shell block without comments, those over several lines as one."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _dedented(text: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
