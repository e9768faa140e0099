"""A divided model's modules, of which each rank computes a part, and the narrowing of parameters to that part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.shard_plan import ShardPlan


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
    `[..., 0]`, unless `gathers_to_all`."""

    def __init__(self, head: nn.Linear, vocab_size: int, group: GroupCoordinator) -> None:
        super().__init__()
        self.head = head
        self.gathers_to_all = True
        self._vocab_size = vocab_size
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows."""
        return self.head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.head(hidden)
        logits = self._group.gather_columns(part, to_all=self.gathers_to_all)
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
