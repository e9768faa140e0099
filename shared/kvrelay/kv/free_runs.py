"""Free blocks as runs of neighbours: neighbouring blocks coalesce into one descriptor of a transfer.

Boundary tags (Knuth, The Art of Computer Programming 1, 2.5) find a freed block's free neighbours; runs are binned by
the bit length of their length. Taking a run and giving back a block are O(1), and cost no object per block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from kvrelay.kv.cache import IntegrityError

_NONE = -1


class FreeRuns:
    """The set of free blocks out of `num_blocks`, all free at first.

    Invariants: runs are maximal (two never touch); `_length[i]` is a run's length where a run starts or ends at i, and
    0 for every block that is not free. Values inside a run are undefined and never read.
    Arguments are not checked: freeing a free block would corrupt the runs.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._length = array("i", bytes(4 * (num_blocks + 2)))  # one past each end, never free; index is block + 1
        self._next = array("i", bytes(4 * num_blocks))
        self._previous = array("i", bytes(4 * num_blocks))
        self._heads = [_NONE] * (num_blocks.bit_length() + 1)
        self._filled_bins = 0  # bit i: bin i has a run
        self.num_free = num_blocks
        if num_blocks:
            self._link(0, num_blocks)

    def take(self, num_blocks: int) -> list[int]:
        """Takes blocks, from as few and as tight runs as the bins tell; the caller has checked `num_free`."""
        if num_blocks == 1:
            return self._take_front(self._find(1), 1)
        taken: list[int] = []
        while (missing := num_blocks - len(taken)) > 0:
            start = self._find(missing)
            taken += self._take_front(start, min(missing, self._length[start + 1]))
        return taken

    def take_at(self, block: int, num_blocks: int) -> list[int]:
        """Takes up to `num_blocks` from the run that starts at `block`; none where no run starts there.

        `block - 1` must not be free, or the tag at `block` means nothing.
        """
        if not 0 <= block < self._num_blocks:
            return []
        return self._take_front(block, min(num_blocks, self._length[block + 1]))

    def take_named(self, blocks: list[int]) -> None:
        """Takes exactly these, which are free. O(number of runs), as tags inside a run mean nothing."""
        runs = self.runs()
        starts = [start for start, _ in runs]
        taken_of: dict[int, list[int]] = {}
        for block in sorted(blocks):
            taken_of.setdefault(bisect_right(starts, block) - 1, []).append(block)
        for index, taken in taken_of.items():
            start, run_length = runs[index]
            end = start + run_length
            self._unlink(start, run_length)
            self._length[start + 1] = self._length[end] = 0
            for block in taken:
                self._length[block + 1] = 0
            for first, last in zip([start, *(block + 1 for block in taken)], [*taken, end], strict=True):
                if first < last:
                    self._link(first, last - first)
        self.num_free -= len(blocks)

    def give_back(self, blocks: list[int]) -> None:
        """Adds blocks that are not free, and joins them with their free neighbours."""
        length = self._length
        for block in blocks:
            start, total = block, 1
            if before := length[block]:
                start -= before
                total += before
                self._unlink(start, before)
            if after := length[block + 2]:
                total += after
                self._unlink(block + 1, after)
            self._link(start, total)
        self.num_free += len(blocks)

    def runs(self) -> list[tuple[int, int]]:
        """(first block, length) of every run, ordered by block. O(number of runs)."""
        found: list[tuple[int, int]] = []
        for head in self._heads:
            while head != _NONE:
                found.append((head, self._length[head + 1]))
                head = self._next[head]
        return sorted(found)

    def check_integrity(self) -> set[int]:
        """The free blocks, recounted. Raises IntegrityError."""
        free: set[int] = set()
        last_end = -1
        for start, length in self.runs():
            if length < 1 or self._length[start + length] != length:
                raise IntegrityError(f"run at {start}: length {length} does not stand at its end")
            if start <= last_end:
                raise IntegrityError(f"run at {start} touches the run that ends before {last_end}")
            if not self._filled_bins >> length.bit_length() & 1:
                raise IntegrityError(f"run at {start}: its bin counts as empty")
            last_end = start + length
            free.update(range(start, last_end))
        for block in range(-1, self._num_blocks + 1):
            if block not in free and self._length[block + 1]:
                raise IntegrityError(f"block {block} is not free but has a tag")
        if len(free) != self.num_free:
            raise IntegrityError(f"{len(free)} blocks are free, counted as {self.num_free}")
        return free

    def _find(self, num_blocks: int) -> int:
        """The start of a run that fits as tightly as the bins tell, else of one of the longest bin."""
        same_bin = num_blocks.bit_length()
        if self._filled_bins >> same_bin & 1:
            start = self._heads[same_bin]
            if self._length[start + 1] >= num_blocks:
                return start
        larger = self._filled_bins >> (same_bin + 1)
        if larger:
            return self._heads[same_bin + (larger & -larger).bit_length()]
        return self._heads[self._filled_bins.bit_length() - 1]

    def _take_front(self, start: int, num_blocks: int) -> list[int]:
        """Takes the first blocks of a run."""
        if not num_blocks:
            return []
        length = self._length
        run_length = length[start + 1]
        self._unlink(start, run_length)
        length[start + run_length] = 0
        if num_blocks == 1:
            length[start + 1] = 0
        else:
            length[start + 1 : start + 1 + num_blocks] = array("i", bytes(4 * num_blocks))
        if num_blocks < run_length:
            self._link(start + num_blocks, run_length - num_blocks)
        self.num_free -= num_blocks
        return list(range(start, start + num_blocks))

    def _link(self, start: int, length: int) -> None:
        self._length[start + 1] = self._length[start + length] = length
        bin_index = length.bit_length()
        head = self._heads[bin_index]
        self._next[start] = head
        self._previous[start] = _NONE
        if head == _NONE:
            self._filled_bins |= 1 << bin_index
        else:
            self._previous[head] = start
        self._heads[bin_index] = start

    def _unlink(self, start: int, length: int) -> None:
        after, before = self._next[start], self._previous[start]
        if after != _NONE:
            self._previous[after] = before
        if before != _NONE:
            self._next[before] = after
            return
        bin_index = length.bit_length()
        self._heads[bin_index] = after
        if after == _NONE:
            self._filled_bins ^= 1 << bin_index
