"""Data-parallel attention: each rank has requests and KV of its own, and a part of each MLP, or of its experts.

All ranks' tokens are gathered before an MLP, each rank computes some of the inner columns for all of them, the outputs
are summed, and each rank keeps the rows of its own tokens. So the ranks take every step together. One without tokens
computes its part of the others' MLPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.shard_plan import ShardPlan
from kvrelay.engine.parallel.sharded_modules import ReducedExperts, RowParallelLinear
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.step.batch import DeviceLost


class FusedMlps(Protocol):
    """MLPs whose weights the fused kernels have in place of the modules: a `FusedForward`."""

    def run_mlps(self, counts: Sequence[int]) -> None: ...
    def run_mlp(self, index: int, normed: torch.Tensor) -> torch.Tensor: ...


class GatheredMlps:
    """The MLPs of a model whose tokens are divided among ranks, and how far the current forward has come in them."""

    def __init__(self, model: PreTrainedModel, plan: ShardPlan, group: GroupCoordinator) -> None:
        """Connects the MLPs of a rank's model.

        Raises:
            UnsupportedModel: the model has no backbone of its own.
        """
        self.group = group
        modules: dict[str, Any] = dict(model.named_modules())
        for path in plan.row_linears:
            model.set_submodule(path, RowParallelLinear(modules[path], group))
        for path in plan.experts:
            model.set_submodule(path, ReducedExperts(modules[path], group))
        self._mlps = [_GatheredMlp(modules[path], self) for path in plan.mlps]
        for path, mlp in zip(plan.mlps, self._mlps, strict=True):
            model.set_submodule(path, mlp)
        backbone = modules.get(model.base_model_prefix)
        if not isinstance(backbone, nn.Module):
            raise UnsupportedModel(f"{type(model).__name__} has no backbone under {model.base_model_prefix!r}")
        backbone.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        weight = model.get_input_embeddings().weight
        assert isinstance(weight, torch.Tensor)
        self._empty = weight.new_empty(0, weight.shape[-1])
        self._counts: list[int] | None = None  # tokens of all ranks in this forward; None: it has not begun
        self._num_entered = self._num_left = 0
        self._fused: FusedMlps | None = None
        self._runs_in_c = False

    def use(self, fused: FusedMlps, *, runs_in_c: bool) -> None:
        """From now on the fused kernels compute the MLPs. `runs_in_c`: those of a step in one call."""
        self._fused, self._runs_in_c = fused, runs_in_c

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, which has one forward or none. Runs what the group computes and the step did not: all of a
        forward for a step without tokens, the remaining MLPs for one that failed.

        Raises:
            DeviceLost: the step failed in a collective, so the other ranks are out of step.
        """
        self._counts = None
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:
            if self._num_entered != self._num_left:
                raise DeviceLost(f"a step failed within an MLP, so the ranks are out of step: {error}") from error
            self._complete()
            raise
        else:
            self._complete()

    def _complete(self) -> None:
        counts = self.begin(0) if self._counts is None else self._counts
        if not sum(counts):
            return
        if self._fused is not None and self._runs_in_c:
            if not self._num_left:
                self._fused.run_mlps(counts)
            return
        missing = self._empty.new_zeros(counts[self.group.rank], self._empty.shape[-1])
        for index in range(self._num_left, len(self._mlps)):
            if self._fused is None:
                self._mlps[index](missing[None])
            else:
                self._fused.run_mlp(index, missing)

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_ids = args[0] if args else kwargs["input_ids"]
        self.begin(token_ids.numel())

    def begin(self, num_tokens: int) -> list[int]:
        """A forward begins. Returns the numbers of tokens of all ranks."""
        self._num_entered = self._num_left = 0
        self._counts = [count for (count,) in self.group.exchange([num_tokens])]
        return self._counts

    def ended(self) -> None:
        """All MLPs of a forward were computed, in one call."""
        self._num_entered = self._num_left = len(self._mlps)

    def run(self, mlp: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """This rank's rows of an MLP's output for all ranks' tokens. `hidden`: `[tokens, hidden]`."""
        counts, rank = self._counts, self.group.rank
        assert counts is not None
        self._num_entered += 1
        output = mlp(self.group.gather_rows(hidden, counts))
        self._num_left += 1
        first = sum(counts[:rank])
        return output[first : first + counts[rank]]


class _GatheredMlp(nn.Module):
    def __init__(self, mlp: nn.Module, mlps: GatheredMlps) -> None:
        super().__init__()
        self.mlp = mlp
        self._mlps = mlps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self._mlps.run(lambda every: self.mlp(every[None])[0], rows).reshape(hidden.shape)
