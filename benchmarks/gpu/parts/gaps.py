"""What lies between the steps of sequences that decode: planning, booking, sampling on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.gpu.figures import Cell, figures
from benchmarks.gpu.idle import device_activities, idleness, make_profiler
from benchmarks.gpu.loop import Job, serve
from benchmarks.gpu.part import Part
from benchmarks.gpu.scale import Scale
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.worker.step_loop import StepLoop

ABOUT = (
    "A worker's step loop with its scheduler, in steps in which all sequences decode. Idle between, within steps: "
    "shares of the time in which the GPU did nothing, from the profiler's trace of some of these steps, after the copy "
    "that brings a step's tokens and elsewhere. The profiler slows the host a little. Target: at most 3% between steps."
)
_MARGIN_STEPS = 3
_REPEATS = 2  # each computes all prompts first
_PROFILED_STEPS = 30  # a trace has some hundred kernels a step
WAYS = {
    "planned and launched while the step before runs": (True, True),
    "planned while the step before runs": (True, False),
    "after it": (False, False),
}
"""Of going from step to step: whether steps are planned ahead, and launched ahead."""


def num_outputs(scale: Scale) -> int:
    """Tokens of a sequence, so many that all still decode in the window: they start one behind the other."""
    return scale.loop_steps + 2 * _MARGIN_STEPS + scale.loop_batch


@dataclass
class Window:
    """Steps in which all sequences decode: moments of their ends; a profiler around some."""

    batch: int
    num_steps: int
    profiler: torch.profiler.profile | None
    ends: list[float] = field(default_factory=list)
    num_launched_ahead: list[int] = field(default_factory=list)
    _seen: int = 0

    def on_step(self, loop: StepLoop, outputs: Sequence[SequenceOutput]) -> None:
        """After each step of the loop."""
        if len(outputs) < self.batch:
            return
        self._seen += 1
        if self._seen == _MARGIN_STEPS and self.profiler is not None:
            self.profiler.start()
        if _MARGIN_STEPS < self._seen <= _MARGIN_STEPS + self.num_steps:
            self.ends.append(time.perf_counter())
            self.num_launched_ahead.append(loop.totals.num_steps_launched_ahead)
        if self._seen == _MARGIN_STEPS + self.num_steps and self.profiler is not None:
            self.profiler.stop()

    @property
    def step_s(self) -> float:
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)

    @property
    def launched_ahead(self) -> float:
        """A share of the steps."""
        return (self.num_launched_ahead[-1] - self.num_launched_ahead[0]) / (len(self.ends) - 1)


def run(part: Part) -> None:
    """A row for each way of going from step to step."""
    scale = part.scale
    runner = part.runner((scale.loop_batch + 1) * (scale.context + num_outputs(scale) + 16), (scale.loop_batch,))
    for way in WAYS:
        if not part.recorder.has_time(way):
            return
        _row(part, runner, way)
    if part.device.type != "cuda":
        part.recorder.note("Idle shares of the device are read from a GPU's profiler alone.")


def _row(part: Part, runner: TransformersRunner, way: str) -> None:
    scale = part.scale
    overlap, runner.launches_ahead = WAYS[way]
    repeats = min(_REPEATS, scale.repeats)
    windows = [_measure(part, runner, None, overlap=overlap) for _ in range(repeats + 1)][1:]
    cells: dict[str, Cell] = {
        "steps": way,
        "batch": scale.loop_batch,
        "step_ms": figures([1e3 * window.step_s for window in windows], 3),
        "launched_ahead_percent": figures([100 * window.launched_ahead for window in windows], 0),
    }
    if part.device.type == "cuda":
        cells |= _idle_cells(part, runner, overlap=overlap)
    part.recorder.row("Gaps", **cells)


def _idle_cells(part: Part, runner: TransformersRunner, *, overlap: bool) -> dict[str, Cell]:
    profiler = make_profiler(torch.profiler.ProfilerActivity.CUDA)
    _measure(part, runner, profiler, overlap=overlap)
    if not (activities := device_activities(profiler)):
        part.recorder.note("The profiler saw no kernels: its shares are missing.")
        return {}
    share = idleness(activities)
    return {
        "idle_between_steps_percent": figures([100 * share.between_steps], 2),
        "idle_within_steps_percent": figures([100 * share.within_steps], 2),
        "copies_to_the_host_a_step": figures([share.num_steps / _PROFILED_STEPS], 1),
    }


def _measure(
    part: Part, runner: TransformersRunner, profiler: torch.profiler.profile | None, *, overlap: bool
) -> Window:
    scale = part.scale
    num_steps = scale.loop_steps if profiler is None else _PROFILED_STEPS
    window = Window(scale.loop_batch, num_steps, profiler)
    random = np.random.default_rng(1)
    jobs = [
        Job(random.integers(5, 2000, scale.context).astype(np.int32), num_outputs(scale))
        for _ in range(scale.loop_batch)
    ]
    on_step: Callable[[StepLoop, Sequence[SequenceOutput]], None] = window.on_step
    serve(runner, jobs, token_budget=4 * scale.context, max_running=scale.loop_batch, overlap=overlap, on_step=on_step)
    assert len(window.ends) == num_steps, "sequences ended before the window"
    return window
