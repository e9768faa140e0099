"""Which part of each parameter a rank holds, by the tensor-parallel plan of transformers.

A plan names modules and parameters by patterns, with a style for each. Column-wise layers keep some of their outputs,
row-wise layers some of their inputs, and the sum of the ranks' outputs is the layer's. Each rank has whole heads. If
there are fewer KV heads than ranks, several ranks hold the same KV head.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvrelay.engine.run.attention import UnsupportedModel

_STYLES = frozenset(
    {"colwise", "rowwise", "packed_colwise", "moe_tp_experts", "colwise_gather_output", "embedding_rowwise"}
    | {"replicated_with_grad_allreduce"}
)
_KV_PROJECTIONS = ("k_proj", "v_proj")
_IN_ATTENTION = ".self_attn."
_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_IN_LAYER = re.compile(r".*?\.layers\.\d+\.[^.]+(?=\.)")
_OUTPUTS, _INPUTS = -2, -1  # dimensions of a weight, counted from the end: weights of experts have one more


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements `[start, stop)` along a dimension of a parameter that has `full` of them.

    `dim` is negative. `padded`: zeros follow up to this length. `packed`: so many tensors of equal size lie side by
    side in the parameter, each of which is cut; `full`, `start` and `stop` are of one of them.
    """

    dim: int
    full: int
    start: int
    stop: int
    padded: int
    packed: int = 1

    def of(self, size: int, read: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """The part of a tensor with `size` elements along the dimension: the parameter, or one of those packed in it.

        `read(start, stop)` reads some of them. Raises ValueError if the tensor has another size.
        """
        if size not in (self.full, self.full * self.packed):
            raise ValueError(f"{size} elements in place of {self.full * self.packed}")
        starts = range(0, size, self.full) if self.full else (0,)
        parts = [read(start + self.start, start + self.stop) for start in starts]
        if missing := self.padded - (self.stop - self.start):
            shape = list(parts[0].shape)
            shape[self.dim] = missing
            parts = [torch.cat((part, part.new_zeros(shape)), self.dim) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the part of a tensor. Raises ValueError as `of` does."""
        dim = self.dim % tensor.dim()
        part = self.of(tensor.shape[dim], lambda start, stop: tensor.narrow(dim, start, stop - start))
        return part.clone()


@dataclass(slots=True)
class ShardPlan:
    """What one rank does with a model. Paths are those of `named_modules` and `named_parameters`."""

    rank: int
    size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int = 0
    cuts: dict[str, Cut] = field(default_factory=dict)  # parameters without a cut are whole on each rank
    row_linears: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)  # modules whose outputs are summed
    mlps: list[str] = field(default_factory=list)  # with data-parallel attention: modules that get all ranks' tokens
    embedding: str = ""  # empty, as the head: another rank has it, or each rank the whole of it
    head: str = ""

    @property
    def vocabulary(self) -> range | None:
        """The tokens that this rank embeds; None if another rank does."""
        cut = self.cuts.get(f"{self.embedding}.weight")
        return None if cut is None else range(cut.start, cut.start + cut.padded)

    @property
    def local_heads(self) -> int:
        return self.num_heads // self.size

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.num_kv_heads // self.size)


def plan_shards(model: PreTrainedModel, rank: int, size: int) -> ShardPlan:
    """Returns the plan of a rank for a whole model, whose parameters may be on the meta device. Raises UnsupportedModel
    if the model has no plan or one of unknown styles, or its sizes do not divide."""
    return _Planner(model, rank, size).run()


def check_data_parallel(config: PreTrainedConfig, size: int) -> None:
    """Refuses a model whose MLPs cannot be divided among `size` ranks, from its config alone. Raises UnsupportedModel
    with the reason."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config))
    plan_mlp_shards(model, 0, size)


def plan_mlp_shards(model: PreTrainedModel, rank: int, size: int) -> ShardPlan:
    """Returns the plan of a rank that has a part of each MLP, and all else whole. Raises UnsupportedModel as
    `plan_shards` does."""
    return _MlpPlanner(model, rank, size).run()


class _Planner:
    _SETTING = "tensor_parallel_size"

    def __init__(self, model: PreTrainedModel, rank: int, size: int) -> None:
        text = model.config.get_text_config(decoder=True)
        self._name = type(model).__name__
        self._model, self._rank, self._size = model, rank, size
        num_heads = int(text.num_attention_heads)
        num_kv_heads = int(getattr(text, "num_key_value_heads", None) or num_heads)
        self._plan = ShardPlan(rank, size, num_heads, num_kv_heads)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def run(self) -> ShardPlan:
        styles = self._styles()
        self._check_attention(styles)
        modules = dict(self._model.named_modules())
        for path in (*modules, *self._parameters):
            style = styles.get(re.sub(r"\d+", "*", path))
            if style is not None and path in modules:
                self._add_module(path, modules[path], style)
            elif style is not None:
                self._add_parameter(path, style)
        self._add_vocabulary(modules)
        self._check_complete(modules)
        return self._plan

    def _styles(self) -> dict[str, str]:
        plan: dict[str, str] = dict(getattr(self._model, "tp_plan", None) or {})
        if not plan:
            self._refuse("transformers has no tensor-parallel plan for it")
        if unknown := sorted(set(plan.values()) - _STYLES):
            self._refuse(f"its tensor-parallel plan has the styles {', '.join(unknown)}, which are not supported")
        return plan

    def _check_attention(self, styles: dict[str, str]) -> None:
        leaves = {path.rpartition(".")[2]: style for path, style in styles.items() if _IN_ATTENTION in path}
        if any(leaves.get(leaf) != style for leaf, style in _ATTENTION.items()):
            self._refuse("its tensor-parallel plan does not divide q_proj, k_proj, v_proj and o_proj by heads")
        size, num_heads, num_kv_heads = self._size, self._plan.num_heads, self._plan.num_kv_heads
        if num_heads % size:
            self._refuse(f"{num_heads} attention heads do not divide by tensor_parallel_size = {size}")
        if num_kv_heads % size and size % num_kv_heads:
            self._refuse(f"{num_kv_heads} KV heads do not divide by tensor_parallel_size = {size}, nor does it by them")

    def _add_module(self, path: str, module: torch.nn.Module, style: str) -> None:
        leaf = path.rpartition(".")[2]
        if style == "replicated_with_grad_allreduce":
            return
        if style == "moe_tp_experts":
            self._plan.experts.append(path)
        elif style == "embedding_rowwise":
            self._plan.embedding = path
        elif style == "colwise_gather_output":
            if module is not self._model.get_output_embeddings():
                self._refuse(f"its plan gathers the output of {path}, which is not supported")
        elif not isinstance(module, torch.nn.Linear):
            self._refuse(f"{path} is a {type(module).__name__}, not a linear layer")
        elif style == "rowwise":
            self._plan.row_linears.append(path)
            self._cut(f"{path}.weight", _INPUTS)
        elif leaf in _KV_PROJECTIONS:
            self._cut_kv(path)
        else:
            if style != "colwise":
                self._refuse(f"{path} has the style {style}, which is supported for experts only")
            self._cut(f"{path}.weight", _OUTPUTS)
            self._cut(f"{path}.bias", _INPUTS)

    def _add_parameter(self, path: str, style: str) -> None:
        if style == "packed_colwise":
            self._cut(path, _OUTPUTS, packed=2)
        elif style == "rowwise":
            self._cut(path, _INPUTS)
        else:
            self._refuse(f"the parameter {path} has the style {style}, which is not supported")

    def _cut(self, path: str, dim: int, packed: int = 1) -> None:
        """Gives each rank an equal part of a parameter along `dim`, of each of the `packed` matrices in it."""
        if (parameter := self._parameters.get(path)) is None:  # the layer has no bias
            return
        full, size = parameter.shape[dim] // packed, self._size
        if full % size:
            self._refuse(f"{path} has {full} columns, which do not divide by {self._SETTING} = {size}")
        length = full // size
        self._plan.cuts[path] = Cut(dim, full, self._rank * length, (self._rank + 1) * length, length, packed)

    def _cut_kv(self, path: str) -> None:
        """Cuts by KV heads."""
        plan = self._plan
        first = self._rank * plan.num_kv_heads // self._size
        for name, dim in ((f"{path}.weight", _OUTPUTS), (f"{path}.bias", _INPUTS)):
            if (parameter := self._parameters.get(name)) is None:
                continue
            full = parameter.shape[dim]
            if full % plan.num_kv_heads:
                self._refuse(f"{name} has {full} columns, which are not {plan.num_kv_heads} heads")
            head = full // plan.num_kv_heads
            length = plan.local_kv_heads * head
            plan.cuts[name] = Cut(dim, full, first * head, first * head + length, length)

    def _add_vocabulary(self, modules: dict[str, torch.nn.Module]) -> None:
        """Divides embeddings and head. The last ranks' rows are padded with zeros."""
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        if not isinstance(head, torch.nn.Linear) or not isinstance(embedding, torch.nn.Embedding):
            self._refuse("its embeddings or its head are no plain table")
        paths = {module: path for path, module in modules.items()}
        plan = self._plan
        plan.head, plan.embedding, plan.vocab_size = paths[head], paths[embedding], head.out_features
        for path, dim in ((f"{plan.embedding}.weight", 0), (f"{plan.head}.weight", 0), (f"{plan.head}.bias", 0)):
            if (parameter := self._parameters.get(path)) is not None:
                full = parameter.shape[dim]
                length = -(-full // self._size)
                start = min(full, self._rank * length)
                plan.cuts[path] = Cut(dim - parameter.dim(), full, start, min(full, start + length), length)
        if head.out_features != embedding.num_embeddings:
            self._refuse(f"its head has {head.out_features} outputs for {embedding.num_embeddings} embeddings")

    def _check_complete(self, modules: dict[str, torch.nn.Module]) -> None:
        """Experts whose parameters are not all divided would be summed too often."""
        for path in self._plan.experts:
            for name, _ in modules[path].named_parameters():
                if f"{path}.{name}" not in self._plan.cuts:
                    self._refuse(f"its tensor-parallel plan leaves out the experts' {name}")

    def _refuse(self, reason: str) -> None:
        raise UnsupportedModel(f"{self._name} with {self._SETTING} = {self._size}: {reason}")


class _MlpPlanner(_Planner):
    """Plans for data-parallel attention: of the tensor-parallel plan only MLPs and experts count."""

    _SETTING = "data_parallel_size"

    def run(self) -> ShardPlan:
        styles, modules, plan = self._styles(), dict(self._model.named_modules()), self._plan
        whole = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        for path in (*modules, *self._parameters):
            style = styles.get(re.sub(r"\d+", "*", path))
            if style is None or _IN_ATTENTION in path or modules.get(path) in whole:
                continue
            if path in modules:
                self._add_module(path, modules[path], style)
            else:
                self._add_parameter(path, style)
        self._check_complete(modules)
        found = {path: _IN_LAYER.match(path) for path in (*plan.row_linears, *plan.experts, *plan.cuts)}
        if outside := [path for path, within in found.items() if within is None]:
            self._refuse(f"its plan divides {outside[0]}, which is in no layer's MLP")
        if not plan.row_linears and not plan.experts:
            self._refuse("its tensor-parallel plan divides no MLP")
        plan.mlps = list(dict.fromkeys(within[0] for within in found.values() if within is not None))
        return plan
