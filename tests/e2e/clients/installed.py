"""What `scripts/install-clients` installed, and the programs of docs/clients.md."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted.system import MODEL, ScriptedSystem
from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / ".clients"
PYTHON = CLIENTS / "venv" / "bin" / "python"
NODE_MODULES = CLIENTS / "node_modules"
PROGRAMS = Path(__file__).parent / "programs"
MISSING = "not installed: run scripts/install-clients"
SHOWN_URL = "http://127.0.0.1:8000"
HOSTS = ("ANTHROPIC", "CLAUDE", "CODEX", "OPENAI", "KVRELAY", "LITELLM", "LANGCHAIN", "LANGGRAPH", "LANGSMITH")


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


def run_alone(command: Sequence[str | Path], directory: Path) -> str:
    """As `run`, of a client that asks for nothing outside this machine: everything else would go through a proxy."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        proxies = {f"{kind}_PROXY": url for kind in ("HTTP", "HTTPS", "ALL")} | {"NO_PROXY": "127.0.0.1"}
        said = run(command, directory, proxies | {name.lower(): value for name, value in proxies.items()})
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    return said


def call(name: str, /, **arguments: Any) -> str:
    """How the scripted model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
