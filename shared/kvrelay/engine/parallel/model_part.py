"""What one rank has of a model: some heads of each layer, some layers, some heads of some layers, or a part of MLPs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kvrelay.engine.fused.weights import OwnModules
from kvrelay.engine.load.model_files import weight_files
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.pipeline import (
    PipelineLink,
    StageHead,
    StagePlan,
    config_of_stage,
    connect_stage,
    drop_absent,
    plan_stage,
)
from kvrelay.engine.parallel.shard_plan import Cut, ShardPlan, plan_mlp_shards, plan_shards
from kvrelay.engine.parallel.sharded_modules import (
    GatheredHead,
    GatheredMlps,
    connect_modules,
    narrow,
    narrow_parameter,
)
from kvrelay.engine.run.attention import UnsupportedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The ranks that load a model together; with none of them, one process has all of it."""

    tensor_parallel: GroupCoordinator | None = None  # the ranks among which heads of this rank's layers are divided
    pipeline: PipelineLink | None = None  # the stages among which layers are divided
    data_parallel: GroupCoordinator | None = None  # the ranks among which MLPs are divided, each with its own requests

    @property
    def all_ranks(self) -> GroupCoordinator | None:
        if self.data_parallel is not None:
            return self.data_parallel
        return self.tensor_parallel if self.pipeline is None else self.pipeline.group

    def in_agreement(self) -> AbstractContextManager[None]:
        """If the body fails on one rank, it fails on all. It has no collectives."""
        return nullcontext() if self.all_ranks is None else self.all_ranks.in_agreement()

    def least(self, count: int) -> int:
        """The least of the ranks' counts."""
        return count if self.all_ranks is None else self.all_ranks.least(count)


ONE_PROCESS = RankGroups()


@dataclass(frozen=True, slots=True)
class PartPlan:
    """`shards`: how the heads of the modules are divided that the stage has; `stage`: how layers are; `mlps`: how MLPs
    alone are. None: they are not."""

    shards: ShardPlan | None = None
    stage: StagePlan | None = None
    mlps: ShardPlan | None = None

    @property
    def narrowing(self) -> ShardPlan | None:
        """Of which parameters the rank has a part; None: it has them whole."""
        return self.mlps if self.shards is None else self.shards

    @property
    def tensor_size(self) -> int:
        """The number of ranks among which heads are divided."""
        return 1 if self.shards is None else self.shards.size

    @property
    def pipeline_size(self) -> int:
        """The number of parts into which layers are divided."""
        return 1 if self.stage is None else self.stage.num_stages

    @property
    def is_divided(self) -> bool:
        """Whether other processes compute a part of each step, for the requests of rank 0."""
        return self.shards is not None or self.stage is not None

    def num_layers(self, total: int) -> int:
        """The number of the rank's layers, of a model with this many."""
        return total if self.stage is None else len(self.stage.own_layers)

    def whole_kv(self, num_layers: int, num_kv_heads: int) -> tuple[int, int]:
        """Layers and KV heads of the whole model, given the rank's."""
        return (
            num_layers if self.stage is None else self.stage.num_layers,
            num_kv_heads if self.shards is None else self.shards.num_kv_heads,
        )

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """The parameters of which the rank has a part."""
        return {} if self.narrowing is None else self.narrowing.cuts

    def has(self, path: str) -> bool:
        """Returns whether the rank has a module or a parameter, or a part of it."""
        return self.stage is None or self.stage.has(path)

    def config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The config of the rank's model."""
        return config if self.stage is None else config_of_stage(config, self.stage)

    def reduce(self, model: PreTrainedModel) -> None:
        """Makes a whole model the rank's part, as far as its parameters go."""
        if self.stage is not None:
            drop_absent(model, self.stage)
        if self.narrowing is not None:
            narrow(model, self.narrowing)

    def log(self) -> None:
        """Logs what the rank has, if that is not all."""
        if (mlps := self.mlps) is not None:
            log.info("data parallelism: rank %d of %d has attention and a part of each MLP", mlps.rank, mlps.size)
        if (stage := self.stage) is not None:
            layers = f"{stage.own_layers.start} to {stage.own_layers.stop - 1} of {stage.num_layers}"
            log.info("pipeline parallelism: stage %d of %d has layers %s", stage.stage, stage.num_stages, layers)
        if (shards := self.shards) is not None:
            heads = f"{shards.local_heads} of {shards.num_heads} attention heads"
            kv_heads = f"{shards.local_kv_heads} of {shards.num_kv_heads} KV heads"
            log.info("tensor parallelism: rank %d of %d has %s and %s", shards.rank, shards.size, heads, kv_heads)


