"""Which part of a model a rank or a stage holds, and which models cannot be divided."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvrelay.engine.parallel.pipeline import drop_absent, plan_stage
from kvrelay.engine.parallel.shard_plan import plan_shards
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.kv.shard_map import layers_of_stage
from tests.tiny_models import DIVIDED

SIZES = (1, 2, 4)


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(config))
    return model


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", DIVIDED)
def test_parts_cover_every_parameter(architecture: str, size: int) -> None:
    """Each element is on one rank, or on as many as hold one KV head. Norms and biases of sums are whole everywhere."""
    model = on_meta(DIVIDED[architecture]())
    plans = [plan_shards(model, rank, size) for rank in range(size)]
    copies = max(1, size // plans[0].num_kv_heads)
    for path, parameter in model.named_parameters(remove_duplicate=False):
        cuts = [plan.cuts.get(path) for plan in plans]
        if cuts[0] is None:
            assert cuts == [None] * size
            assert parameter.dim() == 1 or "gate" in path, "a matrix that all ranks have whole is a router"
            continue
        dim, count = cuts[0].dim % parameter.dim(), parameter.shape[cuts[0].dim]
        shape = [1] * parameter.dim()
        shape[dim] = count
        places = torch.arange(1, count + 1).view(shape)  # 0 pads
        parts = [cut.of_tensor(places) for cut in cuts if cut is not None]
        assert {part.numel() for part in parts} == {cuts[0].padded * cuts[0].packed}
        held = torch.bincount(torch.cat(parts, dim).view(-1), minlength=count + 1)[1:]
        expected = copies if path.rpartition(".")[0].endswith(("k_proj", "v_proj")) else 1
        assert held.tolist() == [expected] * count


SMALL: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 64}


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (LlamaConfig(**SMALL, num_attention_heads=6), 4, "6 attention heads do not divide by tensor_parallel_size = 4"),
        (
            LlamaConfig(**SMALL, num_attention_heads=12, num_key_value_heads=4),
            6,
            "4 KV heads do not divide by tensor_parallel_size = 6",
        ),
        (
            LlamaConfig(**SMALL | {"intermediate_size": 98}, num_attention_heads=4),
            4,
            r"gate_proj.weight has 98 columns, which do not divide by tensor_parallel_size = 4",
        ),
        (GPT2Config(n_layer=1, n_embd=48, n_head=4), 2, "no tensor-parallel plan"),
        (GPTNeoXConfig(**SMALL, num_attention_heads=4), 2, "does not divide q_proj, k_proj, v_proj and o_proj"),
        (Olmo2Config(**SMALL, num_attention_heads=4), 2, "styles rowwise_split_input"),
        (Phi3Config(**SMALL, num_attention_heads=4, pad_token_id=0), 2, "styles rowwise_split_input"),
    ],
)
def test_models_that_do_not_divide_are_refused(config: PreTrainedConfig, size: int, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        plan_shards(on_meta(config), 0, size)


# -- which layers a stage holds, and which models cannot be divided into stages --------------------------------------


@given(st.integers(1, 100), st.data())
def test_stages_have_all_layers_in_order(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    stages = [layers_of_stage(num_layers, stage, num_stages) for stage in range(num_stages)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    lengths = [len(stage) for stage in stages]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("architecture", DIVIDED)
def test_each_parameter_is_in_one_stage(architecture: str) -> None:
    """Except embeddings that are the head's weights too, which the first and the last stage have."""
    whole = on_meta(DIVIDED[architecture]())
    num_stages = whole.config.num_hidden_layers
    held: dict[str, list[int]] = {name: [] for name, _ in whole.named_parameters(remove_duplicate=False)}
    for stage in range(num_stages):
        model = on_meta(DIVIDED[architecture]())
        plan = plan_stage(model, stage, num_stages)
        drop_absent(model, plan)
        for name, _ in model.named_parameters(remove_duplicate=False):
            assert plan.has(name)
            held[name].append(stage)
    for name, stages in held.items():
        is_shared = plan.is_tied and name == f"{plan.embedding}.weight"
        assert stages == ([0, num_stages - 1] if is_shared else stages[:1]), name
        assert stages, name
        if ".layers." in name:
            assert stages == [int(name.split(".layers.")[1].split(".")[0])]


def test_a_model_without_a_plan_of_transformers() -> None:
    """Its final norm is not found, and stays on every stage."""
    model = on_meta(GPT2Config(n_embd=48, n_layer=4, n_head=4, vocab_size=64))
    plan = plan_stage(model, 1, 2)
    assert (plan.layer_list, plan.own_layers, plan.norm) == ("transformer.h", range(2, 4), "")


def test_more_stages_than_layers() -> None:
    with pytest.raises(UnsupportedModel, match="pipeline_parallel_size = 4: it has 3 layers"):
        plan_stage(on_meta(LlamaConfig(**{**SMALL, "num_hidden_layers": 3, "num_attention_heads": 4})), 0, 4)
