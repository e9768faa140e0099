"""How pytest-xdist distributes tests here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

NUM_KNOWN_TESTS = 2
SHARED_STACKS = ("/demo_stack/",)
"""Folders whose files use one stack. It lives as long as its process."""
TESTS = Path(__file__).parent
ENDS = {"e2e": 0.7, "gpu": 0.8, "component": 0.9}
"""The part of a run in which the files of a folder begin; those of others, which are short, begin until its end."""


def places(files: Iterable[Path]) -> dict[Path, float]:
    """When each file begins: files that share a stack first, as they are the longest job, then those of all folders
    side by side. Tests of `component` wait more than half of their time, and those of `unit` compute."""
    folders: dict[str, list[Path]] = defaultdict(list)
    for file in dict.fromkeys(files):
        folders[file.relative_to(TESTS).parts[0]].append(file)
    found = {}
    for folder, inside in folders.items():
        for number, file in enumerate(inside):
            has_stack = any(shared in file.as_posix() for shared in SHARED_STACKS)
            found[file] = -1.0 if has_stack else ENDS.get(folder, 1.0) * number / len(inside)
    return found


class EachTestOnce(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Whole files to each process, and all files that share a stack to one, which starts it once. A test that ended its
    process is not repeated; the others of its file run later."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((folder for folder in SHARED_STACKS if folder in file), file)

    def remove_node(self, node: WorkerController) -> str | None:
        """Returns the test that ran when the process ended, if it did not end by itself."""
        files: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        unfinished = [(tests, name) for tests in files.values() for name, is_done in tests.items() if not is_done]
        if not unfinished:
            return None
        tests, ended = unfinished[0]
        tests[ended] = True
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return ended

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        # A process does not begin a test before it knows the next one, or that there is none.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < NUM_KNOWN_TESTS:
            super()._reschedule(node)
