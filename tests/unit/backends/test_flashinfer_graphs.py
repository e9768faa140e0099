"""Captured decoding steps through FlashInfer's wrapper for graphs: the same numbers as steps launched one by one."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.backends.backend import (
    KV_DTYPES,
    AttentionParams,
    KVLayout,
    NotCapturable,
    PackedRows,
    allocate_pool,
    bits,
    pad_rows,
    split_rows,
)
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.flashinfer_graphs import FlashInferFixedStep, fixed_workspace_bytes
from kvrelay.backends.flashinfer_kernels import workspace_bytes
from kvrelay.backends.torch_sdpa import TorchBackend
from tests.fakes import fake_cuda_graphs, fake_flashinfer
from tests.fakes.fake_cuda_graphs import FakeRecorder
from tests.thoroughness import examples
from tests.unit.backends.cases import CPU

HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, NUM_BLOCKS, MAX_ROW_BLOCKS = 64, 2, 8, 40, 6
SCRATCH = NUM_BLOCKS
TOLERANCE = 2e-2  # of means of unit normals, rounded to 8 bits


def make_backend(*, batch_invariant: bool = False) -> FlashInferBackend:
    return FlashInferBackend(CPU, fake_cuda_graphs, batch_invariant=batch_invariant)


def make_pool(stored: torch.dtype | None = None) -> torch.Tensor:
    pool = allocate_pool(KVLayout(2, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.bfloat16, stored), NUM_BLOCKS + 1, CPU)
    return pool.copy_(torch.randn(pool.shape))


class Layers:
    """Two layers of different kinds, over fixed tensors, as a model's forward is captured."""

    def __init__(self, step: FlashInferFixedStep, params: list[AttentionParams], num_rows: int, group: int) -> None:
        self.query = torch.zeros(num_rows, NUM_KV_HEADS * group, HEAD_DIM, dtype=torch.bfloat16)
        self.key, self.value = torch.zeros(2, num_rows, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self.out = torch.zeros(2, *self.query.shape, dtype=torch.bfloat16)
        self._step = step
        self._params = params

    def __call__(self) -> None:
        for layer, params in enumerate(self._params):
            self.out[layer].copy_(self._step.attend(layer, self.query, self.key, self.value, params))

    def fill(self) -> None:
        for tensor in (self.query, self.key, self.value):
            tensor.normal_()


@st.composite
def steps(draw: st.DrawFn) -> list[PackedRows]:
    """Steps of one to five rows, some of several tokens, over distinct blocks in any order."""
    found, num_slots = [], MAX_ROW_BLOCKS * BLOCK_SIZE
    for _ in range(draw(st.integers(1, 4))):
        query_lens = np.array(draw(st.lists(st.sampled_from([1, 1, 2, 9]), min_size=1, max_size=5)), np.int32)
        positions = np.array([draw(st.integers(0, num_slots - length)) for length in query_lens.tolist()], np.int32)
        order = draw(st.permutations(range(NUM_BLOCKS)))
        tables = np.array(order[: len(positions) * MAX_ROW_BLOCKS], np.int32).reshape(len(positions), -1)
        found.append(PackedRows(query_lens, positions, tables))
    return found


@settings(max_examples=examples(40), deadline=None)
@given(
    steps(),
    st.sampled_from([1, 4]),
    st.lists(st.none() | st.integers(1, 60), min_size=2, max_size=2),
    st.none() | st.just(20.0),
    st.sampled_from([None, *KV_DTYPES.values()]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_replayed_steps_agree_with_plain_attention(
    steps: list[PackedRows],
    group: int,
    windows: list[int | None],
    softcap: float | None,
    stored: torch.dtype | None,
    batch_invariant: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    pool, recorder = make_pool(stored), FakeRecorder()
    backend = make_backend(batch_invariant=batch_invariant)
    params = [AttentionParams(0.1, window, softcap) for window in windows]
    make_step = backend.fixed_steps(pool, 45, MAX_ROW_BLOCKS)
    no_rows = PackedRows(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((0, 0), np.int32))
    captured = {}
    for size in (45, 8, 4, 2):
        step = make_step(size)
        step.replan(pad_rows(no_rows, size, SCRATCH))
        layers = Layers(step, params, size, group)
        captured[size] = (step, layers, recorder.record(layers))
    for rows in steps:
        count = int(rows.query_lens.sum())
        size = next(size for size in (2, 4, 8, 45) if size >= count)
        step, layers, replay = captured[size]
        expected_pool = pool.clone()
        layers.fill()
        step.replan(pad_rows(split_rows(rows), size, SCRATCH))
        replay()
        plain = TorchBackend().plan(expected_pool, rows)
        for layer in range(2):
            expected = plain.attend(
                layer, layers.query[:count], layers.key[:count], layers.value[:count], params[layer]
            )
            torch.testing.assert_close(layers.out[layer, :count], expected, atol=TOLERANCE, rtol=TOLERANCE)
        written = bits(pool[:SCRATCH])
        assert torch.equal(written, bits(expected_pool[:SCRATCH]))  # padding wrote to the scratch block alone


@settings(max_examples=examples(100), deadline=None)
@given(steps(), st.integers(0, 7))
def test_padding_keeps_the_rows_and_puts_the_rest_in_the_scratch_block(
    steps: list[PackedRows], num_padding: int
) -> None:
    for rows in steps:
        num_rows, num_tokens = len(rows.positions), int(rows.query_lens.sum())
        padded = pad_rows(rows, num_tokens + num_padding, SCRATCH)
        assert padded.query_lens.tolist() == [*rows.query_lens, *[1] * num_padding]
        assert padded.positions[:num_rows].tolist() == rows.positions.tolist()
        assert padded.block_tables[:num_rows].tolist() == rows.block_tables.tolist()
        assert padded.token_blocks(BLOCK_SIZE)[num_tokens:].tolist() == [SCRATCH] * num_padding
        assert not padded.positions[num_rows:].any()


@settings(max_examples=examples(100), deadline=None)
@given(steps())
def test_a_split_step_has_the_same_tokens_at_the_same_places(steps: list[PackedRows]) -> None:
    for rows in steps:
        split = split_rows(rows)
        assert split.query_lens.tolist() == [1] * int(rows.query_lens.sum())
        assert split.positions.tolist() == rows.token_positions.tolist()
        assert split.token_blocks(BLOCK_SIZE).tolist() == rows.token_blocks(BLOCK_SIZE).tolist()
        assert split.block_tables.tolist() == rows.block_tables[rows.token_rows].tolist()


@settings(max_examples=examples(100), deadline=None)
@given(steps(), st.sampled_from([1, 2, 8]))
def test_rows_are_cut_at_multiples_of_a_number_of_tokens(steps: list[PackedRows], num_tokens: int) -> None:
    for rows in steps:
        cut = split_rows(rows, num_tokens)
        assert cut.token_positions.tolist() == rows.token_positions.tolist()
        assert cut.token_blocks(BLOCK_SIZE).tolist() == rows.token_blocks(BLOCK_SIZE).tolist()
        last = cut.positions + cut.query_lens - 1
        assert (cut.positions // num_tokens == last // num_tokens).all()
        assert len(cut.positions) == len(set(zip(rows.token_rows, rows.token_positions // num_tokens, strict=True)))


def test_a_step_too_many_pages_long_is_refused() -> None:
    step = make_backend().fixed_steps(make_pool(), 2, 1)(2)
    rows = PackedRows(np.ones(2, np.int32), np.full(2, 3 * BLOCK_SIZE, np.int32), np.zeros((2, 4), np.int32))
    with pytest.raises(RuntimeError, match="size"):
        step.replan(rows)


def test_sinks_are_not_captured() -> None:
    step = make_backend().fixed_steps(make_pool(), 2, 1)(1)
    step.replan(PackedRows(np.ones(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)))
    tensor = torch.zeros(1, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    with pytest.raises(NotCapturable, match="sinks"):
        step.attend(0, tensor, tensor, tensor, AttentionParams(1.0, sinks=torch.zeros(NUM_KV_HEADS)))


@given(
    st.integers(1, 2000),
    st.integers(1, 300),
    st.integers(1, 32),
    st.integers(4, 71),
    st.sampled_from([64, 128, 256]),
)
def test_the_workspace_holds_what_a_plan_for_graphs_sets_aside(
    num_rows: int, num_sms: int, num_kv_heads: int, group: int, head_dim: int
) -> None:
    """By the source of 0.6.0, whose tiles take the most."""
    tile = 16 if group <= 16 else 128 if group > 64 and head_dim < 256 else 64
    num_tiles = max(2 * num_sms // num_kv_heads, -(-num_rows * group // tile) + num_rows - 1)
    reserved = num_kv_heads * group * num_tiles * tile * (head_dim + 1) * 4
    room = max(
        workspace_bytes(num_sms, group, head_dim), fixed_workspace_bytes(num_rows, num_kv_heads, group, head_dim)
    )
    assert reserved <= room


def test_an_installed_flashinfer_takes_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured step asks of the fake is bound to the real signatures."""
    real = pytest.importorskip("flashinfer", exc_type=ImportError)
    calls: list[str] = []

    def bind(name: str, *args: Any, **options: Any) -> None:
        owner, _, method = name.partition(".")
        found = getattr(getattr(real, owner), method) if method else getattr(real, owner)
        inspect.signature(found).bind(*([None] if method else []), *args, **options)
        calls.append(method)

    for fake in (fake_flashinfer, fake_cuda_graphs):
        monkeypatch.setattr(fake, "check_call", bind)
    for batch_invariant in (False, True):
        calls.clear()
        step = make_backend(batch_invariant=batch_invariant).fixed_steps(make_pool(), 2, 1)(1)
        step.replan(PackedRows(np.ones(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)))
        tensor = torch.zeros(1, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        step.attend(0, tensor, tensor, tensor, AttentionParams(1.0))
        assert {"__init__", "reset_workspace_buffer", "plan", "run", ""} == set(calls)


def test_a_backend_whose_steps_cannot_be_captured_says_so() -> None:
    with pytest.raises(NotCapturable, match="attention by the torch backend depends on the host"):
        TorchBackend().fixed_steps(make_pool(), 2, 1)
