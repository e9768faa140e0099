"""Packs a folder of installed wheels without what neither kvrelay nor the compilation of its kernels reads, for ways to
the GPU's machine that take little. Needs nothing but Python and, for libraries, `readelf` of the compiler's tools."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

_HEADERS = {"cccl": ("cub/cub", "thrust/thrust", "libcudacxx/include"), "cutlass": ("include", "tools/util/include")}
_TRANSPORT = "UCX"  # the one of NIXL's plugins that kvrelay uses


def strip(site: Path) -> None:
    """Deletes from `site` the parts of FlashInfer and NIXL that are never read. It is of no use for others then."""
    flashinfer = site / "flashinfer"
    _delete([flashinfer / "moe_ep", *site.glob("nixl_ep_*")])
    _delete(folder for folder in (flashinfer / "data" / "csrc").glob("*") if folder.is_dir())
    for name, kept in _HEADERS.items():
        _keep(flashinfer / "data" / name, [flashinfer / "data" / name / path for path in kept])
    _delete(plugin for plugin in site.glob("*nixl*/**/libplugin_*.so*") if _TRANSPORT not in plugin.name)
    _delete(site.glob("*nixl*/**/libucx_perftest*"))
    for libraries in site.glob("nixl_*.libs"):
        _delete_unneeded(libraries, [*site.glob("nixl_*/*.so"), *site.glob(".nixl_*/**/*.so*")])


def pack(site: Path, archive: Path) -> None:
    """All of `site` as `archive`, without bytecode."""
    with tarfile.open(archive, "w:xz", preset=4) as packed:
        packed.add(site, ".", filter=lambda entry: None if "__pycache__" in entry.name else entry)
    print(f"{archive.stat().st_size / 2**20:6.1f} MiB  {archive}")


def _keep(folder: Path, kept: list[Path]) -> None:
    """Deletes all of the folder but `kept`."""

    def visit(path: Path) -> None:
        if path in kept:
            return
        if not any(path in each.parents for each in kept):
            _delete([path])
            return
        for inner in list(path.iterdir()):
            visit(inner)

    if folder.is_dir():
        visit(folder)


def _delete(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _delete_unneeded(libraries: Path, users: list[Path]) -> None:
    """Deletes libraries of a wheel that neither its modules need nor what they load by name, in folders of its own."""
    if shutil.which("readelf") is None:
        print(f"{libraries} stays whole: there is no readelf")
        return
    loaded = [path for folder in libraries.iterdir() if folder.is_dir() for path in folder.rglob("*.so*")]
    needed = closure([*users, *loaded], libraries, needed_by)
    _delete(path for path in libraries.iterdir() if path.is_file() and path.name not in needed)


def closure(roots: Iterable[Path], libraries: Path, needs: Callable[[Path], list[str]]) -> set[str]:
    """Names of the files in `libraries` that `roots` need, directly or not."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        for name in needs(waiting.pop()):
            if name not in found and (libraries / name).is_file():
                found.add(name)
                waiting.append(libraries / name)
    return found


def needed_by(library: Path) -> list[str]:
    """Names of the shared libraries that this one is linked to."""
    said = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=False).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", said)
