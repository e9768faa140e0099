"""Garbage collection during imports and after the start of a service."""

from __future__ import annotations

import gc
import subprocess
import sys

from kvrelay.process import deferred_collection

SETTLES = """
import gc
from kvrelay.process import deferred_collection, settle_garbage
with deferred_collection():
    before = gc.get_freeze_count()
settle_garbage()
assert before == 0 and gc.get_freeze_count() > 1000 and gc.isenabled()
"""


def test_nothing_is_collected_meanwhile() -> None:
    assert gc.isenabled()
    with deferred_collection():
        assert not gc.isenabled()
        with deferred_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_a_start_made_is_never_scanned_again() -> None:
    subprocess.run([sys.executable, "-c", SETTLES], check=True)
