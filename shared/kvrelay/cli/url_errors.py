"""Why a URL did not answer, in words for a user."""

from __future__ import annotations

START_ONE = "start one with `kvrelay up`, or name its URL"


def cause(error: Exception) -> str:
    """The system's words for an error of `urllib`, such as `Connection refused`."""
    reason = getattr(error, "reason", error)
    return getattr(reason, "strerror", None) or str(reason)
