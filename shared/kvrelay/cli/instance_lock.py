"""Keeps two instances of `kvrelay up` from one port and one log directory, from the first moment on.

A `HeldPort` does not: until a server listens, the system lets any number of sockets reserve the same port.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from contextlib import ExitStack
from pathlib import Path

from kvrelay.config.loader import ConfigError


class InstanceLock(ExitStack):
    """Held from construction to `close`, or to the end of the process, however it ends."""

    def __init__(self, port: int, log_directory: Path | None) -> None:
        """Raises ConfigError if another instance has the port or the directory. None: no logs are written."""
        super().__init__()
        try:
            if sys.platform == "linux":
                self.enter_context(_hold_port_name(port))
            if log_directory is not None:
                self.callback(os.close, _lock_directory(log_directory))
        except ConfigError:
            self.close()
            raise


def _hold_port_name(port: int) -> socket.socket:
    """An abstract Unix socket. As with ports, its name belongs to the network namespace and ends with the process."""
    name = f"\0kvrelay-up-{port}"
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(name)
        holder.listen()  # the refused instance connects to read this process's id
    except OSError:
        holder.close()
        raise ConfigError(
            f"another kvrelay up{_process_of(name)} uses port {port}; stop it, or name another port with --port"
        ) from None
    return holder


def _process_of(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(name)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:  # it has ended since
            return ""
        return f" (process {struct.unpack('3i', credentials)[0]})"


def _lock_directory(directory: Path) -> int:
    """Returns the descriptor that holds the lock."""
    path = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write logs to {directory}: {error.strerror}; name another --state-dir") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"another kvrelay up writes its logs to {directory}; stop it, or name another --state-dir or --port"
        ) from None
    return descriptor