WHOLE = PartPlan()


def plan_part(model: PreTrainedModel, ranks: RankGroups) -> PartPlan:
    """Returns a rank's plan for a whole model. Raises as `plan_place`."""
    heads, link, mlps = ranks.tensor_parallel, ranks.pipeline, ranks.data_parallel
    return plan_place(
        model,
        heads=None if heads is None else (heads.rank, heads.size),
        stage=None if link is None else (link.stage, link.num_stages),
        mlps=None if mlps is None else (mlps.rank, mlps.size),
    )


Place = tuple[int, int]
"""A rank's number among those that divide something, and how many they are."""


def plan_place(
    model: PreTrainedModel, *, heads: Place | None = None, stage: Place | None = None, mlps: Place | None = None
) -> PartPlan:
    """Returns a rank's plan for a whole model, whose parameters may be on the meta device, by what is divided. Raises
    UnsupportedModel if the model cannot be divided like that."""
    if mlps is not None:
        return PartPlan(mlps=plan_mlp_shards(model, *mlps))
    own = None if stage is None else plan_stage(model, *stage)
    shards = None if heads is None else plan_shards(model, *heads)
    if shards is not None and own is not None:
        shards = _within(shards, own)
    return PartPlan(shards, own)


def connect(
    model: PreTrainedModel, plan: PartPlan, ranks: RankGroups
) -> tuple[list[GatheredHead | StageHead], GatheredMlps | None]:
    """Connects a rank's part of a model to those of the others. Returns the heads, which all ranks share until the
    checks of the start have ended, and the MLPs that take all ranks' tokens."""
    heads: list[GatheredHead | StageHead | None] = []
    if plan.shards is not None and ranks.tensor_parallel is not None:
        heads.append(connect_modules(model, plan.shards, ranks.tensor_parallel))
    mlps = GatheredMlps(model, plan.mlps, ranks.data_parallel) if plan.mlps and ranks.data_parallel else None
    if plan.stage is not None and ranks.pipeline is not None:
        heads.append(connect_stage(model, plan.stage, ranks.pipeline))
    return [head for head in heads if head is not None], mlps


def own_modules(plan: PartPlan) -> OwnModules:
    """Returns the modules that the fused kernels compute on a rank."""
    stage, shards, dividing = plan.stage, plan.shards, plan.narrowing
    return OwnModules(
        layers=None if stage is None else stage.own_layers,
        has_embedding=stage is None or stage.is_first,
        has_head=stage is None or stage.is_last,
        adds_biases=shards is None or shards.rank == 0,
        adds_mlp_biases=dividing is None or dividing.rank == 0,
    )


def _within(shards: ShardPlan, stage: StagePlan) -> ShardPlan:
    """Returns the part of a plan for all layers that concerns a stage."""
    return replace(
        shards,
        cuts={path: cut for path, cut in shards.cuts.items() if stage.has(path)},
        row_linears=[path for path in shards.row_linears if stage.has(path)],
        experts=[path for path in shards.experts if stage.has(path)],
        embedding=shards.embedding if stage.has(shards.embedding) else "",
        head=shards.head if stage.has(shards.head) else "",
    )


ModelClass = type[PreTrainedModel]


