"""Whether what is to be measured is right: a benchmark of wrong results is refused."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.gpu.part import Part, WrongResults
from kvrelay.engine.load.causal_model import load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.make import make_runner
from kvrelay.protocol.sampling import Sampling
from tests.gpu.reference import bfloat16_tolerance, errors, greedy, own_logits, paged_logits, prompts, read_model
from tests.tiny_models import build_model
from tests.unit.engine import driving

ABOUT = (
    "A small random model on the device against `transformers` on the same device: greedy tokens in float32, which "
    "must be equal, and the logits' mean relative error in bfloat16 to float32's, which must be what rounding explains "
    "(`tests/gpu/reference.py`) and at most 1.25 of transformers' own."
)
_NUM_OUTPUT = 16
_WORST_RATIO = 1.25


def run(part: Part) -> None:
    """Raises WrongResults. Also compiles whatever kernels are not there yet."""
    _check_float32(part, build_model("qwen3", part.folder / "float32"))
    _check_bfloat16(part, build_model("wide-qwen3", part.folder / "bfloat16", dtype=torch.bfloat16))


def _check_float32(part: Part, directory: Path) -> None:
    given = prompts(5, 90)
    runner = make_runner(str(directory), dtype="float32", device=part.device, num_blocks=80)
    reference = read_model(directory, torch.float32, part.device)
    expected = [greedy(reference, prompt, _NUM_OUTPUT) for prompt in given]
    sequences = driving.start(runner, given, Sampling(temperature=0.0, max_tokens=_NUM_OUTPUT), _NUM_OUTPUT)
    driving.run(runner, sequences)
    equal = sum(sequence.output == tokens for sequence, tokens in zip(sequences, expected, strict=True))
    part.recorder.row("Parity", what="float32, equal outputs", ours=f"{equal} of {len(given)}", theirs="", limit="all")
    if equal < len(given):
        raise WrongResults("greedy tokens in float32 are not those of transformers")


def _check_bfloat16(part: Part, directory: Path) -> None:
    started = time.monotonic()
    model = load_model(open_source(str(directory), "bfloat16", part.device), 16)
    part.recorder.note(
        f"bfloat16: attention by {model.backend.name}; loaded in {time.monotonic() - started:.0f} s, "
        "with the compilation of what was not compiled."
    )
    if part.device.type == "cuda" and model.backend.name != "flashinfer":
        raise WrongResults(f"attention by {model.backend.name}, which nobody would serve with; the log says why")
    given = prompts(5, 100)
    exact = [own_logits(read_model(directory, torch.float32, part.device), prompt) for prompt in given]
    their_model = read_model(directory, torch.bfloat16, part.device)
    theirs = errors([own_logits(their_model, prompt) for prompt in given], exact).mean
    ours = errors(paged_logits(model, given), exact).mean
    limit = min(bfloat16_tolerance(model.layout.num_layers), _WORST_RATIO * theirs)
    part.recorder.row(
        "Parity", what="bfloat16, relative error", ours=f"{ours:.5f}", theirs=f"{theirs:.5f}", limit=f"{limit:.5f}"
    )
    if not ours <= limit:
        raise WrongResults(f"logits in bfloat16 are off by {ours:.3g} (limit {limit:.3g})")
