"""Compiles the CPU kernel at first use, and keeps the result for later processes."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("cpu_decoder.c")  # includes the others
_INCLUDED = sorted(each for each in _SOURCE.parent.glob("cpu_*.c") if each != _SOURCE)
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-fopenmp")
_COMPILERS = ("gcc", "cc", "clang")
_TIMEOUT_S = 300.0
_WORK = "build-"
"""Begins the name of the directory that a compilation works in."""
_ABANDONED_S = 3 * _TIMEOUT_S
_LOCK_S = _TIMEOUT_S
_LOCK_INTERVAL_S = 0.1


class KernelBuildError(Exception):
    """The kernel cannot be built here. The message says why."""


@cache
def load_kernel() -> ctypes.CDLL:
    """Returns the compiled kernel. Builds it if the cache has none for this source, compiler and CPU. Raises
    KernelBuildError if there is no compiler, or it failed."""
    openmp = _load_torch_openmp()
    library = build_kernel(_find_compiler(), cache_dir(), link_openmp=not openmp)
    try:
        kernel = ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelBuildError(f"{library} does not load: {error}") from error
    if not kernel.kvrelay_check_tiles():
        _log.warning("AMX gives other sums than the vector units on this CPU: it is not used")
    return kernel


@cache
def kernel_key() -> str:
    """Returns 24 hex digits, equal for kernels of equal machine code: they cover source, flags, compiler and CPU.
    Raises KernelBuildError if there is no compiler."""
    return _key(_find_compiler(), not _load_torch_openmp())


def _find_compiler() -> str:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise KernelBuildError(f"none of {', '.join(_COMPILERS)} is installed")
    return compiler


def cache_dir() -> Path:
    """The directory of compiled kernels: `KVRELAY_CACHE_DIR`, or the user's cache directory."""
    configured = os.environ.get("KVRELAY_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def build_kernel(compiler: str, directory: Path, *, link_openmp: bool) -> Path:
    """Compiles into `directory`, unless that was done before. If several processes call it at once, one compiles and
    the others wait for its file. Raises KernelBuildError if the compiler failed, or the directory cannot be written."""
    target = directory / f"cpu_kernel-{_key(compiler, link_openmp)}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory)
        with _turn_to_build(target), tempfile.TemporaryDirectory(dir=directory, prefix=_WORK) as work:
            if target.exists():
                return target
            _log.info("compiling the CPU kernel, once for this CPU and version, about a minute of one core: %s", target)
            started = time.monotonic()
            built = Path(work) / "kernel.so"
            _compile(compiler, Path(work) / "kernel.o", built, link_openmp)
            built.replace(target)
            _log.info("compiled the CPU kernel in %.1f s", time.monotonic() - started)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"building in {directory} failed: {error}") from error
    return target


def _remove_abandoned(directory: Path) -> None:
    """Removes what compilations left whose processes were killed, once none can run any more."""
    for work in directory.glob(f"{_WORK}*"):
        with suppress(OSError):  # another process removes it too
            if time.time() - work.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(work)


@contextmanager
def _turn_to_build(target: Path) -> Iterator[None]:
    """One process at a time is in it, for a minute of compilation on every core would be wasted by a second one.

    The lock is that of the directory, which leaves no file behind, and the kernel releases it if the process ends. A
    process that stands still keeps others waiting for `_LOCK_S` at most, and none waits if the file system has no
    locks: the file appears as a whole, so several may build it.
    """
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LOCK_S
        while not target.exists() and time.monotonic() < deadline:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_INTERVAL_S)
            except OSError as error:
                _log.debug("%s cannot be locked: %s", target.parent, error)
                break
        yield
    finally:
        os.close(directory)


def _compile(compiler: str, object_file: Path, library: Path, link_openmp: bool) -> None:
    """Compiles and links in two calls, because linking with -fopenmp would load a second OpenMP runtime into the
    process."""
    _run([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(object_file)])
    openmp = ["-fopenmp"] if link_openmp else []
    _run([compiler, "-shared", *openmp, str(object_file), "-o", str(library), "-lm"])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise KernelBuildError(f"{' '.join(command)} failed: {done.stderr[-1000:]}")


def _key(compiler: str, link_openmp: bool) -> str:
    """A name from everything that the machine code depends on: source, flags, compiler, CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    sources = "".join(path.read_text() for path in (_SOURCE, *_INCLUDED))
    parts = (sources, " ".join(_FLAGS), str(link_openmp), version.stdout, cpu_features())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def cpu_features() -> str:
    """The input of -march=native: the model and the feature flags of the first CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    first_cpu = cpuinfo.read_text().split("\n\n", 1)[0].splitlines()
    wanted = ("flags", "features", "model", "cpu family", "vendor_id", "cpu part", "cpu implementer")
    return "\n".join(line for line in first_cpu if line.lower().startswith(wanted))


def _load_torch_openmp() -> bool:
    """Makes torch's own libgomp visible to the kernel, so that both share one set of threads. Returns False if torch
    has none.

    Two runtimes would each start a thread per core, and their idle threads would spin against each other.
    """
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        return True
    return False
