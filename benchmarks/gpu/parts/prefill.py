"""A prompt's computation against the rate of matrix products, by chunk size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.gpu.figures import figures
from benchmarks.gpu.part import GREEDY, Part, interleaved
from benchmarks.gpu.parts.decode import weight_bytes
from benchmarks.gpu.scale import BLOCK_SIZE, Scale
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import WorkerBatch, WorkerRow

ABOUT = (
    "One prompt in chunks, one after the other, to its first token on the host. Operations: two for each weight and "
    "token (the head's for the last token alone), and four for each query, key and head dimension of the causal "
    "attention. Share: their rate over that of the matrix product. Target: at least 78%."
)


def run(part: Part) -> None:
    """A row a chunk size."""
    scale = part.scale
    runner = part.runner(scale.prompt + BLOCK_SIZE, (1,))
    works = {str(chunk): _prompt_seconds(part, runner, chunk) for chunk in scale.chunks}
    operations = prompt_operations(part)
    taken = interleaved(works, scale.repeats)
    for chunk, seconds in taken.items():
        rates = [operations / s for s in seconds]
        part.recorder.row(
            "Prefill",
            chunk=chunk,
            prompt_ms=figures([1e3 * s for s in seconds], 1),
            tokens_a_second=figures([scale.prompt / s for s in seconds], 0),
            TFLOPs=figures([rate / 1e12 for rate in rates], 1),
            share_percent=figures([100 * rate / part.known_floors.matmul_rate for rate in rates], 1),
        )


def prompt_operations(part: Part) -> float:
    """Floating-point operations of the whole prompt."""
    scale = part.scale
    head = scale.config["vocab_size"] * scale.config["hidden_size"]
    weights = weight_bytes(part) // part.dtype.itemsize - head
    return float(2 * weights * scale.prompt + 2 * head + attention_operations(scale))


def attention_operations(scale: Scale) -> float:
    """Scores and weighted values, of the pairs that causal attention has."""
    pairs = scale.prompt * (scale.prompt + 1) / 2
    return float(4.0 * scale.config["num_hidden_layers"] * scale.num_heads * scale.head_dim * pairs)


def _prompt_seconds(part: Part, runner: TransformersRunner, chunk: int) -> Callable[[], float]:
    compute = prompt_work(part, runner, chunk)
    return lambda: part.seconds(compute)


def prompt_work(part: Part, runner: TransformersRunner, chunk: int) -> Callable[[], None]:
    """Computes the prompt in chunks, to its first token on the host, whenever it is called."""
    prompt = np.random.default_rng(0).integers(5, part.scale.config["vocab_size"], part.scale.prompt).astype(np.int32)
    blocks = np.arange(blocks_for(len(prompt), BLOCK_SIZE), dtype=np.int32)
    key: SequenceKey = ("prefill", 1, 0)

    def compute() -> None:
        runner.add_sequence(key, GREEDY, [], len(prompt))
        for start in range(0, len(prompt), chunk):
            tokens = prompt[start : start + chunk]
            last = start + len(tokens) == len(prompt)
            runner.execute(WorkerBatch(0, [WorkerRow(key, tokens, start, blocks, sample=last, is_prefill=True)]))
        runner.drop_sequence(key)

    return compute
