"""What a machine without a package index is brought: what it lacks, and whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

from benchmarks.gpu import kernels, lean_site, prepare


def test_what_is_there_is_read_as_pip_says_it(tmp_path: Path) -> None:
    path = tmp_path / "there.txt"
    path.write_text(
        "torch==2.11.0\nHTTPX\n# a comment\ntyping_extensions==4.0\n-e git+https://x\nmine @ file:///here\nruamel.yaml==1\n\n"
    )
    assert prepare.read_have(path) == {
        "torch": "2.11.0",
        "httpx": "",
        "typing-extensions": "4.0",
        "mine": "",
        "ruamel-yaml": "1",
    }
    assert prepare.read_have(None) == {}


def test_everything_but_flashinfer_is_asked_for_with_its_bounds() -> None:
    wanted = {prepare.name_of(each): each for each in prepare.requirements()}
    assert {"torch", "transformers", "pyzmq", "uvloop"} <= set(wanted)
    assert "flashinfer-python" not in wanted
    assert wanted["transformers"].startswith("transformers>=")
    assert not any(";" in each for each in wanted.values())


def test_a_checkout_is_known_by_its_version(tmp_path: Path) -> None:
    prepare.write_metadata(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("kvrelay", version("kvrelay"))


def test_of_several_names_one_that_can_be_imported_is_enough() -> None:
    assert prepare.find(["no_such_module", "json"])[0]
    found, said = prepare.find(["no_such_module"])
    assert not found
    assert "no_such_module: ModuleNotFoundError" in said


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CUDA's folder with an nvcc that says where it is, called by a script in a folder of the PATH."""
    home = tmp_path / "cuda"
    for folder in ("bin", "include", "lib64"):
        (home / folder).mkdir(parents=True)
    real, script = home / "bin" / "nvcc", tmp_path / "bin" / "nvcc"
    real.write_text(f"#!/bin/sh\necho '#$ _HERE_={home}/bin\n#$ TOP={home}/bin/..' >&2\n")
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    for program in (real, script):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    for name in ("CUDA_HOME", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    return home


def test_cuda_is_found_behind_a_script(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.find_cuda_home() == toolkit
    monkeypatch.setenv("CUDA_HOME", "/elsewhere")
    assert kernels.find_cuda_home() == Path("/elsewhere")


def test_without_nvcc_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert kernels.find_cuda_home() is None


def test_preparing_takes_nothing_but_python() -> None:
    """The machine where wheels are fetched, or put together, has neither torch nor kvrelay's requirements."""
    looks = "import sys, benchmarks.gpu.prepare; print(*{'torch', 'kvrelay', 'numpy'} & set(sys.modules))"
    command = [sys.executable, "-c", looks]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=prepare.ROOT)
    assert ended.stdout.split() == []


def test_a_lean_folder_keeps_what_is_read(tmp_path: Path) -> None:
    kept = [
        "flashinfer/decode.py",
        "flashinfer/data/csrc/page.cu",
        "flashinfer/data/cccl/cub/cub/cub.cuh",
        "flashinfer/data/cccl/libcudacxx/include/cuda/cmath",
        "flashinfer/data/cutlass/include/cutlass/cutlass.h",
        "flashinfer/data/include/flashinfer/page.cuh",
        "nixl_cu13/_api.py",
        ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so",
        "nixl_cu13.libs/ucx/libuct_cuda.so.0",
        "torch_like/__init__.py",
    ]
    dropped = [
        "flashinfer/moe_ep/__init__.py",
        "flashinfer/data/csrc/fused_moe/moe.cu",
        "flashinfer/data/cccl/cub/test/test.cu",
        "flashinfer/data/cccl/python/setup.py",
        "flashinfer/data/cutlass/examples/a.cu",
        "nixl_ep_cu13/ep.so",
        ".nixl_cu13.mesonpy.libs/plugins/libplugin_GDS.so",
        "nixl_cu13.libs/libaws.so",
    ]
    for name in [*kept, *dropped]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    lean_site.strip(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(kept)


def test_libraries_stay_that_others_need(tmp_path: Path) -> None:
    needs = {"root.so": ["a.so", "libc.so.6"], "a.so": ["b.so"], "b.so": ["a.so"], "c.so": ["b.so"]}
    for name in needs:
        (tmp_path / name).write_bytes(b"")
    found = lean_site.closure([tmp_path / "root.so"], tmp_path, lambda path: needs[path.name])
    assert found == {"a.so", "b.so"}


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_what_a_library_is_linked_to_is_read() -> None:
    assert any(name.startswith("libc.so") for name in lean_site.needed_by(Path(sys.executable).resolve()))
