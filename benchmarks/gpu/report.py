"""A run's setting, and its journal as a Markdown page."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.gpu.figures import shown
from benchmarks.gpu.journal import DONE, Attempt, outcomes
from benchmarks.gpu.run_steps import same_setting
from benchmarks.gpu.steps import STEPS

_PACKAGES = ["torch", "nvidia-cuda-runtime", "transformers", "flashinfer-python", "triton", "nixl-cu13", "numpy"]


def header(command: str, *, on_gpu: bool, smoke: bool) -> dict[str, Any]:
    """On what the run runs."""
    model = "A tiny model in float32" if smoke else "The model has Llama-3-8B's shape in bfloat16"
    return {"machine": machine(on_gpu=on_gpu), "versions": versions(), "scale": model, "command": command}


def markdown(steps: dict[str, list[Attempt]], run: dict[str, Any]) -> str:
    """Of each step, what this run or else the latest one has that measured something."""
    lines = ["# On a GPU" if "GPU" in run["machine"] else "# The GPU benchmark's parts, on a CPU", ""]
    lines += [f"{run['scale']}. " + ", ".join(f"{name} {value}" for name, value in run["machine"].items()) + ". "]
    lines += [", ".join(f"{name} {number}" for name, number in run["versions"].items()) + ".", ""]
    lines += [
        "Medians, with the least and the most over the repeats, which take turns. Repeat with "
        f"`{run['command']}`; what is measured stands with each table.",
        "",
    ]
    if steps.get("parity", []) and steps["parity"][-1].state != DONE:
        lines += ["**Parity failed: no figure counts.**", ""]
    for step in STEPS:
        attempts = [attempt for attempt in steps.get(step.name, []) if same_setting(attempt.run, run)]
        if not attempts:
            continue
        shown_attempt = next((each for each in reversed(attempts) if each.state == DONE or each.rows), attempts[-1])
        lines += [f"## {step.title}", "", step.about, ""]
        if shown_attempt.state != DONE:
            lines += [f"**{step.name}: {shown_attempt.state}.**", ""]
        lines += _tests(outcomes(attempts)) if step.tests is not None else _tables(shown_attempt.entries)
        notes = [entry["note"] for entry in shown_attempt.entries if "note" in entry]
        if (rates := _rates(steps, shown_attempt)) and rates != _rates(steps, steps["floors"][-1]):
            notes.append(f"Of an earlier run, in which the device did: {rates}.")
        lines += [*(f"- {note}" for note in notes), ""] if notes else []
    return "\n".join(lines).rstrip() + "\n"


def _rates(steps: dict[str, list[Attempt]], attempt: Attempt) -> str:
    """What the device did in the attempt's run."""
    rows = [row["cells"] for each in steps.get("floors", []) if each.run is attempt.run for row in each.rows]
    named = {cells["what"]: f"{shown(cells['rate']).split()[0]} {cells['unit']}" for cells in rows}
    return ", ".join(f"{name} {named[name]}" for name in ("copy", "matmul") if name in named)


def _tests(found: dict[str, str]) -> list[str]:
    """How many passed, and the names of others."""
    failed = [f"- {outcome}: `{name}`" for name, outcome in found.items() if outcome == "failed"]
    counts = ", ".join(f"{list(found.values()).count(each)} {each}" for each in dict.fromkeys(found.values()))
    return [f"{counts or 'None ran'}.", "", *failed, *([""] if failed else [])]


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
    return found


def machine(*, on_gpu: bool) -> dict[str, str]:
    """The first GPU, as nvidia-smi says it, if there is one and it is asked for."""
    found = {"cores": str(os.cpu_count()), "load average before": f"{os.getloadavg()[0]:.1f}"}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout if on_gpu else ""
    except (OSError, subprocess.SubprocessError):
        said = ""
    if not said.strip():
        return {"CPU": platform.machine(), **found}
    name, memory, driver = (each.strip() for each in said.splitlines()[0].split(","))
    return {"GPU": name, "memory": memory, "driver": driver, **found}
