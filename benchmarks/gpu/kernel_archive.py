"""Kernels that were compiled ahead, as one archive for the machine with the GPU. Needs nothing but Python."""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path

_CONTENTS = "kernels.json"


def archive_name(version: str, arch: str) -> str:
    """Of modules of this FlashInfer for this architecture."""
    return f"kernels-{version}-{arch}.tar.xz"


def pack(folder: Path, version: str, arch: str, libraries: dict[str, Path]) -> Path:
    """One archive in `folder` of the libraries, by the names of their modules, and of what they are for."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / archive_name(version, arch)
    with tarfile.open(archive, "w:xz") as packed, tempfile.TemporaryDirectory() as there:
        contents = Path(there) / _CONTENTS
        contents.write_text(json.dumps({"flashinfer": version, "arch": arch, "modules": sorted(libraries)}))
        packed.add(contents, _CONTENTS)
        for name, library in sorted(libraries.items()):
            packed.add(library, f"{name}/{name}.so")
    print(f"{archive.stat().st_size / 2**20:6.1f} MiB  {archive}")
    return archive


def unpack(archive: Path, site: Path) -> list[str]:
    """Puts an archive's modules where the FlashInfer that is installed in `site` looks first; returns their names.

    Raises:
        SystemExit: they are of another version of FlashInfer, or it is not there.
    """
    package = site / "flashinfer"
    with tarfile.open(archive) as packed:
        contents = json.load(packed.extractfile(_CONTENTS))  # type: ignore[arg-type]
        version = contents["flashinfer"]
        if not (site / f"flashinfer_python-{version}.dist-info").is_dir() or not package.is_dir():
            raise SystemExit(f"{archive} is for FlashInfer {version}, which is not in {site}")
        members = [f"{name}/{name}.so" for name in contents["modules"]]
        packed.extractall(package / "data" / "aot", [packed.getmember(member) for member in members], filter="data")
    return list(contents["modules"])
