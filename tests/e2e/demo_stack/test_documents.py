"""The marked blocks of the documents run: those of shell one by one, the Python ones of a page as one program.

They see a directory of their own with the files they name, the demo stack in place of http://127.0.0.1:8000, the demo
model in place of the models they name, and `kvrelay` as `tests/fakes/documented_command.py` runs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from tests.document_blocks import PAGES, ROOT, Block, all_blocks, blocks_of
from tests.fakes import documented_command
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S, wait_until

STARTS_SOMETHING = re.compile(r"kvrelay (up|router|prefill|decode)\b|make serve")
SLOW = (pytest.mark.slow, pytest.mark.always)
SHELL = [
    pytest.param(block, id=str(block), marks=SLOW if STARTS_SOMETHING.search(block.text) else ())
    for block in all_blocks()
    if block.is_command and block.kind == "run"
]
PROGRAMS = [
    page for page in PAGES if any(block.language == "python" and block.kind == "run" for block in blocks_of(page))
]
DEMO = ROOT / "models" / "demo"
MODELS = ("/models/my-decoder", "/models/other", "Qwen/Qwen3-0.6B")
MACHINES = re.compile(r"\b10\.0\.0\.(\d+)\b")
"""Addresses that the guide gives to machines: they become addresses of the loopback, 127.0.53.N."""
SHOWN_REDIS = re.compile(r"redis://:PASSWORD@[\d.:]+/0")
TRACE = [
    {"timestamp": 50 * number, "input_length": 900, "output_length": 8, "hash_ids": [0, number % 5 + 1]}
    for number in range(40)
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a block runs, with the files and commands that it names."""
    (tmp_path / "keys.txt").write_text("sk-test\n", encoding="utf-8")
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)), encoding="utf-8")
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n", encoding="utf-8")
    (tmp_path / "services").mkdir()
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    write_command(commands / "kvrelay", f'exec "{sys.executable}" -m {documented_command.__name__} "$@"')
    # A checkout is installed already: what the target would do is shown, and what it serves is started.
    write_command(
        commands / "make",
        f'"{shutil.which("make")}" -n -C "{ROOT}" "$@" || exit\n'
        "for each; do case $each in serve) serves=1;; ARGS=*) flags=${each#ARGS=};; esac; done\n"
        '[ -z "$serves" ] || exec kvrelay up $flags',
    )
    return tmp_path


def write_command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.mark.parametrize("block", SHELL)
def test_a_block_of_commands_runs(block: Block, directory: Path, demo_stack: Stack, redis_url: str) -> None:
    if "curl" in block.text and not shutil.which("curl"):
        pytest.skip("curl is not installed")
    for file in blocks_of(block.page):
        if re.fullmatch(r"[\w.-]+\.\w+", file.mark):
            (directory / file.mark).write_text(for_a_test(file.text, demo_stack), encoding="utf-8")
    if "--detach" not in block.text:
        (directory / ".kvrelay").symlink_to(
            demo_stack.state_dir
        )  # as if the block ran where the demo stack was started
    services = directory / "services"
    script = SHOWN_REDIS.sub(redis_url, for_a_test(block.text, demo_stack))
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=directory,
            env=environment(directory, demo_stack),
            input="What is an otter?\n",
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert done.returncode == 0, f"{block}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        if router := re.search(r"kvrelay router .*?--host (\S+)(?:.*? --port (\d+))?", script):
            wait_until(lambda: is_ready(f"http://{router[1]}:{router[2] or 8000}/ready"))
    finally:
        status = {path.name: end(path) for path in sorted(services.iterdir())}
    logs = "".join(f"{path.name}:\n{path.read_text()[-2000:]}\n" for path in services.iterdir())
    assert not any(status.values()), f"{status}\n{logs}"


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs(page: Path, directory: Path, demo_stack: Stack) -> None:
    blocks = [block for block in blocks_of(page) if block.language == "python" and block.kind == "run"]
    program = for_a_test("\n\n".join(block.text for block in blocks), demo_stack)
    file = directory / "program.py"
    file.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, file],
        cwd=directory,
        env=environment(directory, demo_stack),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def for_a_test(text: str, stack: Stack) -> str:
    """The block with what is here in place of what the documents assume."""
    for port in (8000, 9000):
        text = text.replace(f"http://127.0.0.1:{port}", stack.base_url)
    for model in MODELS:
        text = text.replace(model, str(DEMO))
    text = text.replace('"models/demo"', f'"{DEMO}"')
    return MACHINES.sub(r"127.0.53.\1", text)


def environment(directory: Path, stack: Stack) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return inherited | {
        "PATH": f"{directory / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "CURL_HOME": str(directory),
        "KVRELAY_URL": stack.base_url,
        documented_command.DIRECTORY_VARIABLE: str(directory / "services"),
    }


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def end(log: Path) -> int:
    """Ends a service as its operator would. Returns 0 if it did not fail."""
    number = int(log.stem.rsplit("-", 1)[1])
    try:
        process = psutil.Process(number)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    except psutil.NoSuchProcess:
        return int("Traceback" in log.read_text())
    return int("Traceback" in log.read_text())
