"""Log-probabilities of many tokens as arrays of bytes, and their division into messages.

A million of them as objects take a second to decode, and the garbage collector walks over them ever after.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvrelay.protocol.limits import MOST_LOGPROBS, NumLogprobs, require
from kvrelay.protocol.sampling import TokenLogprobs

ID_BYTES, LOGPROB_BYTES = 4, 8
MOST_LOGPROBS_PER_MESSAGE = 8 * (MOST_LOGPROBS + 1)
"""Those of the tokens and of their alternatives together: at most 100 KB, less than a millisecond for a receiver."""

PackedIds = Annotated[bytes, Meta(max_length=MOST_LOGPROBS_PER_MESSAGE * ID_BYTES)]
PackedFloats = Annotated[bytes, Meta(max_length=MOST_LOGPROBS_PER_MESSAGE * LOGPROB_BYTES)]


class PackedLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """At least one `TokenLogprobs`, all with `num_top` alternatives. Ids are little-endian int32, log-probabilities
    float64, and the alternatives of a token follow each other."""

    num_top: NumLogprobs
    token_ids: PackedIds
    logprobs: PackedFloats
    top_ids: PackedIds
    top_logprobs: PackedFloats

    def __post_init__(self) -> None:
        num_tokens, num_alternatives = len(self), len(self) * self.num_top
        require(num_tokens > 0, "no log-probabilities")
        for data, size, count in (
            (self.token_ids, ID_BYTES, num_tokens),
            (self.logprobs, LOGPROB_BYTES, num_tokens),
            (self.top_ids, ID_BYTES, num_alternatives),
            (self.top_logprobs, LOGPROB_BYTES, num_alternatives),
        ):
            require(len(data) == size * count, f"{len(data)} bytes for {count} values of {size}")
        for ids in (self.token_ids, self.top_ids):
            require(not (np.frombuffer(ids, "<i4") < 0).any(), "a token id is negative")
        for logprobs in (self.logprobs, self.top_logprobs):
            require(bool((np.frombuffer(logprobs, "<f8") <= 1.0).all()), "a log-probability is NaN or above 1")

    def __len__(self) -> int:
        return len(self.token_ids) // ID_BYTES

    def rows(self, start: int, stop: int) -> list[TokenLogprobs]:
        """The entries from `start` up to `stop`, as for a slice."""
        num_top = self.num_top
        top_ids = np.frombuffer(self.top_ids, "<i4").reshape(len(self), num_top)[start:stop].tolist()
        top_logprobs = np.frombuffer(self.top_logprobs, "<f8").reshape(len(self), num_top)[start:stop].tolist()
        token_ids = np.frombuffer(self.token_ids, "<i4")[start:stop].tolist()
        logprobs = np.frombuffer(self.logprobs, "<f8")[start:stop].tolist()
        return list(map(TokenLogprobs, token_ids, logprobs, top_ids, top_logprobs))

    def without_first(self, count: int) -> PackedLogprobs:
        """The entries behind the first `count`, which must be fewer than all."""
        top = count * self.num_top
        return PackedLogprobs(
            self.num_top,
            self.token_ids[count * ID_BYTES :],
            self.logprobs[count * LOGPROB_BYTES :],
            self.top_ids[top * ID_BYTES :],
            self.top_logprobs[top * LOGPROB_BYTES :],
        )


def packed_in_parts(entries: Sequence[TokenLogprobs]) -> Iterator[PackedLogprobs]:
    """Packs log-probabilities in as few parts as fit messages. A part ends if the number of alternatives changes."""
    start = 0
    while start < len(entries):
        num_top = len(entries[start].top_ids)
        end, most = start + 1, start + max(1, MOST_LOGPROBS_PER_MESSAGE // (num_top + 1))
        while end < min(most, len(entries)) and len(entries[end].top_ids) == num_top:
            end += 1
        yield _packed(num_top, entries[start:end])
        start = end


def _packed(num_top: int, entries: Sequence[TokenLogprobs]) -> PackedLogprobs:
    return PackedLogprobs(
        num_top,
        np.fromiter((each.token_id for each in entries), "<i4", len(entries)).tobytes(),
        np.fromiter((each.logprob for each in entries), "<f8", len(entries)).tobytes(),
        np.array(list(chain.from_iterable(each.top_ids for each in entries)), "<i4").tobytes(),
        np.array(list(chain.from_iterable(each.top_logprobs for each in entries)), "<f8").tobytes(),
    )


class CollectedLogprobs(msgspec.Struct):
    """Log-probabilities as they came, still packed: most are read once, in slices, each of which is unpacked."""

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


def own_logprobs(rows: Sequence[TokenLogprobs] | CollectedLogprobs) -> NDArray[np.float64]:
    """Each token's own log-probability, without its alternatives."""
    if isinstance(rows, CollectedLogprobs):
        return np.frombuffer(b"".join(part.logprobs for part in rows.parts), "<f8")
    return np.array([entry.logprob for entry in rows[:]], np.float64)
