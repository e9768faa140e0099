"""Limits of client connections, and the number of connections that the limit of open files allows."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

log = logging.getLogger(__name__)

OTHER_FILES = 256
"""File descriptors reserved for everything except client connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one process."""

    max_connections: int = 4096
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 60.0


def allowed_connections(wanted: int) -> int:
    """Raises the limit of open files if it is too low for `wanted` connections. Returns how many it then allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + OTHER_FILES:
        soft = wanted + OTHER_FILES if hard == resource.RLIM_INFINITY else min(hard, wanted + OTHER_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted + OTHER_FILES:
        return wanted
    allowed = max(16, soft - OTHER_FILES)
    log.warning("the limit of open files, %d, allows only %d of max_connections = %d", soft, allowed, wanted)
    return allowed
