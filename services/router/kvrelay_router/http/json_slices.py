"""Parses large JSON texts in slices of a few milliseconds, because `orjson` holds the event loop for a whole text.

A scan finds the commas outside of strings and their depth. Arrays and objects are cut at their own commas into slices,
which `orjson` parses one by one. Only an item that is larger than a slice is cut itself.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from kvrelay_router.loop_share import LoopShare

LARGE_BYTES = 256 << 10
"""Smaller texts are parsed at once: about 10 ms if they consist of keys alone, usually below 1 ms."""
SLICE_BYTES = 64 << 10
WINDOW_BYTES = 256 << 10
"""Bytes that are scanned at a time: about 2 ms."""
MAX_PARTS = 1 << 19
"""Strings, arrays and objects of a large text. Objects take most of the time and memory, also when they are freed."""
MAX_DEPTH = 128
"""Levels of a large text. `orjson` allows 1024."""

_KEY = re.compile(rb'\s*("(?:[^"\\]|\\.)*+")\s*:', re.DOTALL)

BLANKS = b" \t\r\n"
_OPENING, _CLOSING, _COMMA = 1, 2, 3
_KINDS = np.zeros(256, np.uint8)
_KINDS[list(b"[{")], _KINDS[list(b"]}")], _KINDS[list(b",")] = _OPENING, _CLOSING, _COMMA
_STEPS = np.array([0, 1, -1, 0], np.int32)

Slices = Generator[None, None, Any]
"""Yields between slices, and returns the value."""


class InvalidJson(ValueError):
    """The text is no JSON, or exceeds `MAX_PARTS` or `MAX_DEPTH`."""


async def load_json(text: bytes) -> Any:
    """As `orjson.loads`; other callbacks run while a large text is parsed. Raises InvalidJson."""
    if len(text) <= LARGE_BYTES:
        return _loads(text)
    slices, share = load_in_slices(text), LoopShare()
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value
        await share.pause()


def load_in_slices(text: bytes, slice_bytes: int = SLICE_BYTES, window_bytes: int = WINDOW_BYTES) -> Slices:
    """The steps of `load_json`. Raises InvalidJson."""
    windows = yield from _find_commas(text, window_bytes)
    return (yield from _Text(text, windows, slice_bytes).value(0, len(text), 0))


def _loads(text: bytes | memoryview) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Window:
    """The commas outside of strings in a window of the text: their positions in it, and the number of open arrays and
    objects at each."""

    start: int
    positions: NDArray[np.int32]
    depths: NDArray[np.int16]

    def at(self, depth: int, start: int, stop: int) -> NDArray[np.int32]:
        """The commas of a depth in `text[start:stop]`, as positions in the window."""
        first, last = np.searchsorted(self.positions, (start - self.start, stop - self.start))
        commas: NDArray[np.int32] = self.positions[first:last][self.depths[first:last] == depth]
        return commas


def _find_commas(text: bytes, window_bytes: int) -> Generator[None, None, list[_Window]]:
    """Raises InvalidJson beyond `MAX_PARTS` and `MAX_DEPTH`."""
    windows: list[_Window] = []
    num_quotes = num_opened = depth = 0
    is_inside = is_escaped = False  # of the character before the window: in a string, and a backslash that escapes
    for start in range(0, len(text), window_bytes):
        window = np.frombuffer(text, np.uint8, min(window_bytes, len(text) - start), start)
        quotes, is_escaped = _quotes(window, is_escaped)
        inside = (np.cumsum(quotes, dtype=np.uint8) + np.uint8(is_inside)) & 1
        found = np.flatnonzero(_KINDS[window] * (inside == 0))
        kinds = _KINDS[window[found]]
        levels = depth + np.cumsum(_STEPS[kinds], dtype=np.int32)
        num_quotes += int(np.count_nonzero(quotes))
        num_opened += int(np.count_nonzero(kinds == _OPENING))
        if num_quotes // 2 + num_opened > MAX_PARTS:
            raise InvalidJson(f"more than {MAX_PARTS} strings, arrays and objects")
        if len(levels):
            depth = int(levels[-1])
            if int(levels.max()) > MAX_DEPTH or int(levels.min()) < 0:
                raise InvalidJson(f"brackets do not match, or a large text has more than {MAX_DEPTH} levels")
        is_comma = kinds == _COMMA
        windows.append(_Window(start, found[is_comma].astype(np.int32), levels[is_comma].astype(np.int16)))
        is_inside = bool(inside[-1])
        yield
    return windows


def _quotes(window: NDArray[np.uint8], is_escaped: bool) -> tuple[NDArray[np.bool_], bool]:
    """Marks the quotes that no backslash escapes, and returns whether the character behind the window is escaped.

    A character is escaped by an odd number of backslashes before it. `is_escaped`: the first one is.
    """
    quotes = window == ord('"')
    backslashes = np.flatnonzero(window == ord("\\"))
    if is_escaped:
        quotes[0] = False
        if len(backslashes) and backslashes[0] == 0:
            backslashes = backslashes[1:]
    if not len(backslashes):
        return quotes, False
    is_last = np.append(np.diff(backslashes) != 1, True)
    is_first = np.append(True, is_last[:-1])
    first, last = backslashes[is_first], backslashes[is_last]
    escaped = last[(last - first) % 2 == 0] + 1
    goes_on = bool(len(escaped)) and int(escaped[-1]) == len(window)
    quotes[escaped[:-1] if goes_on else escaped] = False
    return quotes, goes_on


class _Text:
    def __init__(self, text: bytes, windows: list[_Window], slice_bytes: int) -> None:
        self._text, self._windows, self._slice_bytes = text, windows, slice_bytes

    def value(self, start: int, stop: int, depth: int) -> Slices:
        """Parses `text[start:stop]`, which lies in `depth` arrays and objects."""
        text = memoryview(self._text)[start:stop]
        stripped = self._text[start:stop].strip(BLANKS) if stop - start > self._slice_bytes else b""
        if len(stripped) <= self._slice_bytes or stripped[:1] not in (b"[", b"{"):
            value = _loads(text)
            yield
            return value
        is_object = stripped[:1] == b"{"
        if stripped[-1:] != (b"}" if is_object else b"]"):
            raise InvalidJson("an array or object does not end")
        first = self._text.index(stripped[:1], start)
        last = self._text.rindex(stripped[-1:], start, stop)
        inner = self._members(first, last, depth + 1) if is_object else self._items(first, last, depth + 1)
        return (yield from inner)

    def _items(self, first: int, last: int, depth: int) -> Slices:
        items: list[Any] = []
        for start, stop, is_one in self._groups(first, last, depth):
            if is_one:
                items.append((yield from self.value(start, stop, depth)))
            else:
                items += _loads(b"[%b]" % self._text[start:stop])
                yield
        return items

    def _members(self, first: int, last: int, depth: int) -> Slices:
        members: dict[str, Any] = {}
        for start, stop, is_one in self._groups(first, last, depth):
            if not is_one:
                members |= _loads(b"{%b}" % self._text[start:stop])
                yield
                continue
            key = _KEY.match(self._text, start, stop)
            if key is None:
                raise InvalidJson("an object has a member without a key")
            members[_loads(key[1])] = yield from self.value(key.end(), stop, depth)
        return members

    def _groups(self, first: int, last: int, depth: int) -> Iterator[tuple[int, int, bool]]:
        """Start and end of each slice between brackets at `first` and `last`, and whether it is one large item."""
        begin, end = first + 1, -1  # of the slice that grows
        for comma in self._ends_of_slices(first, last, depth):
            if end >= begin and comma - begin > self._slice_bytes:
                yield self._checked(begin, end)
                begin = end + 1
            end = comma
            if end - begin > self._slice_bytes:
                yield begin, end, True
                begin = end + 1
        if end >= begin:
            yield self._checked(begin, end)

    def _ends_of_slices(self, first: int, last: int, depth: int) -> Iterator[int]:
        """Commas between the items, and the end of the last one. Of close commas only some: no item is cut."""
        has_items = False
        begin = bisect_right(self._windows, first, key=lambda window: window.start) - 1
        for window in self._windows[begin:]:
            if window.start >= last:
                break
            commas = window.at(depth, first + 1, last)
            has_items = has_items or bool(len(commas))
            yield from (window.start + each for each in _thinned(commas, self._slice_bytes))
        if has_items or self._text[first + 1 : last].strip(BLANKS):
            yield last

    def _checked(self, begin: int, end: int) -> tuple[int, int, bool]:
        if not self._text[begin:end].strip(BLANKS):
            raise InvalidJson("a value is missing beside a comma")
        return begin, end, False


def _thinned(commas: NDArray[np.int32], slice_bytes: int) -> list[int]:
    """The first and the last comma of each stretch of `slice_bytes`: with these, slices get at least half as long."""
    stretches = commas // slice_bytes
    is_last = np.append(np.diff(stretches) != 0, True)[: len(commas)]
    is_first = np.append(True, is_last[:-1])[: len(commas)]
    chosen: list[int] = commas[is_first | is_last].tolist()
    return chosen
