"""The table of rotary angles against the module that it asks."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvrelay.engine.fused.kernel import AngleTable
from tests.thoroughness import examples

HALF = 16
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
}


def rotary(rope_type: str) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": rope_type, "rope_theta": 1e4} | TYPES[rope_type]
    config = LlamaConfig(
        hidden_size=4 * 2 * HALF, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=parameters
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("rope_type", sorted(TYPES))
@settings(max_examples=examples(10))
@given(
    steps=st.lists(
        st.lists(
            st.one_of(st.integers(0, 10_000), st.sampled_from((2047, 2048, 32767, 32768, 40_000))),
            min_size=1,
            max_size=5,
        ),
        max_size=5,
    )
)
def test_angles_are_those_of_the_module(rope_type: str, steps: list[list[int]]) -> None:
    table, module = AngleTable(rotary(rope_type), HALF), rotary(rope_type)
    for step in steps:
        positions = torch.tensor(step, dtype=torch.int64)
        angles = table.at(positions)
        cos, sin = module(torch.empty(1), positions[None])
        # torch computes the last elements of a tensor by other instructions than the others.
        torch.testing.assert_close(angles.cos[angles.rows], cos[0, :, :HALF], rtol=0, atol=1e-6)
        torch.testing.assert_close(angles.sin[angles.rows], sin[0, :, :HALF], rtol=0, atol=1e-6)


def test_positions_that_were_seen_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = rotary("default"), []
    forward = module.forward

    def counted(x: torch.Tensor, positions: torch.Tensor) -> object:
        calls.append(positions.shape)
        return forward(x, positions)

    monkeypatch.setattr(module, "forward", counted)
    table = AngleTable(module, HALF)
    for position in (0, 7, 2047, 2048, 4095, 3000):
        table.at(torch.tensor([position]))
    assert calls == [(1, 2048), (1, 4096)]
