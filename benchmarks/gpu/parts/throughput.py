"""Many requests of random lengths at once, on models of two sizes: the load that mini-sglang and nano-vllm report."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config

from benchmarks.gpu.figures import figures
from benchmarks.gpu.loop import Job, serve
from benchmarks.gpu.part import Part
from benchmarks.gpu.scale import BLOCK_SIZE
from kvrelay.engine.load.causal_model import load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.run.graph_sizes import default_sizes
from kvrelay.engine.run.graphs import GraphSettings
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.table import blocks_for
from tests.tiny_models import build_tokenizer

ABOUT = (
    "256 requests at once, each of 100 to 1,024 prompt tokens and 100 to 1,024 output tokens, drawn evenly; greedily, "
    "without stop tokens or shared prefixes, through the step loop with its scheduler (no HTTP, no handoff). Models of "
    "the shapes of Qwen3-0.6B and Qwen3-14B, with random weights. A pool that is smaller than all requests preempts."
)
_TOKEN_BUDGET = 8192
_FREE_SHARE = 0.85  # of the memory beside the weights that the pool may take


@dataclass(frozen=True)
class Shape:
    """The sizes by which models of one family differ."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    tied: bool


FULL = (
    Shape("Qwen3-0.6B's", 28, 1024, 3072, 16, 8, tied=True),
    Shape("Qwen3-14B's", 40, 5120, 17408, 40, 8, tied=False),
)
SMOKE = (Shape("a tiny", 2, 128, 256, 4, 2, tied=True),)


def run(part: Part) -> None:
    """A row a model."""
    on_gpu = part.device.type == "cuda"
    for shape in FULL if on_gpu else SMOKE:
        if part.recorder.has_time(f"{shape.name} shape"):
            _measure(part, shape, make_jobs(256, (100, 1024)) if on_gpu else make_jobs(8, (10, 40)))
            if on_gpu:
                torch.cuda.empty_cache()


def make_jobs(count: int, lengths: tuple[int, int]) -> list[Job]:
    """Prompts of random tokens; `lengths` bounds both the prompts' and the outputs'."""
    random = np.random.default_rng(0)
    prompts, outputs = (random.integers(lengths[0], lengths[1] + 1, count) for _ in range(2))
    return [
        Job(random.integers(5, 1000, int(prompt)).astype(np.int32), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _measure(part: Part, shape: Shape, jobs: list[Job]) -> None:
    runner = _runner(part, shape, jobs)
    rates, totals, firsts, gaps = [], [], [], []
    for repeat in range(3):
        if repeat > 1 and not part.recorder.has_time(f"{shape.name} shape, repeats from {repeat} on"):
            break
        course = serve(runner, [Job(job.prompt, job.max_tokens) for job in jobs], token_budget=_TOKEN_BUDGET)
        times = [job.token_times for job in course.jobs]
        num_outputs = sum(map(len, times))
        if repeat:
            rates.append(num_outputs / course.wall_s)
            totals.append((num_outputs + sum(len(job.prompt) for job in jobs)) / course.wall_s)
            firsts.append(1e3 * statistics.median(each[0] for each in times))
            gaps.append(1e3 * statistics.median(np.concatenate([np.diff(each) for each in times]).tolist()))
    part.recorder.row(
        "Throughput",
        model=shape.name,
        requests=len(jobs),
        output_tokens=sum(job.max_tokens for job in jobs),
        pool_tokens=runner.spec.num_blocks * BLOCK_SIZE,
        output_tokens_a_second=figures(rates, 0),
        all_tokens_a_second=figures(totals, 0),
        first_token_ms=figures(firsts, 0),
        gap_ms=figures(gaps, 2),
    )


def _runner(part: Part, shape: Shape, jobs: list[Job]) -> TransformersRunner:
    """With a pool for all jobs, or as much of it as fits beside the weights."""
    started = time.monotonic()
    longest = max(len(job.prompt) + job.max_tokens for job in jobs) + BLOCK_SIZE
    name = str(_write(shape, part, part.folder / shape.name.split("'")[0].replace(" ", "-")))
    model = load_model(open_source(name, part.scale.dtype, part.device, longest, "dummy"), BLOCK_SIZE)
    num_blocks = sum(blocks_for(len(job.prompt) + job.max_tokens, BLOCK_SIZE) for job in jobs) + 1
    if part.device.type == "cuda":
        free = torch.cuda.mem_get_info(part.device)[0]
        num_blocks = min(num_blocks, int(free * _FREE_SHARE) // model.layout.block_bytes)
    runner = TransformersRunner(model, num_blocks, with_scratch=True)
    if part.device.type == "cuda":
        runner.try_graphs(GraphSettings(default_sizes(len(jobs))))
    print(f"  {shape.name} shape made in {time.monotonic() - started:.1f} s ({model.forward.name} layers)", flush=True)
    return runner


def _write(shape: Shape, part: Part, directory: Path) -> Path:
    config = Qwen3Config(
        vocab_size=151936 if part.device.type == "cuda" else 2048,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=128 if part.device.type == "cuda" else 32,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        eos_token_id=2,
        dtype=part.scale.dtype,
    )
    config.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory
