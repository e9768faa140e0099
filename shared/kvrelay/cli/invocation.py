"""How the user calls this command."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def own_command(*, from_anywhere: bool = False) -> str:
    """What runs `kvrelay` from the current directory: its name if the PATH leads to this installation, else its path,
    such as `.venv/bin/kvrelay`; from any directory its whole path."""
    python = Path(sys.executable)
    found = shutil.which("kvrelay")
    if found is not None and Path(found).resolve().parent == python.parent.resolve():
        return "kvrelay"
    script = python.with_name("kvrelay")
    command = [script] if script.exists() else [python, "-m", "kvrelay"]
    here = Path.cwd()
    return shlex.join(
        str(each.relative_to(here))
        if isinstance(each, Path) and each.is_relative_to(here) and not from_anywhere
        else str(each)
        for each in command
    )
