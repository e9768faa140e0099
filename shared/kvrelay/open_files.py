"""The limit of open files of this process, raised to what its configuration needs."""

from __future__ import annotations

import resource

OTHER_FILES = 256
"""File descriptors for everything except peers and client connections: libraries, logs, Redis, pages."""
FILES_PER_PEER = 3
"""The connections in both directions, and the event descriptor of the socket that sends."""
FILES_PER_TRANSFER_PEER = 2
"""The same for KV blocks, which travel in one direction."""


class TooFewOpenFiles(ValueError):
    """The hard limit of open files is below what the configuration needs. The message is for the user."""


def allow_open_files(wanted: int | None) -> int:
    """Raises the soft limit to `wanted` if it is lower, as far as the hard limit allows; None: to the hard limit.

    Returns the soft limit then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or (wanted is not None and soft >= wanted):
        return wanted if wanted is not None else soft
    if hard == resource.RLIM_INFINITY:
        new = wanted if wanted is not None else hard
    else:
        new = hard if wanted is None else min(wanted, hard)
    if new != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
    return new


def files_for_peers(max_peers: int, *, transfers_blocks: bool) -> int:
    """File descriptors that connections to this many peers may take."""
    return max_peers * (FILES_PER_PEER + (FILES_PER_TRANSFER_PEER if transfers_blocks else 0))


def allow_peers(max_peers: int, *, transfers_blocks: bool) -> None:
    """Raises the soft limit for this many peers. Raises TooFewOpenFiles if the hard limit is too low."""
    needed = OTHER_FILES + files_for_peers(max_peers, transfers_blocks=transfers_blocks)
    limit = allow_open_files(needed)
    if limit < needed:
        per_peer = files_for_peers(1, transfers_blocks=transfers_blocks)
        raise TooFewOpenFiles(
            f"max_peers = {max_peers} needs {needed} open files, and the hard limit of this process is {limit}: raise "
            f"it (ulimit -Hn, LimitNOFILE= of systemd, --ulimit of Docker) or set max_peers to at most "
            f"{max(0, (limit - OTHER_FILES) // per_peer)}"
        )
