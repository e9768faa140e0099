"""What the kernels of a step take, without the host: from the profiler's trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.gpu.figures import figures, ratios
from benchmarks.gpu.idle import kernel_times, make_profiler
from benchmarks.gpu.part import Part, decoding_batch
from benchmarks.gpu.parts.decode import step_bytes
from benchmarks.gpu.parts.prefill import prompt_operations, prompt_work
from benchmarks.gpu.scale import BLOCK_SIZE

ABOUT = (
    "Time of all kernels and copies on the GPU, from the profiler's trace of single decoding steps and of single "
    "prompts in chunks: matrix products, attention (with the writes of keys and values), and all others. Of the floor: "
    "as for decoding; share: as for prefill. What a step takes beyond this is the host's, unless the next step is "
    "launched ahead."
)
_TRACES = 2
_PRODUCTS = ("nvjet", "gemm", "cutlass", "cublas")
_ATTENTION = ("flashinfer", "fmha", "attention")


def run(part: Part) -> None:
    """A row for each batch and each chunk size."""
    if part.device.type != "cuda":
        part.recorder.row("Kernels", step="none", kernels_ms=figures([0.0]))
        part.recorder.note("Kernels are read from a GPU's profiler alone.")
        return
    scale = part.scale
    runner = part.runner((max(scale.batches) + 1) * (scale.context + 16), scale.batches)
    for batch in scale.batches:
        if not part.recorder.has_time(f"decoding, batch {batch} and larger ones"):
            return
        step = decoding_batch(runner, batch, scale.context)
        floor_s = step_bytes(part, batch, scale.context, runner.spec.block_bytes) / part.known_floors.copy_rate
        _row(part, f"decoding, batch {batch}", partial(runner.execute, step), floor_s=floor_s)
    prompts = part.runner(scale.prompt + BLOCK_SIZE, (1,))
    for chunk in reversed(scale.chunks):
        if part.recorder.has_time(f"a prompt in chunks of {chunk} and other sizes"):
            _row(part, f"prompt, chunks of {chunk}", prompt_work(part, prompts, chunk))


def _row(part: Part, name: str, work: Callable[[], object], floor_s: float | None = None) -> None:
    """Of one step or prompt; `floor_s` is a decoding step's."""
    work()
    taken: list[dict[str, float]] = []
    for _ in range(_TRACES):
        part.wait()
        with make_profiler() as profiler:
            work()
            part.wait()
        taken.append(by_kind(kernel_times(profiler)))
    totals = [sum(times.values()) for times in taken]
    cells = {f"{kind}_ms": figures([1e3 * times[kind] for times in taken], 3) for kind in taken[0]}
    if floor_s is not None:
        cells["of_the_floor"] = ratios(totals, [floor_s] * len(totals))
    else:
        rate = prompt_operations(part) / part.known_floors.matmul_rate
        cells["share_percent"] = figures([100 * rate / total for total in totals], 1)
    part.recorder.row("Kernels", step=name, kernels_ms=figures([1e3 * total for total in totals], 3), **cells)


def by_kind(times: list[tuple[str, float]]) -> dict[str, float]:
    """Seconds of matrix products, of attention and of others, of names of kernels with their seconds."""
    found = {"products": 0.0, "attention": 0.0, "others": 0.0}
    for name, seconds in times:
        lowered = name.lower()
        if any(word in lowered for word in _ATTENTION):
            found["attention"] += seconds
        elif any(word in lowered for word in _PRODUCTS):
            found["products"] += seconds
        else:
            found["others"] += seconds
    return found
