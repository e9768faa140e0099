"""A decode worker that records where the time of its steps goes; `step_profile` and `load_profile` start and read it.

The functions of a step are wrapped. A stage's time is by its thread's CPU clock, without the stages inside of it, so
other load on the machine counts only through caches. Reading the clock adds about 0.5 us per stage to the stage around.
The forward's time is also taken by the wall's clock, which has the threads that it waits for.

Usage: python -m benchmarks.step_stages FILE ROUTER_PID [flags of a decode worker]
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrelay.backends.cpu import CpuBackend
from kvrelay.engine import transformers_runner
from kvrelay.engine.causal_model import CausalModel
from kvrelay.engine.pending_tokens import PendingTokens
from kvrelay.engine.sampler import Sampler
from kvrelay.engine.transformers_runner import TransformersRunner
from kvrelay.messaging.messenger import Messenger
from kvrelay.scheduling.plan import StepPlan
from kvrelay.scheduling.scheduler import BatchScheduler
from kvrelay.worker import step_loop
from kvrelay.worker.step_loop import StepLoop
from kvrelay.worker.worker_main import worker_main
from kvrelay_decode.__main__ import make_role
from kvrelay_decode.service import DecodeRole

THREADS_EVERY = 50
"""Steps between two samples of the CPU time of all threads, which takes longer than a stage."""


class _OwnTimes(threading.local):
    """The stages that are open on a thread: for each, the time of the stages inside of it."""

    def __init__(self) -> None:
        self.inside: list[int] = [0]


class Recorder:
    """Sums up the stages of a step, and writes a line for each step.

    Of a line: `began` and `ended`, the wall's clock at the forward's begin and end; `gap`, from the end of the forward
    before; `period`, from its begin; `forward`, the layers and the head, all in nanoseconds. `tokens` and `positions`:
    what each row computes, and how many tokens are in the pool before. `rows`: their number. `prompt_tokens`: of the
    computed ones.
    """

    def __init__(self, path: Path, router_pid: int) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1 << 20)
        self._router_pid = router_pid
        self._threads = _OwnTimes()
        self._stages: dict[str, int] = {}
        self._loop_before = 0
        self._began = self._ended = self._gap = self._period = self._forward = 0
        self._num_steps = 0

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Records the calls of a function or method as `stage`."""
        setattr(owner, name, self._timed(getattr(owner, name), stage))

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        threads, clock = self._threads, time.thread_time_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            inside = threads.inside
            inside.append(0)
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = clock() - began
                self._stages[stage] = self._stages.get(stage, 0) + took - inside.pop()
                inside[-1] += took

        return timed

    def watch_forwards(self) -> None:
        """Takes the time between steps, and that of layers and head, by the wall's clock."""
        for name in ("hidden_states", "logits"):
            self._watch_forward(getattr(CausalModel, name), name)
        execute = TransformersRunner.execute

        def timed(runner: TransformersRunner, batch: Any) -> Any:
            began = time.perf_counter_ns()
            self._gap, self._period, self._began = began - self._ended, began - self._began, began
            self._forward = 0
            try:
                return execute(runner, batch)
            finally:
                self._ended = time.perf_counter_ns()

        setattr(TransformersRunner, "execute", timed)  # noqa: B010
        self.wrap(TransformersRunner, "execute", "runner, rest")

    def _watch_forward(self, function: Callable[..., Any], name: str) -> None:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._forward += time.perf_counter_ns() - began

        setattr(CausalModel, name, timed)

    def watch_steps(self) -> None:
        """Writes the stages of a step once its results are published: what came since the step before it."""
        publish = StepLoop._publish

        def published(loop: StepLoop, step: Any, *rest: Any) -> None:
            publish(loop, step, *rest)
            self._write(step.plan)

        setattr(StepLoop, "_publish", published)  # noqa: B010

    def _write(self, plan: StepPlan) -> None:
        now = time.thread_time_ns()
        stages, self._stages = self._stages, {}
        on_loop = sum(taken for stage, taken in stages.items() if stage.startswith("loop: "))
        stages["loop: events, rest"] = now - self._loop_before - on_loop
        self._num_steps += 1
        line: dict[str, Any] = {
            "rows": len(plan.rows),
            "prompt_tokens": plan.num_prefill_tokens,
            "tokens": [row.num_computed for row in plan.rows],
            "positions": [row.position for row in plan.rows],
            "began": self._began,
            "ended": self._ended,
            "gap": self._gap,
            "period": self._period,
            "forward": self._forward,
            "stages": stages,
        }
        if self._num_steps % THREADS_EVERY == 0:
            line["threads"] = {"worker": thread_times(os.getpid()), "router": thread_times(self._router_pid)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._loop_before = time.thread_time_ns()


def thread_times(pid: int) -> dict[str, int]:
    """Nanoseconds of CPU time by thread of a process: its id and name."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {
        f"{task.name} {(task / 'comm').read_text().strip()}": int((task / "schedstat").read_text().split()[0])
        for task in tasks
    }


def record(recorder: Recorder) -> None:
    """Wraps the functions of a step."""
    for name in ("schedule", "schedule_ahead"):
        recorder.wrap(BatchScheduler, name, "loop: schedule")
    recorder.wrap(step_loop, "worker_batch", "loop: make batch")
    recorder.wrap(BatchScheduler, "commit", "loop: commit")
    recorder.wrap(StepLoop, "_publish", "loop: count and trace")
    recorder.wrap(DecodeRole, "_committed", "loop: entries of tokens")
    for name in ("send", "_flush"):
        recorder.wrap(Messenger, name, "loop: send messages")
    for name in ("_drain_inbox", "_on_tick"):
        recorder.wrap(Messenger, name, "loop: receive messages")
    recorder.wrap(transformers_runner, "pack_rows", "pack rows")
    recorder.wrap(TransformersRunner, "_token_ids", "pack rows")
    recorder.wrap(CpuBackend, "plan", "plan attention")
    recorder.wrap(CausalModel, "hidden_states", "forward: layers")
    recorder.wrap(CausalModel, "logits", "forward: head")
    recorder.wrap(Sampler, "begin", "sample")
    recorder.wrap(PendingTokens, "land", "sample")
    recorder.watch_forwards()
    recorder.watch_steps()


def main() -> int:
    path, router_pid = sys.argv[1:3]
    del sys.argv[1:3]
    record(Recorder(Path(path), int(router_pid)))
    return worker_main("decode", make_role)


if __name__ == "__main__":
    raise SystemExit(main())
