"""The results as JSON, with every figure, and as a Markdown page."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import shown

_PACKAGES = ["torch", "transformers", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "triton"]
_PACKAGES += ["nixl-cu13", "nixl-cu12", "numpy"]
_EARLIER = "Of an earlier run"


@dataclass
class PartResult:
    """How a part ended, and what it wrote."""

    title: str
    about: str
    state: str = "not run"
    seconds: float = 0.0
    entries: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Report:
    """All of a run. It is written anew after each part."""

    device: torch.device
    scale: str
    command: str
    parts: dict[str, PartResult] = field(default_factory=dict)
    machine: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.machine = machine(self.device)

    def write(self, page: Path) -> None:
        """The page, and its JSON beside it."""
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(self.markdown(), encoding="utf-8")
        page.with_suffix(".json").write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """Every figure of every repeat."""
        return {
            "machine": self.machine,
            "versions": versions(),
            "scale": self.scale,
            "command": self.command,
            "parts": {name: vars(result) for name, result in self.parts.items()},
        }

    def adopt(self, page: Path) -> None:
        """Takes over the parts of an earlier run that are not of this one, with the floors that they were held against.

        Raises:
            ValueError: that run was on another machine, with other versions or another model.
        """
        earlier = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
        now = {"machine": self.machine, "versions": versions(), "scale": self.scale}
        for name, value in now.items():
            if _lasting(earlier[name]) != _lasting(value):
                raise ValueError(f"{page} has another {name}: {earlier[name]}, not {value}")
        floors = [entry["cells"] for entry in earlier["parts"].get("floors", {}).get("entries", []) if "cells" in entry]
        rates = ", ".join(f"{cells['what']} {shown(cells['rate'])} {cells['unit']}" for cells in floors)
        kept = {name: PartResult(**part) for name, part in earlier["parts"].items() if name not in self.parts}
        for part in kept.values():
            if not any(entry.get("note", "").startswith(_EARLIER) for entry in part.entries):
                part.entries.append({"note": f"{_EARLIER}, in which the device did: {rates}."})
        self.parts |= kept

    def markdown(self) -> str:
        """Medians, with the least and the most of the repeats."""
        lines = ["# On a GPU" if self.device.type == "cuda" else "# The GPU benchmark's parts, on a CPU", ""]
        lines += [f"{self.scale}. " + ", ".join(f"{name} {value}" for name, value in self.machine.items()) + ". "]
        lines += [", ".join(f"{name} {number}" for name, number in versions().items()) + ".", ""]
        lines += [
            "Medians, with the least and the most over the repeats, which take turns. Repeat with "
            f"`{self.command}`; what is measured stands with each table.",
            "",
        ]
        for name, result in self.parts.items():
            lines += [f"## {result.title}", "", result.about, ""]
            if result.state != "done":
                lines += [f"**{name}: {result.state}.**", ""]
            lines += _tables(result.entries)
            notes = [entry["note"] for entry in result.entries if "note" in entry]
            lines += [*(f"- {note}" for note in notes), ""] if notes else []
        return "\n".join(lines).rstrip() + "\n"


def _lasting(value: object) -> object:
    """Without what changes from run to run."""
    return {k: v for k, v in value.items() if not k.startswith("load")} if isinstance(value, dict) else value


def _tables(entries: list[dict[str, Any]]) -> list[str]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if "table" in entry:
            rows.setdefault(entry["table"], []).append(entry["cells"])
    lines = []
    for cells in rows.values():
        titles = list(dict.fromkeys(title for row in cells for title in row))
        lines += ["| " + " | ".join(titles) + " |", "|---|" + "--:|" * (len(titles) - 1)]
        lines += ["| " + " | ".join(shown(row[t]) if t in row else "" for t in titles) + " |" for row in cells]
        lines.append("")
    return lines


def versions() -> dict[str, str]:
    """Of what matters here, where it is installed."""
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if find_spec("flash_attn") is not None:
        found["flash-attn"] = "installed"
    return found


def machine(device: torch.device) -> dict[str, str]:
    found = {"cores": str(os.cpu_count()), "load average before": f"{os.getloadavg()[0]:.1f}"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = _driver()
        return {
            "GPU": properties.name,
            "memory": f"{properties.total_memory / 1e9:.0f} GB",
            **({"driver": driver} if driver else {}),
            **found,
        }
    return {"CPU": platform.machine(), **found}


def _driver() -> str:
    try:
        said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"Driver Version: (\S+)", said)
    return match.group(1) if match else ""
