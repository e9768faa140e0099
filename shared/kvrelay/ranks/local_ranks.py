"""The processes of other ranks on this machine, and whether a model's sizes allow their number."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.kv.shard_map import ShardShape
from kvrelay.machine_memory import num_memory_kills
from kvrelay.process import describe_exit, end_with_parent

PARENT_VARIABLE = "KVRELAY_RANK_PARENT"
"""Has the process id of the worker that started the rank, which ends with it."""
END_SOON_S = 2.0
"""Time between the end of a process's connections and its own."""
END_WITHIN_S = 5.0
"""Time for the processes to end by themselves before they are killed."""


def end_with_starter() -> None:
    """If a worker has started this process, it ends with it, and ignores Ctrl-C in a terminal: the worker drains, and
    needs its ranks."""
    if parent := os.environ.get(PARENT_VARIABLE):
        end_with_parent(int(parent))
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class RanksFailed(ValueError):
    """The ranks could not start. The message is for the user."""


@dataclass(frozen=True, slots=True)
class RankCommand:
    """The command that starts a rank on this machine."""

    rank: int
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


class LocalRanks:
    """Starts the processes and watches them, on a thread that lives as long as they may: the kernel kills them when the
    thread that started them ends, so none outlives a worker that was killed."""

    def __init__(self, commands: Sequence[RankCommand]) -> None:
        """Raises RanksFailed if a command cannot be run."""
        self.first_end: Future[str] = Future()
        """Has the reason once a process has ended."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """The key is the rank."""
        self._commands = commands
        self._num_kills = num_memory_kills()
        self._closing, self._to_close = os.pipe()
        self._closes_at = 0.0
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="local-ranks", daemon=True)
        self._thread.start()
        started.result()

    def why_lost(self, error: str) -> str:
        """Why a rank is lost to this one: how a process has ended, or the error if none ends soon."""
        with suppress(TimeoutError):
            return self.first_end.result(END_SOON_S if self.processes else 0)
        return error

    def check(self) -> None:
        """Raises RanksFailed if a process has ended."""
        if self.first_end.done():
            raise RanksFailed(self.first_end.result())

    def terminate(self) -> None:
        """Has the processes drain and end."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()

    def close(self, within_s: float = END_WITHIN_S) -> None:
        """Waits until the processes have ended, and kills those that take longer. Idempotent."""
        if self._thread.is_alive():
            self._closes_at = time.monotonic() + within_s
            with suppress(OSError):
                os.write(self._to_close, b"x")
            self._thread.join()

    def _run(self, started: Future[None]) -> None:
        try:
            for each in self._commands:
                environ = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **each.environ}
                self.processes[each.rank] = subprocess.Popen(each.command, env=environ, stdin=subprocess.DEVNULL)
        except OSError as error:
            self._end_all()
            started.set_exception(RanksFailed(f"cannot start a rank: {error}"))
            return
        started.set_result(None)
        self._watch()
        self._end_all()

    def _watch(self) -> None:
        """Returns when the processes are to be ended."""
        poller = select.poll()
        poller.register(self._closing, select.POLLIN)
        ranks = {os.pidfd_open(process.pid): rank for rank, process in self.processes.items()}
        for fd in ranks:
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._closing:
                    for each in ranks:
                        os.close(each)
                    return
                poller.unregister(fd)
                status = self.processes[ranks[fd]].wait()
                if not self.first_end.done():
                    self.first_end.set_result(f"rank {ranks[fd]} {describe_exit(status, self._num_kills)}")

    def _end_all(self) -> None:
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._closes_at - time.monotonic()))
        self.kill()
        for process in self.processes.values():
            process.wait()
        os.close(self._closing)
        os.close(self._to_close)


def why_not_divided(model: str, tensor_parallel_size: int, pipeline_parallel_size: int) -> str:
    """Why the heads or layers of the model in this directory do not divide so. Empty if they do, if the config does not
    state their numbers, and for the name of a model on a hub."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        heads, kv_heads, layers = (
            text.get(name) for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
        )
    except (OSError, ValueError, AttributeError):
        return ""
    size = tensor_parallel_size
    if isinstance(heads, int) and heads % size:
        return f"tensor_parallel_size = {size}: {heads} attention heads do not divide by it"
    if isinstance(kv_heads, int) and kv_heads > 0 and not ShardShape(size, kv_heads).is_even:
        return f"tensor_parallel_size = {size}: {kv_heads} KV heads do not divide by it, nor does it by them"
    if isinstance(layers, int) and layers < pipeline_parallel_size:
        return f"pipeline_parallel_size = {pipeline_parallel_size}: it has {layers} layers, and each stage needs one"
    return ""
