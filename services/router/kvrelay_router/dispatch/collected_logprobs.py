"""The log-probabilities of a prompt as they came from its worker: packed, because most are read once, in slices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.protocol.packed_logprobs import PackedLogprobs
from kvrelay.protocol.sampling import TokenLogprobs


class LogprobRows(Protocol):
    """A sequence of `TokenLogprobs`, or something that makes slices of one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Sequence[TokenLogprobs]: ...


def own_logprobs(rows: LogprobRows) -> NDArray[np.float64]:
    """Each token's own log-probability, without its alternatives."""
    if isinstance(rows, CollectedLogprobs):
        return np.frombuffer(b"".join(part.logprobs for part in rows.parts), "<f8")
    return np.array([entry.logprob for entry in rows[:]], np.float64)


class CollectedLogprobs(msgspec.Struct):
    """A slice is unpacked each time it is asked for."""

    parts: list[PackedLogprobs] = []
    starts: list[int] = []  # entries before each part
    num_entries: int = 0

    def add(self, part: PackedLogprobs) -> None:
        self.parts.append(part)
        self.starts.append(self.num_entries)
        self.num_entries += len(part)

    def __len__(self) -> int:
        return self.num_entries

    def __getitem__(self, index: slice, /) -> list[TokenLogprobs]:
        start, stop, _ = index.indices(self.num_entries)
        rows: list[TokenLogprobs] = []
        at = max(0, bisect_right(self.starts, start) - 1)
        while at < len(self.parts) and self.starts[at] < stop:
            before = self.starts[at]
            rows += self.parts[at].rows(max(0, start - before), max(0, stop - before))
            at += 1
        return rows
