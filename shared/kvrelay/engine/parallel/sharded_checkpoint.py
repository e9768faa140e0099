"""Loads one rank's shard of a model, and reads no other weights.

A slice of a safetensors file reads only its elements. transformers converts a checkpoint's tensors to the
model's (it stacks experts, for example), which works for parts of tensors as for whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kvrelay.engine.load.model_files import weight_files
from kvrelay.engine.parallel.shard_plan import Cut, ShardPlan
from kvrelay.engine.parallel.sharded_modules import narrow_parameter
from kvrelay.engine.run.attention import UnsupportedModel

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


def sharded_state_dict(
    name: str, model: PreTrainedModel, cuts: Mapping[str, Cut], has: Callable[[str], bool]
) -> dict[str, Any]:
    """The checkpoint's tensors that a rank `has`, of which those with `cuts` are read in part. A value `x` is read by
    `x[...]`.

    `model` is the whole model, on the meta device. Both are by the path of a parameter.

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
            if not has(path):
                continue
            stored = tensors.get_slice(key)
            if (cut := cuts.get(path)) is None:
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
    plan: ShardPlan | None,
    has: Callable[[str], bool],
) -> None:
    """Gives a model on the meta device random weights, of which only the plan's parts stay. Modules that this rank does
    not have, by their path, remain on that device.

    The weights of a module depend on the seed and the module's number alone, so ranks have parts of one model, whatever
    their number. One module at a time is whole in memory.
    """
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(generators), torch.no_grad():
        for number, (path, module) in enumerate(model.named_modules()):
            if not has(path):
                continue
            torch.manual_seed(seed + number)
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)
            for name in list(module._parameters):
                if plan is not None and (own := f"{path}.{name}") in plan.cuts:
                    narrow_parameter(module, name, own, plan)
    model.tie_weights()
