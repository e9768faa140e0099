"""Limits of client connections, and the number of connections that the limit of open files allows."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvrelay.open_files import OTHER_FILES, allow_open_files

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one process."""

    max_connections: int = 4096
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 60.0


def allowed_connections(wanted: int, num_peer_files: int = 0) -> int:
    """Raises the limit of open files if it is too low for `wanted` connections besides the files for peers.

    Returns how many connections it then allows.
    """
    reserved = OTHER_FILES + num_peer_files
    limit = allow_open_files(wanted + reserved)
    if limit >= wanted + reserved:
        return wanted
    allowed = max(16, limit - reserved)
    log.warning("the limit of open files, %d, allows only %d of max_connections = %d", limit, allowed, wanted)
    return allowed