def narrowed_class(model_class: ModelClass, narrow: Callable[[PreTrainedModel], None]) -> ModelClass:
    """A model class whose instances have a rank's parameters, to which `narrow` reduces a whole model. They are for
    loading: see `restore_class`."""

    def init(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        narrow(self)

    members = {"__init__": init, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), members)


def restore_class(model: PreTrainedModel, model_class: ModelClass) -> None:
    """Makes a model an instance of its own class again."""
    model.__class__ = model_class


def sharded_state_dict(name: str, model: PreTrainedModel, plan: PartPlan) -> dict[str, Any]:
    """The checkpoint's tensors that a rank has, whole or in part. A value `x` is read by `x[...]`. `model` is the whole
    model, on the meta device.

    Raises:
        UnsupportedModel: tensors that cannot be read in part, or of other shapes than the config's.
        OSError: there are no safetensors files.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    targets_of = {pattern: each.target_patterns for each in converters for pattern in each.source_patterns}
    own: dict[str, Any] = model.state_dict()
    state: dict[str, Any] = {}
    for file in weight_files(name):
        tensors: Any = safe_open(file, "pt")
        for key in tensors.keys():  # noqa: SIM118 - it is no mapping
            path, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
            if not plan.has(path):
                continue
            stored = tensors.get_slice(key)
            if (cut := plan.cuts.get(path)) is None:
                state[key] = stored
                continue
            if pattern is not None and len(targets_of[pattern]) > 1:
                raise UnsupportedModel(f"{name}: {key} holds several of the model's tensors, and is not read in part")
            _check_shape(name, key, stored.get_shape(), cut, tuple(own[path].shape))
            state[key] = _StoredPart(stored, cut)
    return state


def _check_shape(name: str, key: str, stored: list[int], cut: Cut, shape: tuple[int, ...]) -> None:
    """Raises UnsupportedModel for a tensor that is neither the model's nor one of those that are packed in it."""
    expected = list(shape[len(shape) - len(stored) :])
    one_of = list(expected)
    one_of[cut.dim] = cut.full
    if stored not in (expected, one_of):
        raise UnsupportedModel(
            f"{name}: 1 tensors have other shapes than its config says, such as {key}: {stored} in the checkpoint, "
            f"{expected} by the config"
        )


class _StoredPart:
    """A rank's part of a stored tensor, which is read like a slice of a safetensors file."""

    def __init__(self, stored: Any, cut: Cut) -> None:
        self._stored, self._cut = stored, cut
        self._shape: list[int] = stored.get_shape()

    def get_shape(self) -> list[int]:
        """The shape of the part."""
        shape = list(self._shape)
        shape[self._cut.dim] = self._cut.padded * (shape[self._cut.dim] // self._cut.full)
        return shape

    def get_dtype(self) -> str:
        """The stored type, by the name that safetensors has for it."""
        stored: str = self._stored.get_dtype()
        return stored

    def __getitem__(self, index: Any) -> torch.Tensor:
        dim = self._cut.dim % len(self._shape)
        before = (slice(None),) * dim

        def read(start: int, stop: int) -> torch.Tensor:
            part: torch.Tensor = self._stored[(*before, slice(start, stop))]
            return part

        return self._cut.of(self._shape[dim], read)[index]


def fill_randomly(
    model: PreTrainedModel,
    device: torch.device,
    seed: int,
    plan: PartPlan,
) -> None:
    """Gives a model on the meta device random weights, of which only the plan's parts stay. Modules that this rank does
    not have are dropped.

    The weights of a module depend on the seed and the module's number alone, so ranks have parts of one model, whatever
    their number. One module at a time is whole in memory.
    """
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(generators), torch.no_grad():
        for number, (path, module) in enumerate(model.named_modules()):
            if not plan.has(path):
                continue
            torch.manual_seed(seed + number)
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)
            for name in list(module._parameters):
                if plan.narrowing is not None and (own := f"{path}.{name}") in plan.cuts:
                    narrow_parameter(module, name, own, plan.narrowing)
    model.tie_weights()
    if plan.stage is not None:
        drop_absent(model, plan.stage)
