"""Lists the GPUs of this machine with `nvidia-smi -L`, without a CUDA context or torch.

GPUs are identified by UUID, as in CUDA_VISIBLE_DEVICES: nvidia-smi and CUDA number them differently (by PCI bus, and by
speed unless configured), and MIG instances have no number.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

VISIBLE = "CUDA_VISIBLE_DEVICES"
TIMEOUT_S = 30.0
_GPU = re.compile(r"^GPU (\d+): (.+) \(UUID: (GPU-[0-9a-fA-F-]+)\)\s*$")
_PART = re.compile(r"^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[0-9a-zA-Z/-]+)\)\s*$")


class GpusUnknown(ValueError):
    """The GPUs cannot be listed. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG instance."""

    uuid: str
    name: str
    number: int | None = None  # None: a MIG instance, named by UUID
    is_split: bool = False  # divided by MIG, so it cannot be used as a whole

    def __str__(self) -> str:
        """A name for messages, as in `GPU 0 (NVIDIA H100 80GB HBM3)`."""
        return f"{self.uuid if self.number is None else f'GPU {self.number}'} ({self.name})"


def list_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """GPUs visible to a process with this environment. Raises GpusUnknown."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise GpusUnknown("nvidia-smi not found: there is no NVIDIA GPU, or no driver for it") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpusUnknown(f"nvidia-smi -L failed: {error}") from None
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split())
        raise GpusUnknown(f"nvidia-smi -L ended with status {done.returncode}: {words[:300]}")
    return visible(read_listing(done.stdout), environ.get(VISIBLE))


def read_listing(text: str) -> list[Gpu]:
    """Parses `nvidia-smi -L`, which lists a GPU before its MIG instances."""
    found: list[Gpu] = []
    whole = 0
    for line in text.splitlines():
        if match := _GPU.match(line):
            whole = len(found)
            found.append(Gpu(match[3], match[2], int(match[1])))
        elif (match := _PART.match(line)) and found:
            found[whole] = replace(found[whole], is_split=True)
            found.append(Gpu(match[2], f"MIG {match[1]} of {found[whole].name}"))
    return found


def visible(gpus: Sequence[Gpu], wanted: str | None) -> list[Gpu]:
    """Applies CUDA_VISIBLE_DEVICES: the visible GPUs in its order, numbered from 0.

    As in CUDA, entries are numbers or UUID prefixes, and the first unknown entry ends the list.
    """
    if wanted is None:
        return list(gpus)
    left: list[Gpu] = []
    for entry in (each.strip() for each in wanted.split(",")):
        if entry.isdecimal():
            found = [gpu for gpu in gpus if gpu.number == int(entry)]
        else:
            found = [gpu for gpu in gpus if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
        if len(found) != 1:
            break
        number = None if found[0].number is None else len(left)
        left.append(replace(found[0], number=number))
    return left
