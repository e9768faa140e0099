"""Keeps the ranks of a group in step if a step fails on rank 0.

Collectives have no tags. If rank 0 left out some of a step's, the other ranks would take those of the next step for
them. So rank 0 counts the parts of a step that all ranks compute (the backbone, then each call of the head), and
computes the missing ones before it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import torch

from kvrelay.engine.run.step_forward import StepForward
from kvrelay.step.batch import DeviceLost


class Lockstep:
    """The parts of the current step."""

    def __init__(self) -> None:
        self._num_begun = self._num_done = 0
        self._forward: StepForward | None = None

    def begin_step(self) -> None:
        """Forgets the step before."""
        self._num_begun = self._num_done = 0
        self._forward = None

    def run(self, part: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Computes a part, and counts it."""
        self._num_begun += 1
        result = part()
        self._num_done += 1
        return result

    def set_forward(self, forward: StepForward) -> None:
        """Keeps the backbone's output for the parts that follow."""
        self._forward = forward

    @property
    def has_begun(self) -> bool:
        """True if this rank has entered a collective of the step."""
        return self._num_begun > 0

    def complete(
        self, error: Exception, compute: Callable[[], StepForward], head: Callable[[torch.Tensor], object]
    ) -> None:
        """Computes what a failed step did not: the backbone, by `compute`, and calls of the head.

        Raises:
            DeviceLost: the step failed inside a part, so other ranks wait in a collective that this one left.
        """
        if self._num_begun != self._num_done:
            raise DeviceLost(f"a step failed between collectives, so the ranks are out of step: {error}") from error
        num_calls = max(0, self._num_done - 1)
        forward = compute() if self._forward is None else self._forward
        inputs: Iterable[torch.Tensor] = forward.head_inputs()
        for hidden in islice(inputs, num_calls, None):
            head(hidden)
