"""`kvrelay up --detach`: starts a stack in the background and returns when it is ready."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvrelay.cli.stack_state import StackState, running_stacks

POLL_S = 0.2
DETACHED = "KVRELAY_INHERITED_DETACHED"
"""Set for a `kvrelay up` that has no terminal, so that it names another way to stop it than Ctrl-C."""


def up_detached(argv: Sequence[str], state_dir: Path) -> int:
    """Returns the exit status: that of `kvrelay up` if it ends before it is ready, else 0."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        log = state_dir / f"up-{os.getpid()}.log"
        output = log.open("wb")
    except OSError as error:
        print(f"kvrelay up: cannot write to {state_dir}: {error.strerror}; name another --state-dir", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "kvrelay", "up", *argv, "--no-detach"]
    with output:
        process = subprocess.Popen(
            command,
            env={**os.environ, DETACHED: "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        stack = _wait_ready(process, state_dir)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        stack = None
    if stack is None:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
        log.unlink()
        return process.returncode or 1
    kept = log.rename(state_dir / str(stack.port) / "up.log")
    sys.stdout.write(kept.read_text(encoding="utf-8", errors="replace"))
    print(f"Runs in the background (process {stack.pid}, log {kept}).")
    return 0


def _wait_ready(process: subprocess.Popen[bytes], state_dir: Path) -> StackState | None:
    """None if the process ends before its stack is ready."""
    while process.poll() is None:
        for stack in running_stacks(state_dir):
            if stack.pid == process.pid and stack.is_ready:
                return stack
        time.sleep(POLL_S)
    return None
