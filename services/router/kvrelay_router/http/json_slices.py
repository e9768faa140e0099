"""Parses large JSON texts in slices of a few milliseconds, because `orjson` holds the event loop for a whole text.

A scan finds the commas outside of strings and their depth. Arrays and objects are cut at their own commas into slices,
which `orjson` parses one by one. Only an item that is larger than a slice is cut itself. A slice is all that is copied.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections.abc import Generator
from typing import Any
from weakref import WeakKeyDictionary

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

BLANKS = b" \t\r\n"
_NO_BLANK = re.compile(rb"[^ \t\r\n]")
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OPENING, _CLOSING, _COMMA = 1, 2, 3
_KINDS = np.zeros(256, np.uint8)
_KINDS[list(b"[{")], _KINDS[list(b"]}")], _KINDS[list(b",")] = _OPENING, _CLOSING, _COMMA
_STEPS = np.array([0, 1, -1, 0], np.int32)

_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""One large text is parsed at a time: several would each take a slice in the same turn of the event loop."""

Slices = Generator[None, None, Any]
"""Yields between slices, and returns the value."""


class InvalidJson(ValueError):
    """The text is no JSON, or exceeds `MAX_PARTS` or `MAX_DEPTH`."""


async def load_json(text: bytes) -> Any:
    """As `orjson.loads`; other callbacks run while a large text is parsed. Large texts wait for each other.

    Raises InvalidJson.
    """
    if len(text) <= LARGE_BYTES:
        return _loads(text)
    async with _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        slices, share = load_in_slices(text), LoopShare()
        while True:
            try:
                next(slices)
            except StopIteration as end:
                return end.value
            await share.pause()


def load_in_slices(text: bytes, slice_bytes: int = SLICE_BYTES, window_bytes: int = WINDOW_BYTES) -> Slices:
    """The steps of `load_json`. Raises InvalidJson."""
    commas = yield from _find_commas(text, slice_bytes, window_bytes)
    return (yield from _Text(text, commas, slice_bytes).whole())


