"""Why a URL did not answer, in words for a user."""

from __future__ import annotations

from kvrelay.cli.invocation import own_command


def start_one() -> str:
    """What to do if nothing listens at a URL."""
    return f"start one with `{own_command()} up`, or name its URL"


def cause(error: Exception) -> str:
    """The system's words for an error of `urllib`, such as `Connection refused`."""
    reason = getattr(error, "reason", error)
    return getattr(reason, "strerror", None) or str(reason)
