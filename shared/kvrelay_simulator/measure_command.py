"""`kvrelay measure FILE`: measures a profile of this machine and model for `kvrelay simulate --profile FILE`.

Steps of several shapes run on the real engine: prompt chunks at several positions and decodes with several contexts;
every row samples a token. Each shape runs `REPEATS` times after a warm-up. Coefficients are fitted to the prompt steps
(`scheduling.cost.fit`), and the cost per decoding sequence to the rest. The transfer rate is that of copying blocks one
by one within this process, an upper bound for transports; for several machines write the network's rate into the file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kvrelay.config import WorkerConfig
from kvrelay.config.loader import config_parser, resolve
from kvrelay.device_profiles import MeasuredProfile
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.flag_parser import CommandFailed, FlagParser, result_file
from kvrelay.handoff.transports.pool_memory import as_pool
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.step_cost import CostSample, StepCost, fit, pairs
from kvrelay.step.batch import WorkerBatch, WorkerRow

Shape = Sequence[tuple[int, int]]
"""A step as rows of (position, tokens)."""
PROMPTS: list[Shape] = [[(position, chunk)] for position in (0, 512, 2048) for chunk in (16, 64, 256, 512)]
DECODES: list[Shape] = [[(context, 1)] * count for context in (64, 512) for count in (1, 4, 16, 64)]
GREEDY = Sampling(max_tokens=2, temperature=0.0)
REPEATS = 4
COPIED_BLOCKS = 256


def measure(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status. Raises CommandFailed."""
    given = vars(measure_parser().parse(argv))
    path = given.pop("FILE")
    config = resolve(WorkerConfig, given, os.environ, role="prefill")
    if config.data_parallel_size > 1:
        raise CommandFailed(f"{config.division}: measure one of the workers alone (allowed: 1)", 2)
    from kvrelay.worker.worker_main import load_runner  # imports torch

    profile = measured_profile(load_runner(config), config.model_name)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    print(path.read_text(encoding="utf-8"), end="")
    return 0


def measure_parser() -> FlagParser:
    parser = config_parser(
        WorkerConfig,
        "kvrelay measure",
        "Measures a profile of this machine and model for kvrelay simulate --profile FILE.",
        usage="kvrelay measure FILE [flags of kvrelay prefill]",
    )
    parser.add_argument("FILE", type=result_file, help="where the profile is written")
    return parser


def measured_profile(runner: ModelRunner, name: str) -> MeasuredProfile:
    """Runs the steps. Shapes that exceed the pool or the model's context are skipped. Of a worker of several ranks, the
    profile is that of all ranks together, but the transfer rate is that of one."""
    prompts, decodes = ([_run(runner, batch) for batch in _batches(runner, each)] for each in (PROMPTS, DECODES))
    found = fit([sample for samples in prompts for sample in samples])
    spec = runner.spec
    return MeasuredProfile(
        name=name,
        fixed_s=found.fixed_s,
        token_s=found.token_s,
        pair_s=found.pair_s,
        decode_s=_decode_s(found, [sample for samples in decodes for sample in samples]),
        kv_bytes_per_token=spec.total_block_bytes // spec.block_size,
        kv_tokens=spec.num_blocks * spec.block_size,
        transfer_bytes_s=_copy_rate(runner),
        num_devices=spec.tensor_parallel_size * spec.pipeline_parallel_size,
        pipeline_depth=spec.pipeline_parallel_size,
    )


def _run(runner: ModelRunner, batch: WorkerBatch) -> list[CostSample]:
    for row in batch.rows:
        runner.add_sequence(row.key, GREEDY, row.token_ids.tolist(), len(row.token_ids))
    num_pairs = sum(pairs(row.position, len(row.token_ids)) for row in batch.rows)
    runner.execute(batch)
    pipeline_depth = runner.spec.pipeline_parallel_size  # a step's time is that of one part
    steps = [pipeline_depth * runner.execute(batch).forward_s for _ in range(REPEATS)]
    samples = [CostSample(batch.num_tokens, num_pairs, seconds) for seconds in steps]
    for row in batch.rows:
        runner.drop_sequence(row.key)
    return samples


def _decode_s(cost: StepCost, samples: Sequence[CostSample]) -> float | None:
    """Fits the seconds that a decoding sequence adds to a step, by least squares of relative errors."""
    if not samples:
        return None
    left = sum(s.num_tokens * (s.seconds - cost.fixed_s - cost.pair_s * s.num_pairs) / s.seconds**2 for s in samples)
    return max(0.0, left / sum((s.num_tokens / s.seconds) ** 2 for s in samples))


def _batches(runner: ModelRunner, shapes: Sequence[Shape]) -> Iterator[WorkerBatch]:
    for shape in shapes:
        batch = _batch(runner, shape)
        if batch is not None:
            yield batch


def _batch(runner: ModelRunner, shape: Shape) -> WorkerBatch | None:
    """The batch of a shape, or None if it does not fit."""
    spec = runner.spec
    rows, next_block = [], 0
    for number, (position, num_tokens) in enumerate(shape):
        num_blocks = blocks_for(position + num_tokens, spec.block_size)
        if position + num_tokens > spec.max_model_len or next_block + num_blocks > spec.num_blocks:
            return None
        rows.append(
            WorkerRow(
                key=("measure", 0, number),
                token_ids=np.ones(num_tokens, np.int32),
                position=position,
                block_ids=np.arange(next_block, next_block + num_blocks, dtype=np.int32),
                sample=True,
                is_prefill=num_tokens > 1,
            )
        )
        next_block += num_blocks
    return WorkerBatch(0, rows)


def _copy_rate(runner: ModelRunner) -> float:
    pool = as_pool(runner.pool_memory)
    chosen = np.random.default_rng(0).permutation(pool.num_blocks)[:COPIED_BLOCKS]
    target = pool.buffer(len(chosen))
    for _ in range(2):  # the first copy touches the memory
        started = time.perf_counter()
        pool.gather(chosen, target)
    return float(target.nbytes / max(time.perf_counter() - started, 1e-9))
