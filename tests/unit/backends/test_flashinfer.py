"""What is planned for FlashInfer's kernels, held against their documented meaning and attention written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.backends import select
from kvrelay.backends.base import PackedRows
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.paging import num_chunk_rows, page_rows
from kvrelay.backends.torch_sdpa import TorchBackend
from tests.fakes import fake_flashinfer
from tests.unit.backends.cases import CPU, Case, dense_attention

pytestmark = pytest.mark.unit
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # outputs are means of unit normals, rounded to 8 or 11 bits


def make_backend() -> FlashInferBackend:
    return FlashInferBackend(CPU, fake_flashinfer)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chunks = draw(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), max_size=3))
    decoding = draw(st.lists(st.integers(0, 130), min_size=0 if chunks else 1, max_size=4))
    return Case(
        chunks + [(position, 1) for position in decoding],
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3, 4])),
        head_dim=64,
        block_size=draw(st.sampled_from([8, 16, 24])),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        window=draw(st.none() | st.integers(1, 150)),
        softcap=draw(st.none() | st.sampled_from([0.5, 50.0])),
        with_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=40, deadline=None)
@given(cases())
def test_agrees_with_attention_written_out(case: Case) -> None:
    out, pool = case.run(make_backend())
    _, expected_pool = case.run(TorchBackend())
    torch.testing.assert_close(out.double(), dense_attention(case), atol=TOLERANCE[case.dtype], rtol=0)
    assert torch.equal(pool, expected_pool)


def test_a_step_is_planned_once_for_each_kind_of_layer() -> None:
    case = Case([(0, 20), (40, 1)], head_dim=64, dtype=torch.bfloat16, num_layers=4)
    backend, pool = make_backend(), case.pool.clone()
    wrappers = (fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    before = [wrapper.planned for wrapper in wrappers]
    windowed = Case([(0, 20), (40, 1)], head_dim=64, dtype=torch.bfloat16, window=7).params
    step = backend.plan(pool, case.packed)
    for layer, params in enumerate([case.params, windowed, case.params, windowed]):
        step.attend(layer, case.query, case.key, case.value, params)
    assert [wrapper.planned - count for wrapper, count in zip(wrappers, before, strict=True)] == [2, 2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6), st.data())
def test_pages_name_every_block_of_every_row_in_order(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    case = Case(rows, block_size=16)
    first = data.draw(st.integers(0, len(rows) - 1))
    last = data.draw(st.integers(first + 1, len(rows)))
    paged = page_rows(case.packed, first, last, 16)
    assert paged.num_rows == last - first
    for index in range(first, last):
        position, num_tokens = rows[index]
        row, length = index - first, position + num_tokens
        pages = paged.page_ids[paged.page_starts[row] : paged.page_starts[row + 1]].tolist()
        assert pages == case.packed.block_tables[index, : -(-length // 16)].tolist()
        assert (len(pages) - 1) * 16 + paged.last_page_lens[row] == length
        assert paged.query_starts[row + 1] - paged.query_starts[row] == num_tokens


@pytest.mark.parametrize(
    ("lengths", "expected"), [([1], 0), ([5], 1), ([5, 1, 1], 1), ([1, 5, 1], 2), ([1, 1], 0), ([3, 4], 2)]
)
def test_decoding_rows_are_those_behind_the_last_chunk(lengths: list[int], expected: int) -> None:
    zeros = np.zeros(len(lengths), np.int32)
    rows = PackedRows(np.array(lengths, np.int32), zeros, zeros[:, None])
    assert num_chunk_rows(rows) == expected


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 80), (torch.float16, 96), (torch.bfloat16, 512)]
)
def test_what_the_kernels_do_not_know_is_refused_and_left_to_torch(
    dtype: torch.dtype, head_dim: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(select.select_backend(torch.device("cuda"), dtype, head_dim), TorchBackend)
    assert str(dtype) in caplog.text
    case = Case([(0, 1)], head_dim=head_dim, dtype=dtype)
    with pytest.raises(ValueError, match=str(head_dim)):
        make_backend().plan(case.pool, case.packed)


def test_without_flashinfer_torch_attends_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    assert isinstance(select.select_backend(torch.device("cuda"), torch.bfloat16, 128), TorchBackend)
    assert "FlashInfer cannot be loaded" in caplog.text
