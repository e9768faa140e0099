"""`kvrelay` as blocks of documents call it in a test: the real commands, but none that serves blocks the script.

- `up` starts services that are real in all but the model on a free port, and is interrupted as soon as it is ready.
- `up --detach`, `router`, `prefill` and `decode` run on simulated devices. The latter three run in the background:
  their process ids and logs are in `DOCUMENTED_SERVICES`, a directory.
- `bench` sends a handful of requests.
- All else runs as it stands.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.up import Up

KVRELAY = (sys.executable, "-m", "kvrelay.cli.main")
SERVICES = ("router", "prefill", "decode")
DIRECTORY_VARIABLE = "DOCUMENTED_SERVICES"
FEW_REQUESTS = ("--requests", "4", "--rounds", "1", "--warm-up", "1")
FEW_PROGRAMS = ("--programs", "1", "--rounds", "1")


def main(argv: Sequence[str]) -> int:
    command = argv[0] if argv else ""
    if command == "up" and "--detach" not in argv:
        return up(argv[1:])
    if command in SERVICES:
        start(argv)
        return 0
    if command == "up":
        argv = [*argv, "--port", "0", "--backend", "simulated"]
    if command == "bench":
        argv = [*argv, *(FEW_PROGRAMS if "--workload" in argv else FEW_REQUESTS)]
    return subprocess.run([*KVRELAY, *argv], check=False).returncode


def up(flags: Sequence[str]) -> int:
    """Returns the exit status of a start that became ready and was interrupted."""
    running = Up([*flags, "--port", "0"], Path("state"), {})
    try:
        running.wait_ready()
        running.process.send_signal(signal.SIGINT)
        status = running.wait_exit()
    finally:
        running.end()
    print(running.output)
    return status


def start(argv: Sequence[str]) -> None:
    directory = Path(os.environ[DIRECTORY_VARIABLE])
    environment = os.environ | {"KVRELAY_BACKEND": "simulated"}
    if argv[0] == "router":
        environment.pop("KVRELAY_BACKEND")
    number = len(list(directory.iterdir()))
    with (directory / f"{number}.log").open("wb") as log:
        process = subprocess.Popen([*KVRELAY, *argv], stdout=log, stderr=log, env=environment)
    (directory / f"{number}.log").rename(directory / f"{number}-{argv[0]}-{process.pid}.log")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
