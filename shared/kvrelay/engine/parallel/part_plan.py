"""What one rank has of a model: some heads of each layer, some layers, some heads of some layers, or a part of MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig, PreTrainedModel

from kvrelay.engine.fused.weights import OwnModules
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.shard_plan import Cut, ShardPlan, plan_mlp_shards, plan_shards
from kvrelay.engine.parallel.sharded_modules import narrow
from kvrelay.engine.parallel.stage_link import StageLink
from kvrelay.engine.parallel.stage_modules import drop_absent
from kvrelay.engine.parallel.stage_plan import StagePlan, config_of_stage, plan_stage


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The ranks that load a model together; with none of them, one process has all of it."""

    tensor_parallel: GroupCoordinator | None = None  # the ranks among which heads of this rank's layers are divided
    pipeline: StageLink | None = None  # the stages among which layers are divided
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


WHOLE = PartPlan()


def plan_part(model: PreTrainedModel, ranks: RankGroups) -> PartPlan:
    """Returns a rank's plan for a whole model, whose parameters may be on the meta device.

    Raises:
        UnsupportedModel: the model cannot be divided like that.
    """
    heads, link, mlps = ranks.tensor_parallel, ranks.pipeline, ranks.data_parallel
    if mlps is not None:
        return PartPlan(mlps=plan_mlp_shards(model, mlps.rank, mlps.size))
    stage = None if link is None else plan_stage(model, link.stage, link.num_stages)
    shards = None if heads is None else plan_shards(model, heads.rank, heads.size)
    if shards is not None and stage is not None:
        shards = _within(shards, stage)
    return PartPlan(shards, stage)


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
