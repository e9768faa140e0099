"""Many requests of random lengths at once: the load that mini-sglang and nano-vllm report."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np

from benchmarks.gpu.figures import figures
from benchmarks.gpu.loop import Job, serve
from benchmarks.gpu.part import Part
from benchmarks.gpu.scale import BLOCK_SIZE
from kvrelay.engine.run.graph_sizes import default_sizes

ABOUT = (
    "256 requests at once, each of 100 to 1,024 prompt tokens and 100 to 1,024 output tokens, drawn evenly; greedily, "
    "without stop tokens or shared prefixes, through the step loop with its scheduler (no HTTP, no handoff). The model "
    "has Qwen3-0.6B's shape, with random weights. Published: vLLM 10,474 output tokens a second on an RTX 5090, 8,136 "
    "on an A100."
)
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
QWEN3 |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
QWEN3 |= {"max_position_embeddings": 8192}
_TOKEN_BUDGET = 8192


def run(part: Part) -> None:
    """One row."""
    jobs = make_jobs(8, (10, 40))
    if part.device.type == "cuda":
        part, jobs = replace(part, scale=replace(part.scale, config=QWEN3)), make_jobs(256, (100, 1024))
    num_tokens = sum(len(job.prompt) + job.max_tokens + BLOCK_SIZE for job in jobs)
    runner = part.runner(num_tokens, default_sizes(len(jobs)))
    rates, totals, firsts, gaps = [], [], [], []
    for repeat in range(3):
        if repeat > 1 and not part.recorder.has_time(f"repeats from {repeat} on"):
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
        requests=len(jobs),
        output_tokens=sum(job.max_tokens for job in jobs),
        output_tokens_a_second=figures(rates, 0),
        all_tokens_a_second=figures(totals, 0),
        first_token_ms=figures(firsts, 0),
        gap_ms=figures(gaps, 2),
    )


def make_jobs(count: int, lengths: tuple[int, int]) -> list[Job]:
    """Prompts of random tokens; `lengths` bounds both the prompts' and the outputs'."""
    random = np.random.default_rng(0)
    prompts, outputs = (random.integers(lengths[0], lengths[1] + 1, count) for _ in range(2))
    return [
        Job(random.integers(5, 1000, int(prompt)).astype(np.int32), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
