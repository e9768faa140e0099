"""Processes of ranks with sequences of their own, which take all steps together."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from msgspec import structs

from kvrelay.engine.make import make_runner
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.model_part import RankGroups
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.protocol.sampling import Sampling
from kvrelay.step.batch import DeviceLost, WorkerBatch
from tests.component.engine.tensor_parallel_ranks import choose_means, engine_context, free_address
from tests.fakes.waiting import PATIENCE_S
from tests.unit.engine.driving import Driven, start


@dataclass(frozen=True)
class Task:
    """What a rank does: computes these prompts, from pass number `begins_at` on, with a failure in some passes.
    `forward`: what computes the layers."""

    prompts: list[list[int]]
    num_output: int
    begins_at: int = 0
    fails: str = ""
    seed: int = 0
    forward: str = ""


def run_ranks(tasks: list[Task], **options: Any) -> list[Any]:
    """The outputs of each rank's prompts, or the text of its error. `options` are those of `make_runner`."""
    context, address = engine_context(), free_address()
    started = []
    for rank, task in enumerate(tasks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, len(tasks), address, task, options), daemon=True)
        process.start()
        theirs.close()
        started.append((ours, process))
    answers = []
    for connection, process in started:
        try:
            answers.append(connection.recv())
        except EOFError:
            answers.append("ended")
        process.join()
    return answers


def _serve(
    connection: Connection, rank: int, size: int, address: tuple[str, int], task: Task, options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    try:
        choose_means(options)
        group = GroupCoordinator.connect(rank, size, address, PATIENCE_S)
        runner = make_runner(ranks=RankGroups(data_parallel=group), num_threads=1, **options)
        assert task.forward in ("", runner._model.forward.name)
        answer: Any = _compute(runner, group, task)
    except DeviceLost as error:
        answer = f"lost: {error}"
    except Exception:
        answer = traceback.format_exc()
    connection.send(answer)


def _compute(runner: TransformersRunner, group: GroupCoordinator, task: Task) -> list[list[int]]:
    sequences = start(runner, task.prompts, Sampling(temperature=0), task.num_output, task.seed)
    rng, number = random.Random(task.seed), 0
    while any(flag for (flag,) in group.exchange([not all(sequence.done for sequence in sequences)])):
        waiting = [sequence for sequence in sequences if not sequence.done] if number >= task.begins_at else []
        if waiting and task.fails and rng.random() < 0.4:
            _fail(runner, waiting, task.fails)
        else:
            _step(runner, waiting, number, rng)
        number += 1
    return [sequence.output for sequence in sequences]


def _step(runner: TransformersRunner, waiting: list[Driven], number: int, rng: random.Random) -> None:
    chosen = [sequence for sequence in waiting if rng.random() < 0.8]
    rows = [sequence.row(rng.randint(1, 24)) for sequence in chosen]
    result = runner.execute(WorkerBatch(number, rows))
    for sequence, row, row_result in zip(chosen, rows, result.rows, strict=True):
        sequence.take(row, row_result)


def _fail(runner: TransformersRunner, waiting: list[Driven], how: str) -> None:
    """A step that fails before the forward, within it, or behind it. The group does not notice."""
    row = structs.replace(waiting[0].row(8), sample=True)
    with _broken(runner, how):
        try:
            if how == "unknown":
                row = structs.replace(row, key=("nobody", 0, 0))
            runner.execute(WorkerBatch(0, [row]))
        except (KeyError, RuntimeError) as error:
            if isinstance(error, DeviceLost):
                raise
        else:
            raise AssertionError(f"it did not fail: {how}")


class _broken:  # noqa: N801 - it reads as a verb
    def __init__(self, runner: TransformersRunner, how: str) -> None:
        self._runner, self._how = runner, how

    def __enter__(self) -> None:
        model, how = self._runner._model, self._how
        if how == "logits":
            setattr(model, "logits", _raise)  # noqa: B010
        if how == "angles":
            model.forward._angles.at = _raise  # type: ignore[attr-defined]
        self._hook = None
        if how in ("layer", "mlp"):
            layer = model.forward._backbone.layers[-1]  # type: ignore[attr-defined]
            self._hook = (layer if how == "layer" else layer.mlp.mlp).register_forward_pre_hook(_raise)

    def __exit__(self, *_: object) -> None:
        if self._how == "logits":
            del self._runner._model.logits
        if self._how == "angles":
            del self._runner._model.forward._angles.at  # type: ignore[attr-defined]
        if self._hook is not None:
            self._hook.remove()


def _raise(*_: object) -> None:
    raise RuntimeError("it fails, as told")


def prompts_of(lengths: tuple[int, ...], vocab_size: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size - 1, length).tolist() for length in lengths]


def flattened(tasks: list[Task], answers: list[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Each prompt with its output."""
    for task, outputs in zip(tasks, answers, strict=True):
        assert isinstance(outputs, list), outputs
        yield from zip(task.prompts, outputs, strict=True)
