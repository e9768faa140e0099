"""A decoding step against the time that reading its bytes takes at least."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.figures import figures, ratios
from benchmarks.gpu.part import Part, decoding_batch, interleaved
from benchmarks.gpu.scale import BLOCK_SIZE
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.step.batch import WorkerBatch

ABOUT = (
    "One step of the engine with so many sequences that decode, greedily, as a CUDA graph: from the step's rows to "
    "tokens on the host. "
    "Steps run one after the other, or each is launched before the host has the tokens of the one before, as workers "
    "do. "
    "Floor: the bytes of all weights but the input embedding, and of the context's keys and values, over the rate of "
    "copies within the device. Target: at most 1.15 of the floor, launched ahead. KV in 8 bits has fewer bytes to read."
)
ORDERS = {"one after the other": False, "launched ahead": True}
"""Of going from step to step: whether each is launched before the one before has landed."""


def run(part: Part) -> None:
    """A row a batch and way. Argument: the type of KV; without one it is the model's."""
    scale = part.scale
    runner = part.runner((max(scale.batches) + 1) * (scale.context + 16), scale.batches, part.argument or None)
    for batch in scale.batches:
        if not part.recorder.has_time(f"batch {batch} and larger ones"):
            return
        step = decoding_batch(runner, batch, scale.context)
        works = {order: _steps(part, runner, step, ahead=ahead) for order, ahead in ORDERS.items()}
        taken = interleaved(works, scale.repeats)
        floor_s = step_bytes(part, batch, scale.context, runner.spec.block_bytes) / part.known_floors.copy_rate
        for order, seconds in taken.items():
            part.recorder.row(
                "Decoding step",
                batch=batch,
                kv=runner.spec.kv_dtype,
                steps=order,
                step_ms=figures([1e3 * s for s in seconds], 3),
                floor_ms=round(1e3 * floor_s, 3),
                of_the_floor=ratios(seconds, [floor_s] * len(seconds)),
                tokens_a_second=figures([batch / s for s in seconds], 0),
            )


def _steps(part: Part, runner: TransformersRunner, step: WorkerBatch, *, ahead: bool) -> Callable[[], float]:
    def launched_ahead() -> None:
        last = runner.launch(step)
        for _ in range(part.scale.steps - 1):
            following = runner.launch(step)
            last.land()
            last = following
        last.land()

    def seconds() -> float:
        if ahead:
            return part.seconds(launched_ahead) / part.scale.steps
        return part.seconds(lambda: runner.execute(step), part.scale.steps)

    return seconds


def step_bytes(part: Part, batch: int, context: int, block_bytes: int) -> int:
    """What a decoding step has to read."""
    return weight_bytes(part) + batch * context * block_bytes // BLOCK_SIZE


def weight_bytes(part: Part) -> int:
    """Of all parameters but the input embedding, of which a step reads a row a token; a tied one is the head's, too."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(part.model().source.config, dtype=part.dtype)
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return int(sum(sizes.values())) - (0 if embedding is head else sizes[id(embedding)])
