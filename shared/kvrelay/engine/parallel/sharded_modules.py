"""A divided model's modules, of which each rank computes a part, and the narrowing of parameters to that part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.shard_plan import ShardPlan
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.step.batch import DeviceLost


class RowParallelLinear(nn.Module):
    """A linear layer over this rank's inputs. The ranks' outputs are summed, and the bias is added once."""

    def __init__(self, linear: nn.Linear, group: GroupCoordinator) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._group = group

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = functional.linear(inputs, self.weight)
        self._group.all_reduce(output)
        return output if self.bias is None else output.add_(self.bias)


class ReducedExperts(nn.Module):
    """Experts of which each rank computes some of the inner columns. The ranks' outputs are summed."""

    def __init__(self, experts: nn.Module, group: GroupCoordinator) -> None:
        super().__init__()
        self.experts = experts
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = self.experts(*args, **kwargs).contiguous()
        self._group.all_reduce(output)
        return output


class VocabParallelEmbedding(nn.Module):
    """Embeddings of which each rank has the rows from `start` on. Rows of other ranks count as zeros in the sum."""

    def __init__(self, embedding: nn.Embedding, start: int, group: GroupCoordinator) -> None:
        super().__init__()
        self.embedding = embedding
        self._start = start
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows."""
        return self.embedding.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = token_ids - self._start
        is_other = (rows < 0) | (rows >= self.embedding.num_embeddings)
        output: torch.Tensor = self.embedding(rows.masked_fill(is_other, 0))
        output = output.masked_fill(is_other[..., None], 0)
        self._group.all_reduce(output)
        return output


class GatheredHead(nn.Module):
    """A head of which each rank computes some of the vocabulary. Rank 0 gets all logits, others get none of them:
    `[..., 0]`. While `is_shared`, all ranks get them, for the checks of a start."""

    def __init__(self, head: nn.Linear, vocab_size: int, group: GroupCoordinator) -> None:
        super().__init__()
        self.head = head
        self.is_shared = True
        self._vocab_size = vocab_size
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows."""
        return self.head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.head(hidden)
        logits = self._group.gather_columns(part, to_all=self.is_shared)
        if logits is None:
            return part[..., :0]
        return logits[..., : self._vocab_size]


def narrow(model: PreTrainedModel, plan: ShardPlan) -> None:
    """Makes a whole model's parameters those of a rank. The parts of parameters on the meta device have no values."""
    for path in plan.cuts:
        owner, _, name = path.rpartition(".")
        narrow_parameter(model.get_submodule(owner), name, path, plan)


def narrow_parameter(module: nn.Module, name: str, path: str, plan: ShardPlan) -> None:
    """Narrows one parameter, with the facts that its module keeps about it."""
    parameter = module._parameters[name]
    assert parameter is not None
    part = plan.cuts[path].of_tensor(parameter.detach())
    module._parameters[name] = nn.Parameter(part, requires_grad=False)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.padding_idx = module.weight.shape[0], None


def connect_modules(model: PreTrainedModel, plan: ShardPlan, group: GroupCoordinator) -> GatheredHead | None:
    """Puts the modules with collectives in the place of those whose outputs are partial. Returns the head, if the rank
    has a part of it."""
    modules: dict[str, Any] = dict(model.named_modules())
    replaced: dict[str, nn.Module] = {path: RowParallelLinear(modules[path], group) for path in plan.row_linears}
    replaced |= {path: ReducedExperts(modules[path], group) for path in plan.experts}
    head = None
    if plan.embedding:
        start = plan.cuts[f"{plan.embedding}.weight"].start
        replaced[plan.embedding] = VocabParallelEmbedding(modules[plan.embedding], start, group)
    if plan.head:
        head = replaced[plan.head] = GatheredHead(modules[plan.head], plan.vocab_size, group)
    for path, module in replaced.items():
        model.set_submodule(path, module)
    for module in modules.values():
        _set_heads(module, plan)
    return head


def _set_heads(module: nn.Module, plan: ShardPlan) -> None:
    """Sets the numbers of heads that attention modules keep beside their weights."""
    own = {
        "num_heads": (plan.num_heads, plan.local_heads),
        "num_attention_heads": (plan.num_heads, plan.local_heads),
        "num_key_value_heads": (plan.num_kv_heads, plan.local_kv_heads),
    }
    for name, (full, local) in own.items():
        if module.__dict__.get(name) == full:
            setattr(module, name, local)
    if "num_key_value_groups" in module.__dict__:
        module.num_key_value_groups = plan.local_heads // plan.local_kv_heads  # type: ignore[assignment]


class FusedMlps(Protocol):
    """MLPs whose weights the fused kernels have in place of the modules: a `FusedForward`."""

    def run_mlps(self, counts: Sequence[int]) -> None: ...
    def run_mlp(self, index: int, normed: torch.Tensor) -> torch.Tensor: ...


class GatheredMlps:
    """The MLPs of a model whose tokens are divided among ranks, and how far the current forward has come in them."""

    def __init__(self, model: PreTrainedModel, plan: ShardPlan, group: GroupCoordinator) -> None:
        """Connects the MLPs of a rank's model. Raises UnsupportedModel if the model has no backbone of its own."""
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
        forward for a step without tokens, the remaining MLPs for one that failed. Raises DeviceLost if the step failed
        in a collective, so that the other ranks are out of step."""
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
