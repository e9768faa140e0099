"""The key of a sequence."""

SequenceKey = tuple[str, int, int]
"""(request id, attempt, sequence index)."""