def _loads(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(str(error)) from error


Commas = list[list[int]]
"""Positions of commas outside of strings for each depth, that is the number of open arrays and objects."""


def _find_commas(text: bytes, slice_bytes: int, window_bytes: int) -> Generator[None, None, Commas]:
    """Of close commas only some, see `_thinned`. Raises InvalidJson beyond `MAX_PARTS` and `MAX_DEPTH`."""
    thinned: Commas = [[] for _ in range(MAX_DEPTH + 1)]
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
        for level, comma in _thinned(found[is_comma], levels[is_comma], slice_bytes):
            thinned[level].append(start + comma)
        is_inside = bool(inside[-1])
        yield
    return thinned


def _thinned(commas: NDArray[np.intp], levels: NDArray[np.int32], slice_bytes: int) -> list[tuple[int, int]]:
    """Returns depth and position of the first and the last comma of each depth in each stretch of `slice_bytes`.

    These suffice to cut an array or object that is larger than a slice. It does not fit into a stretch, so it has the
    stretch's first comma of its depth, or the last one, or both; and its commas between these are not needed.
    """
    if not len(commas):
        return []
    num_stretches = int(commas[-1]) // slice_bytes + 1
    places = levels * num_stretches + commas // slice_bytes
    first = np.full((MAX_DEPTH + 1) * num_stretches, -1)
    last = first.copy()
    last[places], first[places[::-1]] = commas, commas[::-1]  # NumPy keeps the last of several values for an index
    chosen: list[tuple[int, int]] = []
    for place in np.flatnonzero(last >= 0).tolist():
        ends = sorted({int(first[place]), int(last[place])})
        chosen += ((place // num_stretches, end) for end in ends)
    return chosen


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
    """Works with positions in one text: generators keep their variables while they wait, so none may hold a part."""

    def __init__(self, text: bytes, commas: Commas, slice_bytes: int) -> None:
        self._text, self._commas, self._slice_bytes = text, commas, slice_bytes

    def whole(self) -> Slices:
        """Parses the text."""
        start, stop = yield from self._trimmed(0, len(self._text))
        return (yield from self._value(start, stop, 0))

    def _value(self, start: int, stop: int, depth: int) -> Slices:
        """Parses `text[start:stop]`, which lies in `depth` arrays and objects and has no blanks around it."""
        yield
        opening = self._text[start : start + 1]
        if stop - start <= self._slice_bytes or opening not in (b"[", b"{"):
            return self._loads(start, stop)
        if self._text[stop - 1 : stop] != (b"]" if opening == b"[" else b"}"):
            raise InvalidJson(f"the array or object at byte {start} does not end")
        inner = self._items if opening == b"[" else self._members
        return (yield from inner(self._groups(start, stop - 1, depth + 1), depth + 1))

    def _items(self, groups: list[tuple[int, int]], depth: int) -> Slices:
        items: list[Any] = []
        for start, stop in groups:
            if stop - start <= self._slice_bytes:
                found = self._loads(start, stop, b"[%b]")
                self._check_found(found, start, groups)
                items += found
                yield
                continue
            start, stop = yield from self._trimmed(start, stop)
            if start < stop:
                items.append((yield from self._value(start, stop, depth)))
            else:
                self._check_found(None, start, groups)
        return items

    def _members(self, groups: list[tuple[int, int]], depth: int) -> Slices:
        members: dict[str, Any] = {}
        for start, stop in groups:
            if stop - start <= self._slice_bytes:
                found = self._loads(start, stop, b"{%b}")
                self._check_found(found, start, groups)
                members |= found
                yield
                continue
            start, stop = yield from self._trimmed(start, stop)
            if start < stop:
                end = yield from self._end_of_key(start, stop)
                colon, stop = yield from self._trimmed(end, stop)
                if self._text[colon : colon + 1] != b":":
                    raise InvalidJson(f"the key at byte {start} has no colon")
                first, stop = yield from self._trimmed(colon + 1, stop)
                members[self._loads(start, end)] = yield from self._value(first, stop, depth)
            else:
                self._check_found(None, start, groups)
        return members

    def _groups(self, first: int, last: int, depth: int) -> list[tuple[int, int]]:
        """Start and end of each slice between brackets at `first` and `last`. Beyond `slice_bytes` it is one item."""
        commas, groups = self._commas[depth], []
        begin, end = first + 1, -1  # bounds of the slice that grows
        for comma in (*commas[bisect_left(commas, first) : bisect_left(commas, last)], last):
            if end >= begin and comma - begin > self._slice_bytes:
                groups.append((begin, end))
                begin = end + 1
            end = comma
            if end - begin > self._slice_bytes:
                groups.append((begin, end))
                begin = end + 1
        if end >= begin:
            groups.append((begin, end))
        return groups

    def _check_found(self, found: Any, start: int, groups: list[tuple[int, int]]) -> None:
        """Raises InvalidJson if nothing was found in one of several slices, as there is a comma beside it."""
        if not found and len(groups) > 1:
            raise InvalidJson(f"a value is missing beside a comma, at byte {start}")

    def _loads(self, start: int, stop: int, form: bytes = b"") -> Any:
        part = memoryview(self._text)[start:stop]
        try:
            return orjson.loads(form % part if form else part)
        except orjson.JSONDecodeError as error:
            # Its position counts from the slice, in characters.
            raise InvalidJson(f"{error.msg}, in bytes {start} to {stop}") from error

    def _trimmed(self, start: int, stop: int) -> Generator[None, None, tuple[int, int]]:
        """The range without the blanks at both ends."""
        while start < stop:
            end = min(stop, start + self._slice_bytes)
            if place := _NO_BLANK.search(self._text, start, end):
                start = place.start()
                break
            start = end
            yield
        while start < stop:
            begin = max(start, stop - self._slice_bytes)
            if num_bytes := len(self._text[begin:stop].rstrip(BLANKS)):
                return start, begin + num_bytes
            stop = begin
            yield
        return start, stop

    def _end_of_key(self, start: int, stop: int) -> Generator[None, None, int]:
        """The position behind the key that begins at `start`."""
        step = max(2, self._slice_bytes)  # an escape has two bytes
        end, reached = start, start + 1
        while self._text[start : start + 1] == b'"' and end != reached:
            end = reached
            if run := _IN_STRING.match(self._text, end, min(stop, end + step)):
                reached = run.end()
            yield
        if self._text[end : min(stop, end + 1)] != b'"' or end == start:
            raise InvalidJson(f"an object has a member without a key, at byte {start}")
        return end + 1
