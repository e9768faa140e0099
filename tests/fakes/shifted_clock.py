"""A wall clock that jumps for all processes that are started under it. Monotonic clocks stay as they are."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) offset_s = mapped;
    if (fd >= 0) close(fd);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, id, now);
    if (!result && offset_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset_s;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""


class ShiftedClock:
    """Start processes with `environ`; `shift` then moves their clock at once."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        source, library, self._offset = directory / "clock.c", directory / "clock.so", directory / "offset"
        source.write_text(SOURCE)
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler is not None, "a C compiler is needed, as for kvrelay itself"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        self.shift(0)
        self.environ = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self._offset)}

    def shift(self, by_s: int) -> None:
        """The clock is so many seconds ahead of the true one; a negative number puts it back."""
        descriptor = os.open(self._offset, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(descriptor, struct.pack("l", by_s), 0)
        os.close(descriptor)
