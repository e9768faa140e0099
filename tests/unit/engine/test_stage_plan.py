"""Which layers a stage holds, and which models cannot be divided into stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig

from kvrelay.engine.parallel.pipeline import drop_absent, plan_stage
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.kv.shard_map import layers_of_stage
from tests.tiny_models import DIVIDED
from tests.unit.engine.test_shard_plan import SMALL, on_meta


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
