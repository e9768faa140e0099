"""The pieces of the fused decoder layers against the same formulas in torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvrelay.backends.backend import AttentionParams
from kvrelay.backends.cpu_build import KernelBuildError
from kvrelay.engine.fused.kernel import Angles, AngleTable, DecoderKernel
from kvrelay.engine.fused.panels import PackedLinear, pack, unpack
from kvrelay.engine.fused.weights import DecoderWeights, LayerWeights
from tests.thoroughness import examples

DTYPES = st.sampled_from((torch.float32, torch.bfloat16))
EPS = 1e-6


def make_kernel(
    dtype: torch.dtype,
    *,
    num_in: int = 48,
    num_out: int = 20,
    head_dim: int = 32,
    bias: bool = False,
    norms: bool = True,
    intermediate: int = 24,
) -> tuple[DecoderKernel, DecoderWeights]:
    generator = torch.Generator().manual_seed(num_in * 1000 + num_out)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def linear(*rows: int, columns: int) -> PackedLinear:
        weights = [random(count, columns).to(dtype) for count in rows]
        biases = [random(count).to(dtype) for count in rows] if bias else None
        return pack(weights, biases, gated=len(rows) == 2)

    heads, kv_heads = 3, 1
    layer = LayerWeights(
        input_norm=random(num_in),
        qkv=linear((heads + 2 * kv_heads) * head_dim, columns=num_in),
        query_norm=random(head_dim) if norms else None,
        key_norm=random(head_dim) if norms else None,
        attention=AttentionParams(head_dim**-0.5),
        output=linear(num_in, columns=heads * head_dim),
        mlp_norm=random(num_in),
        gate_up=linear(intermediate, intermediate, columns=num_in),
        down=linear(num_in, columns=intermediate),
    )
    rotary = cast("Any", SimpleNamespace())
    embedding = random(num_out, num_in).to(dtype)
    weights = DecoderWeights(
        *(dtype, embedding, (layer,), random(num_in), linear(num_out, columns=num_in), rotary, EPS, heads, kv_heads),
        *(head_dim, intermediate),
    )
    try:
        return DecoderKernel(weights), weights
    except KernelBuildError as error:
        pytest.skip(str(error))


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """To the rounding of `dtype`, in relation to the largest value."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    scale = float(expected.float().abs().max()) or 1.0
    assert float((found.float() - expected.float()).abs().max()) <= tolerance * scale


