"""Reads a model's directory or hub repository, and refuses weights that would load wrongly.

transformers initialises missing weights at random, and reads weights of an unknown quantization as plain numbers. On a
server both would give wrong tokens without any error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from kvrelay.engine.load.stored_weights import SUPPORTED, StoredWeights, stated_quantization
from kvrelay.engine.parallel.model_part import (
    PartPlan,
    RankGroups,
    narrowed_class,
    plan_part,
    restore_class,
    sharded_state_dict,
)
from kvrelay.engine.run.attention import ATTENTION_NAME, UnsupportedModel

_log = logging.getLogger(__name__)
_MAX_NAMED = 4  # tensors in a message
_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
_SCALE = re.compile(r"(?<!\bk_)(?<!\bv_)(?<!\bkv_)scale[^.]*$")  # scales of keys and values are not scales of weights


def read_config(name: str) -> PreTrainedConfig:
    """Reads the config of a directory or a hub name. Code in the repository is not run, and nothing prompts for
    permission.

    Raises:
        UnsupportedModel: transformers cannot make a config of it.
        ValueError: no model type, or one that transformers does not know.
        OSError: there is no such model.
    """
    with refusing(name, "its config cannot be read"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
        for each in (config, config.get_text_config(decoder=True)):
            each.return_dict = True
            each.output_hidden_states = each.output_attentions = False  # not used here, and it takes memory
    return config


def read_model(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Loads the model with all of the checkpoint's weights.

    Raises:
        UnsupportedModel: weights are missing, of other shapes than the config's, unreadable, or quantized in a way that
            transformers does not know or lacks a package for.
        OSError: there are no weights.
    """
    model, unused = _read(AutoModelForCausalLM, name, config, dtype)
    if getattr(config, "quantization_config", None) is None:
        _check_stored(name, unused)
    return model


def read_integer_model(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, weights: StoredWeights
) -> PreTrainedModel:
    """Loads the model with the weights dequantized into plain linear layers. Raises UnsupportedModel as `read_model`
    does."""
    plain = deepcopy(config)
    del plain.quantization_config
    # The state dict's values are computed as they are read, like those of a file.
    return _read(type(_on_meta(plain)), name, plain, dtype, weights.state_dict(dtype))[0]


def read_part(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, ranks: RankGroups
) -> tuple[PreTrainedModel, PartPlan]:
    """Loads the part of the model that a rank has. Returns its plan too.

    Raises:
        UnsupportedModel: the model cannot be divided like that, or as `read_model`.
        OSError: there are no weights in safetensors files.
    """
    whole = _on_meta(config)
    plan = plan_part(whole, ranks)
    with refusing(name, "it cannot be loaded"):
        state = sharded_state_dict(name, whole, plan)
    model, unused = _read(narrowed_class(type(whole), plan.reduce), name, plan.config(config), dtype, state)
    restore_class(model, type(whole))
    _check_stored(name, unused)
    return model, plan


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(config))
    return model


def _read(
    model_class: Any, name: str, config: PreTrainedConfig, dtype: torch.dtype, state: dict[str, Any] | None = None
) -> tuple[PreTrainedModel, Collection[str]]:
    """Loads a model from its files, or from `state`. Returns it, and the names of the tensors that it does not use."""
    options: dict[str, Any] = {} if state is None else {"state_dict": state}
    with refusing(name, "it cannot be loaded"), _without_progress_bars():
        model, loaded = model_class.from_pretrained(
            name if state is None else None,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # `_check_loaded` refuses them by name
            output_loading_info=True,
            **options,
        )
    _check_loaded(name, loaded)
    if state is not None:
        with suppress(OSError):  # many checkpoints have none
            model.generation_config = GenerationConfig.from_pretrained(name)
    return model, loaded["unexpected_keys"]


def check_quantization(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel for a quantization that transformers does not know: it would ignore it."""
    quantization = stated_quantization(config)
    if quantization is None:
        return
    method, content = quantization
    if content.get("load_in_4bit") or content.get("load_in_8bit"):  # the first configs of bitsandbytes do not name it
        return
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{config.model_type}: its weights are quantized by {method!r}, which is not known here. "
            f"Served on a CPU are {SUPPORTED}"
        )


def _check_loaded(name: str, loaded: dict[str, Any]) -> None:
    if mismatched := sorted(loaded["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        raise UnsupportedModel(
            f"{name}: {len(mismatched)} tensors have other shapes than its config says, such as {key}: "
            f"{list(stored)} in the checkpoint, {list(expected)} by the config"
        )
    if loaded.get("error_msgs"):
        raise UnsupportedModel(f"{name}: its weights cannot be loaded: {'; '.join(loaded['error_msgs'])}")
    if missing := loaded["missing_keys"]:
        raise UnsupportedModel(
            f"{name}: the checkpoint lacks {len(missing)} tensors of the model, which would be random: {_some(missing)}"
        )
    if unused := loaded["unexpected_keys"]:
        _log.warning("%s: the model does not use %d tensors of the checkpoint: %s", name, len(unused), _some(unused))


def _check_stored(name: str, unused: Collection[str]) -> None:
    """Raises UnsupportedModel for scaled low-bit weights that the config does not mention. Some tools
    (ModelOpt) describe them in a file of their own."""
    scales = [key for key in unused if _SCALE.search(key)]
    for key, stored in _stored_types(name):
        is_scaled = stored.startswith("F8_") and scales
        if key.endswith("weight") and key not in unused and (is_scaled or stored in _INTEGERS):
            raise UnsupportedModel(f"{name}: {key} holds {stored}, and its config does not say how it is quantized")


def _stored_types(name: str) -> Iterator[tuple[str, str]]:
    """Names and types of the tensors in the checkpoint's safetensors, from their headers."""
    folder = Path(cached_file(name, CONFIG_NAME) or name).parent
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                yield key, tensors.get_slice(key).get_dtype()


def _some(keys: Collection[str]) -> str:
    named = sorted(keys)[:_MAX_NAMED]
    return ", ".join(named) + (", ..." if len(keys) > _MAX_NAMED else "")


@contextmanager
def refusing(name: str, what: str) -> Iterator[None]:
    """Turns other errors of transformers into one that names the file. OSError and ValueError name it already."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModel(f"{name}: {what}: {type(error).__name__}: {reason}") from error


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
