"""Pipeline parallelism: which layers a stage holds.

The first stage has the embeddings, the last one the final norm and the head. The parts of a model are named by the
pipeline plan of transformers, or else found: the decoder layers are the backbone's only list of that length.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.kv.shard_map import layers_of_stage


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage has of a model. Paths are those of `named_modules`. `norm` is empty if the plan names none.

    `layer_list`: the path of all decoder layers, of which the stage has `own_layers`. `is_tied`: the head's weights are
    those of the embeddings, so the last stage has both.
    """

    stage: int
    num_stages: int
    num_layers: int
    layer_list: str
    embedding: str
    norm: str
    head: str
    is_tied: bool

    @property
    def own_layers(self) -> range:
        return layers_of_stage(self.num_layers, self.stage, self.num_stages)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def absent_layers(self) -> list[int]:
        return [index for index in range(self.num_layers) if index not in self.own_layers]

    @property
    def absent(self) -> tuple[str, ...]:
        """The modules that only other stages have."""
        paths = [f"{self.layer_list}.{index}" for index in self.absent_layers]
        if not self.is_first and not (self.is_last and self.is_tied):
            paths.append(self.embedding)
        if not self.is_last:
            paths += [path for path in (self.norm, self.head) if path]
        return tuple(paths)

    def has(self, path: str) -> bool:
        """Returns whether this stage has a module or a parameter."""
        return not any(path == absent or path.startswith(f"{absent}.") for absent in self.absent)


def config_of_stage(config: PreTrainedConfig, plan: StagePlan) -> PreTrainedConfig:
    """The config of a stage's model: only the last stage has a head that may be tied."""
    own = deepcopy(config)
    for each in (own, own.get_text_config(decoder=True)) if not plan.is_last else ():
        each.tie_word_embeddings = False
    return own


def plan_stage(model: PreTrainedModel, stage: int, num_stages: int) -> StagePlan:
    """Returns the plan of a stage for a whole model, whose parameters may be on the meta device.

    Raises:
        UnsupportedModel: there are fewer layers than stages, or the model's parts are not found.
    """
    config = model.config.get_text_config(decoder=True)
    num_layers, prefix = int(config.num_hidden_layers), model.base_model_prefix
    what = f"{type(model).__name__} with pipeline_parallel_size = {num_stages}"
    if num_layers < num_stages:
        raise UnsupportedModel(f"{what}: it has {num_layers} layers, and each stage needs one")
    backbone = getattr(model, prefix, None)
    if not isinstance(backbone, nn.Module):
        raise UnsupportedModel(f"{what}: it has no backbone under {prefix!r}")
    children = dict(backbone.named_children())
    lists = [name for name, child in children.items() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
    if len(lists) != 1:
        raise UnsupportedModel(f"{what}: its backbone has {len(lists)} lists of {num_layers} layers, and not one")
    paths = {module: path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise UnsupportedModel(f"{what}: its embeddings or its head are no plain table")
    planned = getattr(config, "base_model_pp_plan", None) or {}
    norms = [name for name in planned if name in children and children[name] not in (embedding, children[lists[0]])]
    return StagePlan(
        stage=stage,
        num_stages=num_stages,
        num_layers=num_layers,
        layer_list=f"{prefix}.{lists[0]}",
        embedding=paths[embedding],
        norm=f"{prefix}.{norms[0]}" if len(norms) == 1 else "",
        head=paths[head],
        is_tied=bool(getattr(model.config, "tie_word_embeddings", False)),
    )
