"""How the user calls this command."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def own_command() -> str:
    """What runs `kvrelay` from the current directory: its name if it is on the PATH, else its path in this environment,
    such as `.venv/bin/kvrelay`."""
    if shutil.which("kvrelay"):
        return "kvrelay"
    python = Path(sys.executable)
    script = python.with_name("kvrelay")
    command = [script] if script.exists() else [python, "-m", "kvrelay"]
    here = Path.cwd()
    return shlex.join(
        str(each.relative_to(here)) if isinstance(each, Path) and each.is_relative_to(here) else str(each)
        for each in command
    )
