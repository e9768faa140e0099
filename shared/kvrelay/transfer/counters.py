"""What the two ends count, for metrics to read at scrape. Each is written by one thread and may be read by any."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvrelay.transfer.write_permits import DropCause


@dataclass(slots=True)
class SenderCounters:
    """Totals since start. A repeated frame counts again."""

    num_messages: int = 0
    num_blocks: int = 0
    num_runs: int = 0
    """Neighbours on both sides count as one: the descriptors that a write needs."""
    num_bytes: int = 0
    post_s: float = 0.0
    """In calls that post one-sided writes; within one machine that is the copy itself."""
    num_resets: int = 0
    """Connections closed because an abort did not drain in time, or a write failed."""


@dataclass(slots=True)
class ReceiverCounters:
    """Totals since start; `num_blocks` and `num_bytes` are those written, without what was dropped."""

    num_messages: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    dropped: Counter[DropCause] = field(default_factory=Counter)
    """Messages by cause."""
    num_duplicate_blocks: int = 0
    """Blocks of accepted messages that had landed before, and were skipped."""