def product(packed: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """In float64, of the weights as they were before they were packed."""
    sizes = [packed.num_out // 2] * 2 if packed.gated else [packed.num_out]
    weight = torch.cat(unpack(packed, sizes))
    bias = None
    if packed.bias is not None:
        halves = packed.bias.view(-1, 2, 16)
        parts = [halves[:, half].flatten()[: sizes[0]] for half in range(2)] if packed.gated else [packed.bias]
        bias = torch.cat(parts)[: packed.num_out].double()
    return functional.linear(x.double(), weight.double(), bias)


@settings(max_examples=examples(60))
@given(
    dtype=DTYPES,
    num_tokens=st.one_of(st.integers(1, 40), st.sampled_from((384, 385, 500))),
    num_in=st.one_of(st.integers(1, 150), st.sampled_from((512, 513, 1030))),
    num_out=st.integers(1, 75),
    bias=st.booleans(),
    to_float=st.booleans(),
)
def test_products_of_any_shape(
    dtype: torch.dtype, num_tokens: int, num_in: int, num_out: int, bias: bool, to_float: bool
) -> None:
    kernel, weights = make_kernel(dtype, num_in=num_in, num_out=num_out, bias=bias)
    x = torch.randn(num_tokens, num_in).to(dtype)
    out = kernel.products.linear(weights.linears[-1], x, torch.float32 if to_float else None)
    assert out.dtype == (torch.float32 if to_float else dtype)
    assert_close(out, product(weights.linears[-1], x), out.dtype)


@settings(max_examples=examples(30))
@given(dtype=DTYPES, num_tokens=st.integers(1, 30), intermediate=st.integers(1, 70), bias=st.booleans())
def test_gated_activation(dtype: torch.dtype, num_tokens: int, intermediate: int, bias: bool) -> None:
    kernel, weights = make_kernel(dtype, intermediate=intermediate, bias=bias)
    x = torch.randn(num_tokens, 48) * 10
    x[0] = 0.0
    x = x.to(dtype)
    gate, up = product(weights.layers[0].gate_up, x).split(intermediate, dim=1)
    assert_close(kernel.products.linear(weights.layers[0].gate_up, x), functional.silu(gate) * up, dtype)


@settings(max_examples=examples(20))
@given(dtype=DTYPES, others=st.sampled_from((0, 1, 3, 7, 30, 400)), threads=st.sampled_from((1, 2)))
def test_a_product_does_not_depend_on_the_batch_or_the_threads(dtype: torch.dtype, others: int, threads: int) -> None:
    kernel, weights = make_kernel(dtype, num_in=100, num_out=70)
    x = torch.randn(others + 1, 100).to(dtype)
    alone = kernel.products.linear(weights.linears[-1], x[-1:].contiguous(), torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = kernel.products.linear(weights.linears[-1], x, torch.float32)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone[0], together[-1])


@settings(max_examples=examples(30))
@given(
    dtype=DTYPES,
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    num_in=st.integers(1, 70),
    gated=st.booleans(),
)
def test_packed_weights_come_back_bit_by_bit(dtype: torch.dtype, sizes: list[int], num_in: int, gated: bool) -> None:
    sizes = [sizes[0]] * 2 if gated else sizes
    weights = [torch.randn(size, num_in).to(dtype) for size in sizes]
    packed = pack(weights, None, gated=gated)
    assert all(map(torch.equal, unpack(packed, sizes), weights))


@settings(max_examples=examples(30))
@given(dtype=DTYPES, num_in=st.integers(1, 70), num_tokens=st.integers(1, 70), tied=st.booleans())
def test_embeddings_are_rows_of_the_table_or_of_the_tied_head(
    dtype: torch.dtype, num_in: int, num_tokens: int, tied: bool
) -> None:
    table = torch.randn(num_tokens, num_in).to(dtype)
    _, weights = make_kernel(dtype, num_in=num_in, num_out=num_tokens)
    embedding = {"embedding": None, "head": pack([table], None)} if tied else {"embedding": table}
    kernel = DecoderKernel(replace(weights, **embedding))
    token_ids = torch.randint(0, num_tokens, (9,))
    assert torch.equal(kernel.embed(token_ids), table[token_ids].float())
    for beyond in (-1, num_tokens):
        with pytest.raises(IndexError, match=f"beyond the {num_tokens}"):
            kernel.embed(torch.tensor([0, beyond]))


@settings(max_examples=examples(30))
@given(dtype=DTYPES, num_tokens=st.integers(1, 9), size=st.integers(1, 70), adds=st.booleans())
def test_residual_and_norm(dtype: torch.dtype, num_tokens: int, size: int, adds: bool) -> None:
    kernel, weights = make_kernel(dtype, num_in=size)
    hidden = torch.randn(num_tokens, size) * 3
    delta = torch.randn(num_tokens, size).to(dtype) if adds else None
    expected = hidden.double() + (0 if delta is None else delta.double())
    normed = torch.full((num_tokens, size), torch.nan, dtype=dtype)
    kernel.add_and_norm(hidden, delta, weights.layers[0].input_norm, normed)
    scale = torch.rsqrt(expected.pow(2).mean(-1, keepdim=True) + EPS)
    assert_close(hidden, expected, torch.float32)
    assert_close(normed, expected * scale * weights.layers[0].input_norm.double(), dtype)


@settings(max_examples=examples(30))
@given(dtype=DTYPES, num_tokens=st.integers(1, 6), head_dim=st.sampled_from((16, 32, 48, 64, 128)), norms=st.booleans())
def test_queries_and_keys_are_normed_and_rotated_and_values_are_not(
    dtype: torch.dtype, num_tokens: int, head_dim: int, norms: bool
) -> None:
    kernel, weights = make_kernel(dtype, head_dim=head_dim, norms=norms)
    qkv = torch.randn(num_tokens, 5, head_dim).to(dtype)
    table, rows = torch.randn(num_tokens + 3, head_dim // 2), torch.randint(0, num_tokens + 3, (num_tokens,))
    found = qkv.clone().view(num_tokens, -1)
    kernel.norm_and_rotate(0, found, Angles(table.cos(), table.sin(), rows))
    angles = table[rows]
    expected, layer = qkv.double(), weights.layers[0]
    if layer.query_norm is not None and layer.key_norm is not None:
        normed = expected * torch.rsqrt(expected.pow(2).mean(-1, keepdim=True) + EPS)
        scales = torch.stack([layer.query_norm] * 3 + [layer.key_norm] + [torch.ones(head_dim)]).double()
        expected = torch.cat([(normed * scales)[:, :4], expected[:, 4:]], dim=1)
    left, right = expected[:, :4].chunk(2, dim=-1)
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    assert_close(found.view(num_tokens, 5, head_dim)[:, :4], rotated, dtype)
    assert torch.equal(found.view(num_tokens, 5, head_dim)[:, 4], qkv[:, 4])


# -- the table of rotary angles against the module that it asks ------------------------------------------------------


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


def test_angles_are_the_same_bits_however_the_table_grew() -> None:
    grown = AngleTable(rotary("yarn"), HALF)
    for position in (3, 5_000, 40_000):
        grown.at(torch.tensor([position]))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        angles = AngleTable(rotary("yarn"), HALF).at(torch.tensor([40_000]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(grown.at(torch.tensor([0])).cos, angles.cos)
    assert torch.equal(grown.at(torch.tensor([0])).sin, angles.sin)


def test_positions_that_were_seen_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = rotary("default"), []
    forward = module.forward

    def counted(x: torch.Tensor, positions: torch.Tensor) -> object:
        seen.extend(positions[0].tolist())
        return forward(x, positions)

    monkeypatch.setattr(module, "forward", counted)
    table = AngleTable(module, HALF)
    for position in (0, 7, 2047, 2048, 4095, 3000):
        table.at(torch.tensor([position]))
    assert seen == [*range(4096)]
