"""The built wheel in an empty environment: `kvrelay up` serves from any directory, without the checkout."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
UNREACHABLE = re.compile(r"No matching distribution|Could not fetch|Max retries|ConnectionError|Network is unreachable")


@pytest.mark.slow  # installs torch: a minute of a core, and 1.3 GB
@pytest.mark.always
@pytest.mark.timeout(1200)
def test_the_wheel_serves_from_any_directory(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("kvrelay-*.whl")
    commands = tmp_path / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", commands.parent], check=True)
    pip: list[str | Path] = [
        commands / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints-cpu.txt",
    ]
    installed = subprocess.run([*pip, f"{wheel}[cpu]"], capture_output=True, text=True)
    if UNREACHABLE.search(installed.stderr) and installed.returncode and not os.environ.get("CI"):
        pytest.skip("no package index answers")
    assert installed.returncode == 0, installed.stderr[-3000:]

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVRELAY_", "PYTHON"))}

    def kvrelay(*arguments: str) -> str:
        done = subprocess.run(
            [commands / "kvrelay", *arguments],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    assert kvrelay("--version").startswith("kvrelay ")
    program = "import kvrelay, kvrelay_router; print(kvrelay.__file__, kvrelay_router.__file__)"
    where: list[str | Path] = [commands / "python", "-c", program]
    files = subprocess.run(where, cwd=elsewhere, env=environment, check=True, capture_output=True, text=True).stdout
    assert all(Path(file).is_relative_to(commands.parent) for file in files.split())
    said = kvrelay("up", "--detach", "--port", "0")
    try:
        url = re.search(r"Serving kvrelay-demo at (http://\S+)/v1", said)
        assert url is not None, said
        named = re.search(r"^  terminal +(.+)$", said, re.MULTILINE)
        assert named is not None, said
        top = [*shlex.split(named[1]), "--once"]  # as it stands: `kvrelay` is not on the PATH here
        shown = subprocess.run(top, cwd=elsewhere, env=environment, check=True, capture_output=True, text=True).stdout
        assert "decode-0" in shown
        body = {
            "model": "kvrelay-demo",
            "messages": [{"role": "user", "content": "What is an otter?"}],
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{url[1]}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            content = json.load(answer)["choices"][0]["message"]["content"]
        assert content == "freshwater carnivorous mammal having webbed and clawed feet and dark brown fur"
    finally:
        kvrelay("stop")
