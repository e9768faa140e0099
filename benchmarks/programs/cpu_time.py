"""CPU time of a stack and its client, which other programs on the machine do not change."""

from __future__ import annotations

import time

import psutil

from tests.fakes.stack import Stack


def cpu_s(stack: Stack) -> float:
    """CPU seconds so far of a stack's processes and of this one, with all their threads."""
    total_s = time.process_time()
    for process in psutil.Process(stack.process.pid).children(recursive=True):
        times = process.cpu_times()
        total_s += times.user + times.system
    return total_s
