"""A full disk under the state directory, the event log and the metrics file: requests and restarts go on."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack
from tests.fakes.waiting import wait_until
from tests.faults.test_redis_under_streams import PROFILE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_REQUESTS = 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", path], check=False)
    if mounted.returncode:
        pytest.skip("not allowed to mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, disk: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(PROFILE))
    flags = ["--backend", "simulated", "--profile", str(profile), "--state-dir", str(disk / "state")]
    flags += ["--event-log", str(disk / "events-{name}"), "--metrics-file", str(disk / "metrics-{worker_id}")]
    with Stack(DEMO_MODEL, tmp_path / "up", *flags) as stack:
        prompts = [[5, 6, 7 + number] for number in range(NUM_REQUESTS)]
        expected = [stack.complete(prompt, 8)["token_ids"] for prompt in prompts]
        fill(disk / "filler")
        assert [stack.complete(prompt, 8)["token_ids"] for prompt in prompts] == expected
        killed = stack.children()["decode-0"]
        os.kill(killed, signal.SIGKILL)
        assert [stack.complete(prompt, 8)["token_ids"] for prompt in prompts] == expected
        assert stack.children()["decode-0"] != killed
        (disk / "filler").unlink()
        metrics = disk / "metrics-decode-0"
        size = metrics.stat().st_size
        assert [stack.complete(prompt, 8)["token_ids"] for prompt in prompts] == expected

        def lines_come() -> bool:
            """Lines are written with steps, at most once a second."""
            stack.complete(prompts[0], 8)
            return metrics.stat().st_size > size

        wait_until(lines_come)
        *lines, _ = metrics.read_bytes().split(b"\n")  # the last one may be half written
        for line in lines:
            json.loads(line)
        assert stack.stop() == 0
