"""Records which functions of kvrelay a process calls, and when, for `scripts/trace_files.py`.

Python imports a module of this name when it starts. An activation is what runs from the entry into the first function
of kvrelay on a thread, or its resumption, to its return or a pause: a callback, a step of a task, a turn of a thread's
loop.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

WRITE_EVERY_S = 0.1
PAUSE_NS = 1_000_000


Key = tuple[str, str, str]  # file, function, the mark under which it runs


class Recorder:
    """Writes a line of JSON for each activation: [ns, file, function, mark] of the first call of each.

    A mark is the innermost function of `marks` (file:function) among those that the call is within.
    """

    def __init__(self, path: Path, marks: frozenset[str]) -> None:
        self._path = path
        self._marks = marks
        self._lines: list[list[tuple[int, str, str, str]]] = []
        self._names: dict[CodeType, tuple[str, str] | None] = {}
        self._threads = threading.local()
        threading.Thread(target=self._write, daemon=True).start()

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        name = self._name(frame.f_code)
        if name is None:
            return
        state = self._threads.__dict__
        within: list[str] = state.setdefault("within", [])
        calls: dict[Key, int] = state.get("calls", {})
        now = time.monotonic_ns()
        if event == "call":
            if now - state.get("seen", now) > PAUSE_NS:
                calls = self._take(calls)
            here = ":".join(name)
            within.append(here if here in self._marks else within[-1] if within else "")
            calls.setdefault((*name, within[-1]), now)
        elif within:
            within.pop()
            if not within:
                calls = self._take(calls)
        state.update(calls=calls, seen=now)

    def _take(self, calls: dict[Key, int]) -> dict[Key, int]:
        if calls:
            self._lines.append([(ns, *key) for key, ns in calls.items()])
        return {}

    def _name(self, code: CodeType) -> tuple[str, str] | None:
        if code not in self._names:
            parts = Path(code.co_filename).parts
            at = next((i for i, part in enumerate(parts) if part.startswith("kvrelay") and i + 1 < len(parts)), None)
            name = None if at is None else ("/".join(parts[at:]), code.co_qualname)
            self._names[code] = name
        return self._names[code]

    def _write(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            while True:
                time.sleep(WRITE_EVERY_S)
                lines, self._lines = self._lines, []
                for line in lines:
                    file.write(json.dumps(line) + "\n")
                file.flush()


if place := os.environ.get("KVRELAY_TRACED_FILES"):
    marks = frozenset(os.environ["KVRELAY_TRACED_MARKS"].split())
    recorder = Recorder(Path(place) / f"{os.getpid()}.jsonl", marks)
    profile: Any = recorder.profile
    threading.setprofile(profile)
    sys.setprofile(profile)
