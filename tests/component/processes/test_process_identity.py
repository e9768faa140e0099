"""Whether a process has ended, told by its identity."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvrelay.process_identity import can_be_seen, has_ended, identity_of, own_identity

pytestmark = [pytest.mark.component, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as made:
        yield made
        made.kill()


def test_a_running_or_stopped_process_has_not_ended(process: subprocess.Popen[bytes]) -> None:
    identity = identity_of(process.pid)
    assert not has_ended(identity)
    process.send_signal(signal.SIGSTOP)
    assert not has_ended(identity)
    assert not has_ended(own_identity())
    assert can_be_seen(identity) and can_be_seen(own_identity())


def test_a_killed_one_has_as_soon_as_it_is_a_zombie(process: subprocess.Popen[bytes]) -> None:
    identity = identity_of(process.pid)
    process.kill()
    with open(f"/proc/{process.pid}/stat") as stat:
        while stat.read().rpartition(")")[2].split()[0] != "Z":
            stat.seek(0)
    assert has_ended(identity)
    process.wait()
    assert has_ended(identity)
    assert identity_of(process.pid) == ""


def test_another_process_under_the_same_number_is_not_it() -> None:
    machine, process_id, start_time = own_identity().split("/")
    assert has_ended(f"{machine}/{process_id}/{int(start_time) - 1}")


@pytest.mark.parametrize("identity", ["", "nonsense", "other-machine:pid:[1]/1/1", "a/b/c"])
def test_nothing_is_said_of_what_cannot_be_seen(identity: str) -> None:
    assert not has_ended(identity)
    assert not can_be_seen(identity)
