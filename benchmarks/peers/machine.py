"""Machine and versions, for the page."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from pathlib import Path

_VERSIONS = """
import importlib.metadata, json, platform, sys
found = {"Python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_TIMEOUT_S = 60.0


def machine() -> dict[str, str]:
    """CPU, usable cores, matrix instructions, memory, kernel."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", cpu, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", cpu, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "CPU": model[1] if model else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "instructions": " ".join(name for name in _INSTRUCTIONS if name in has) or "unknown",
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
    }


def package_versions(python: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Versions in the environment of an interpreter; empty if it cannot tell."""
    if not python:
        return {}
    try:
        said = subprocess.run(
            [python, "-c", _VERSIONS, *packages], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return {str(name): str(value) for name, value in json.loads(said.stdout).items()}
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return {}


def commit() -> str:
    """The checkout's commit, with + if it has changes; empty if this is no checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")
