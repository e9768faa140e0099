"""What `scripts/install-clients` installed, and the programs of docs/clients.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fakes.scripted.system import MODEL, ScriptedSystem
from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / ".clients"
PYTHON = CLIENTS / "venv" / "bin" / "python"
NODE_MODULES = CLIENTS / "node_modules"
MISSING = "not installed: run scripts/install-clients"
SHOWN_URL = "http://127.0.0.1:8000"
HOSTS = ("ANTHROPIC", "CLAUDE", "CODEX", "OPENAI", "KVRELAY", "LITELLM", "LANGCHAIN", "LANGSMITH")


def snippet(name: str, system: ScriptedSystem) -> str:
    """A program or configuration from the page, for this system."""
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```\w+ {re.escape(name)}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert MODEL in found
    return str(found).replace(SHOWN_URL, system.base_url)


def run(command: Sequence[str | Path], directory: Path, environment: Mapping[str, str] | None = None) -> str:
    """Returns the output of a client that ends without failure. It sees nothing of the user's configuration."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(HOSTS)}
    done = subprocess.run(
        command,
        cwd=directory,
        env=inherited | {"HOME": str(directory), "CI": "1"} | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def call(name: str, **arguments: Any) -> str:
    """How the scripted model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
