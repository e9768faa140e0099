"""The error of files that are no traces."""

from __future__ import annotations


class BadTrace(ValueError):
    """An invalid trace or file of conversations. The message names file, line and fault."""
