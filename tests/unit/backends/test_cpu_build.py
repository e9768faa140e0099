"""Building the kernel: once per machine, by several processes at a time, and what happens where it cannot be built."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvrelay.backends import choose_backend, cpu, cpu_build
from kvrelay.backends.backend import KVLayout
from tests.fakes.waiting import PATIENCE_S

_BUILD = "import sys, pathlib; from kvrelay.backends.cpu_build import build_kernel; "
_BUILD += "print(build_kernel(sys.argv[1], pathlib.Path(sys.argv[2]), link_openmp=False))"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


def make_layout(dtype: torch.dtype, head_dim: int) -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype)


def test_of_processes_that_build_at_once_one_compiles_and_all_get_its_file(tmp_path: Path) -> None:
    compiler, gate = pretended_compiler(tmp_path)
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", _BUILD, str(compiler), str(cache)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    gate.write_text("")  # blocks until a compiler reads it
    results = {builder.communicate(timeout=PATIENCE_S)[0].strip() for builder in builders}
    assert [str(path) for path in cache.iterdir()] == list(results)
    assert (tmp_path / "compiled").read_text().count(" -c ") == 1


def test_who_waits_for_a_process_that_stands_still_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, _ = pretended_compiler(tmp_path, gated=False)
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(cpu_build, "_LOCK_S", 0.2)
    holder = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        built = cpu_build.build_kernel(str(compiler), cache, link_openmp=False)
    finally:
        os.close(holder)
    assert list(cache.iterdir()) == [built]


def pretended_compiler(folder: Path, *, gated: bool = True) -> tuple[Path, Path]:
    """A compiler that writes a line to `compiled` for each call and an empty file. Returns it and the pipe from which
    the first call to compile reads a line if it is gated."""
    compiler, gate = folder / "cc", folder / "gate"
    os.mkfifo(gate)
    compiler.write_text(
        "#!/bin/sh\n"
        "[ $1 = --version ] && exit\n"
        f'echo "$*" >>{folder}/compiled\n'
        f'case "$*" in *" -c "*) {f"cat {gate}" if gated else ":"} ;; esac\n'
        'while [ "$1" != -o ]; do shift; done\n'
        'touch "$2"\n'
    )
    compiler.chmod(0o755)
    return compiler, gate


def test_a_built_kernel_is_not_built_again(tmp_path: Path) -> None:
    compiler, _ = pretended_compiler(tmp_path, gated=False)
    built = [cpu_build.build_kernel(str(compiler), tmp_path / "cache", link_openmp=False) for _ in range(2)]
    assert built[0] == built[1]
    assert (tmp_path / "compiled").read_text().count(" -c ") == 1


def test_what_a_killed_compilation_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    compiler, _ = pretended_compiler(tmp_path, gated=False)
    cache = tmp_path / "cache"
    abandoned, running = cache / "build-abandoned", cache / "build-running"
    for work in (abandoned, running):
        work.mkdir(parents=True)
        (work / "kernel.o").touch()
    os.utime(abandoned, (0, 0))
    built = cpu_build.build_kernel(str(compiler), cache, link_openmp=False)
    assert sorted(cache.iterdir()) == [running, built]


@needs_gcc
def test_the_process_keeps_one_openmp_runtime() -> None:
    code = (
        "import torch; from kvrelay.backends.cpu import CpuBackend; CpuBackend(); print(open('/proc/self/maps').read())"
    )
    maps = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * PATIENCE_S, check=True
    ).stdout
    assert len({line.split()[-1] for line in maps.splitlines() if "gomp" in line}) <= 1


def test_other_flags_or_source_get_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = sys.executable  # the key asks only for its version
    keys = {cpu_build._key(compiler, link) for link in (True, False)}
    source = tmp_path / "kernel.c"
    source.write_text("int x;")
    monkeypatch.setattr(cpu_build, "_SOURCE", source)
    keys.add(cpu_build._key(compiler, True))
    assert len(keys) == 3


def test_a_failing_compiler_says_why(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] || { echo no such flag >&2; exit 1; }\n")
    compiler.chmod(0o755)
    with pytest.raises(cpu_build.KernelBuildError, match="no such flag"):
        cpu_build.build_kernel(str(compiler), tmp_path / "cache", link_openmp=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_kernel_torch_attends_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> ctypes.CDLL:
        raise cpu_build.KernelBuildError("no compiler")

    monkeypatch.setattr(cpu, "load_kernel", fail)
    with caplog.at_level(logging.WARNING):
        backend = choose_backend.select_backend(torch.device("cpu"), make_layout(torch.float32, 64))
    assert backend.name == "torch" and "no compiler" in caplog.text


def test_unknown_shapes_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_backend.select_backend(torch.device("cpu"), make_layout(torch.float16, 64)).name == "torch"
    assert choose_backend.select_backend(torch.device("cpu"), make_layout(torch.bfloat16, 72)).name == "torch"
