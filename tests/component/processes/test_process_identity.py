"""Whether a process has ended, told by its identity."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay import process_identity
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


@pytest.mark.parametrize(
    "rest",
    ["12", "12/", "12/3/4", "/3", "-1/3", "0/3", "x/3", "٣/3", "12/3\n", "4294967297/3", "1" * 300 + "/3", "1/" * 999],
)
def test_an_identity_of_this_machine_that_is_invalid_cannot_be_seen(rest: str) -> None:
    identity = f"{own_identity().split('/')[0]}/{rest}"
    assert not can_be_seen(identity)
    assert not has_ended(identity)


@pytest.mark.parametrize("identity", ["", "nonsense", "other-machine:pid:[1]/1/1", "a/b/c"])
def test_nothing_is_said_of_what_cannot_be_seen(identity: str) -> None:
    assert not has_ended(identity)
    assert not can_be_seen(identity)


# -- /proc that does not show everything ------------------------------------------------------------------------------


@pytest.fixture
def partial_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory in place of /proc with this process alone, as of hidepid=2."""
    for name in ("self", "sys", str(os.getpid())):
        (tmp_path / name).symlink_to(os.readlink("/proc/self") if name == "self" else f"/proc/{name}")
    monkeypatch.setattr(process_identity, "_PROC", tmp_path)
    return tmp_path


def test_a_hidden_process_has_not_ended_while_it_lives(
    process: subprocess.Popen[bytes], partial_proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as whole:
        whole.setattr(process_identity, "_PROC", Path("/proc"))
        identity = identity_of(process.pid)
    assert can_be_seen(identity)
    assert not has_ended(identity)

    def not_permitted(process_id: int, number: int) -> None:
        assert (process_id, number) == (process.pid, 0)
        raise PermissionError

    with monkeypatch.context() as of_another_user:
        of_another_user.setattr(os, "kill", not_permitted)
        assert not has_ended(identity)
    process.kill()
    process.wait()
    assert has_ended(identity)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.EMFILE])
def test_a_process_that_may_not_be_read_has_not_ended(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """As of hidepid=1, or without a file descriptor left."""
    identity, read_text = identity_of(process.pid), Path.read_text

    def refuse(path: Path) -> str:
        if path.name == "stat":
            raise OSError(error, os.strerror(error))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert not has_ended(identity)
    assert identity_of(process.pid) == ""


def test_a_zombie_whose_threads_may_not_be_counted_has_not_ended(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = identity_of(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(identity)

    def refuse(path: object) -> list[str]:
        raise PermissionError

    monkeypatch.setattr(os, "listdir", refuse)
    assert not has_ended(identity)


def test_process_ids_of_another_namespace_are_not_taken_for_those_here(
    process: subprocess.Popen[bytes], partial_proc: Path
) -> None:
    """As in a pid namespace that has the /proc of another one: its numbers are those of other processes."""
    identity = own_identity()
    assert identity
    (partial_proc / "self").unlink()
    (partial_proc / "self").symlink_to(str(process.pid))
    (partial_proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
    assert own_identity() == ""
    assert not can_be_seen(identity) and not has_ended(identity)
