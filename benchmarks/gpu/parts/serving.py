"""The server as its clients see it, beside published figures, and the simulator's prediction of it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu.part import TOKEN_BUDGET, Part
from benchmarks.predicted import FIGURES, loaded, ran, simulated, write_trace
from tests.fakes.stack import Stack

ABOUT = (
    "So many requests at a time, of 1,024 prompt and 512 output tokens, two for each client, by HTTP to one worker "
    "(`kvrelay up --prefill 0`). Published: TensorRT-LLM with Llama 3.1 8B in bfloat16 on one H100. Predicted: 60 "
    "requests at 8 a second (`benchmarks.predicted`) through prefill and decode on the one GPU, beside what `kvrelay "
    "simulate` says with the profile of `kvrelay measure` and with the built-in one: its two workers have a GPU each. "
    "Milliseconds."
)
PUBLISHED = {8: (550.0, 7.4), 16: (308.0, 8.4), 32: (226.0, 9.9), 64: (230.0, 13.1), 128: (364.0, 19.3)}
"""TTFT and TPOT by the number of concurrent requests."""
BUILT_IN = "llama3-8b-h200"


def run(part: Part) -> None:
    """A row a number of clients; with the argument `predicted` a row a system."""
    on_gpu = part.device.type == "cuda"
    if part.argument == "predicted":
        _predict(part, 60 if on_gpu else 6, BUILT_IN if on_gpu else None)
        return
    prompt, output = part.scale.served
    clients = list(PUBLISHED) if on_gpu else [2]
    flags = part.worker_flags(max(clients) * (prompt + output + 16), max(clients))
    with Stack(part.model_dir(), part.folder / "alone", "--prefill", "0", "--decode", "1", *flags) as stack:
        for count in clients:
            if not part.recorder.has_time(f"{count} clients and more"):
                return
            lengths = ["--prompt-tokens", str(prompt), "--output-tokens", str(output)]
            load = ["--concurrency", str(count), "--requests", str(2 * count), "--warm-up", "1", *lengths]
            found = loaded(part.folder, stack, *load)
            ttft, tpot = PUBLISHED.get(count, (0.0, 0.0))
            published = {"published_TTFT": ttft, "published_TPOT": tpot}
            part.recorder.row("Serving", clients=count, **_cells(found), **published)


def _predict(part: Part, num_requests: int, built_in: str | None) -> None:
    """The profile goes to a note, as the file to use."""
    flags = part.worker_flags(num_requests * 2048, 64)
    trace, profile = part.folder / "trace.jsonl", part.folder / "profile.json"
    write_trace(trace, num_requests, 8.0)
    ran("measure", str(profile), "--model", str(part.model_dir()), *flags)
    part.recorder.note(f"The measured profile: `{json.dumps(json.loads(profile.read_text()))}`.")
    with Stack(part.model_dir(), part.folder / "pair", *flags) as stack:
        part.recorder.row("Predicted", what="measured", **_cells(loaded(part.folder, stack, "--trace", str(trace))))
    for name in filter(None, (str(profile), built_in)):
        found = simulated(part.folder, trace, name, TOKEN_BUDGET)
        part.recorder.row("Predicted", what=f"simulated, {Path(name).name}", **_cells(found))


def _cells(found: dict[str, float]) -> dict[str, float]:
    return {name.replace(" ", "_"): round(found[name], 2) for name in FIGURES if name in found}
