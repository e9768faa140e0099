"""Rank processes for tests, driven by the test's own process, which is rank 0."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch

from kvrelay.engine.make import make_runner
from kvrelay.engine.parallel import group_coordinator
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.model_part import RankGroups
from kvrelay.engine.parallel.pipeline import PipelineLink
from kvrelay.engine.parallel.shared_memory import share_memory
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.process import HeldPort
from kvrelay.step.batch import StepResult, WorkerBatch
from tests.fakes.waiting import PATIENCE_S

PRELOADED = ["kvrelay.engine.make"]


def engine_context() -> ForkServerContext:
    """Processes are forked from one that has imported the engine and computed nothing: it has no threads yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def free_address() -> tuple[str, int]:
    with HeldPort() as held:
        return "127.0.0.1", held.port


def serve(connection: Connection) -> None:
    """What a rank process runs: makes runners and follows steps as it is told, and answers with None or an error."""
    torch.set_num_threads(1)
    runner: TransformersRunner | None = None
    group: GroupCoordinator | None = None
    while (command := connection.recv()) is not None:
        answer: object = None
        try:
            match command:
                case ("make", rank, size, address, options):
                    choose_means(options)
                    group = GroupCoordinator.connect(rank, size, address, PATIENCE_S)
                    runner = make_part(group, **options)
                    answer = runner.spec
                case ("follow", batch):
                    assert runner is not None
                    runner.follow(batch)
                case ("close",):
                    if group is not None:
                        group.close()
                    group = runner = None
        except Exception as error:
            answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        connection.send(answer)


def choose_means(options: dict[str, Any]) -> None:
    """Takes the option `without_shared_memory`, with which the ranks use gloo, as those of several machines do."""
    without = options.pop("without_shared_memory", False)
    means = (lambda *_: None) if without else share_memory
    setattr(group_coordinator, "share_memory", means)  # noqa: B010 - it is no public name


def make_part(group: GroupCoordinator, *, num_stages: int = 1, **options: Any) -> TransformersRunner:
    """A rank's runner. The other options are those of `make_runner`."""
    if num_stages == 1:
        return make_runner(ranks=RankGroups(group), **options)
    link, size = PipelineLink.connect(group, num_stages), group.size // num_stages
    return make_runner(ranks=RankGroups(group.divide(size) if size > 1 else None, link), **options)


class RankProcesses:
    """Processes beside the test's own, started when they are needed."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.processes: list[ForkServerProcess] = []

    def _start(self, number: int) -> None:
        context = engine_context()
        while len(self.processes) < number:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def divide(self, size: int, *, own: dict[str, Any] | None = None, **options: Any) -> DividedRunner:
        """A model divided among the test's process and others; `options` are those of `make_part`, and `own` is
        different for the test's process."""
        address = free_address()
        self._start(size - 1)
        others = self.connections[: size - 1]
        for rank, connection in enumerate(others, start=1):
            connection.send(("make", rank, size, address, options))
        return DividedRunner(others, *self._make_own(size, address, options | (own or {})))

    def _make_own(
        self, size: int, address: tuple[str, int], options: dict[str, Any]
    ) -> tuple[TransformersRunner, GroupCoordinator]:
        choose_means(options)
        group = GroupCoordinator.connect(0, size, address, PATIENCE_S)
        try:
            return make_part(group, **options), group
        except BaseException:
            group.close()
            self.answers = [connection.recv() for connection in self.connections[: size - 1]]
            raise

    def stop(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()


class DividedRunner:
    """Rank 0's runner, whose steps the other processes follow."""

    def __init__(self, others: list[Connection], runner: TransformersRunner, group: GroupCoordinator) -> None:
        self.runner, self.group, self._others = runner, group, others
        self.specs = [runner.spec, *(connection.recv() for connection in others)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def execute(self, batch: WorkerBatch) -> StepResult:
        resolved = self.runner.resolve(batch)
        self.send(resolved)
        try:
            return self.runner.execute(resolved)
        finally:
            self.answers = [connection.recv() for connection in self._others]
            assert self.expects_errors or not any(self.answers), self.answers

    expects_errors = False

    def send(self, batch: WorkerBatch) -> None:
        for connection in self._others:
            connection.send(("follow", batch))

    def close(self) -> None:
        self.group.close()
        for connection in self._others:
            connection.send(("close",))
            connection.recv()
