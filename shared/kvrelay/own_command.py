"""How a user calls these commands, and what to tell one of whom a router does not answer."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path


def own_command(*, from_anywhere: bool = False) -> str:
    """Returns `kvrelay` if the PATH leads to this installation, else the path of the script for a shell, such as
    `.venv/bin/kvrelay`: relative to the current directory if the script lies below it, unless `from_anywhere`."""
    python = Path(sys.executable)
    found = shutil.which("kvrelay")
    if found is not None and Path(found).resolve().parent == python.parent.resolve():
        return "kvrelay"
    script = python.with_name("kvrelay")
    program, arguments = (script, []) if script.exists() else (python, ["-m", "kvrelay"])
    if not from_anywhere:
        with suppress(FileNotFoundError):  # the current directory was deleted
            if program.is_relative_to(here := Path.cwd()):
                program = program.relative_to(here)
    return shlex.join([str(program), *arguments])


def cause(error: Exception) -> str:
    """The system's words for an error of a connection, such as `Connection refused`."""
    reason = getattr(error, "reason", error)
    return getattr(reason, "strerror", None) or str(reason)


def no_answer(url: str, error: Exception) -> str:
    """Why a router does not answer, and what to do."""
    return f"{url} does not answer ({cause(error)}); start one with `{own_command()} up`, or name its URL"
