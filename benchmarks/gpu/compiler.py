"""CUDA's compiler on this machine, and what else compiling FlashInfer's kernels takes. Needs nothing but Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path


def find_cuda_home() -> Path | None:
    """CUDA's folder, of `CUDA_HOME` or of the nvcc on the PATH, which knows it though it be called by a script.

    FlashInfer takes the folder above that of the nvcc on the PATH, be it the script's: so CUDA_HOME should be set.
    """
    if os.environ.get("CUDA_HOME"):
        return Path(os.environ["CUDA_HOME"])
    if shutil.which("nvcc") is None:
        return None
    planned = subprocess.run(
        ["nvcc", "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=False
    )
    top = re.search(r"^#\$ TOP=(.+)$", planned.stderr, re.MULTILINE)
    return Path(top[1]).resolve() if top else None


def lacking_to_compile(home: Path | None) -> list[str]:
    """What compiling FlashInfer's kernels takes and is not here."""
    lacking = [tool for tool in ("ninja", "c++") if shutil.which(tool) is None]
    if home is None or not (home / "bin" / "nvcc").exists():
        return [*lacking, "nvcc"]
    variables = (os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH"))
    folders = [home / "include", *(Path(folder) for value in variables for folder in value.split(os.pathsep) if folder)]
    if not any((folder / "curand_kernel.h").exists() for folder in folders):
        lacking.append("curand_kernel.h (for H100s and H200s)")
    for library in ("cudart", "cuda"):
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"-L{home / 'lib64'}", f"-L{home / 'lib64' / 'stubs'}", f"-l{library}", "-o", f"{folder}/out.so"]
            command = ["c++", "-shared", *flags]
            if "c++" not in lacking and subprocess.run(command, capture_output=True, check=False).returncode:
                lacking.append(f"lib{library}.so to link with")
    return lacking
