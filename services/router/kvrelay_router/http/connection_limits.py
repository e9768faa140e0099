"""What clients' connections may hold of a process, and how many of them its limit of open files allows."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

log = logging.getLogger(__name__)

OTHER_FILES = 256
"""Descriptors that are left to everything but clients' connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Of one process."""

    max_connections: int = 4096
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 60.0


def allowed_connections(wanted: int) -> int:
    """Raises this process's limit of open files where it is too low for them; how many there may be then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + OTHER_FILES:
        soft = wanted + OTHER_FILES if hard == resource.RLIM_INFINITY else min(hard, wanted + OTHER_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted + OTHER_FILES:
        return wanted
    allowed = max(16, soft - OTHER_FILES)
    log.warning("the limit of open files, %d, allows only %d of max_connections = %d", soft, allowed, wanted)
    return allowed
