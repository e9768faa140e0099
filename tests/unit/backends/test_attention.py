"""Both CPU backends against attention written out token by token, and the kernel against the fallback."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.backends.backend import KV_DTYPES, AttentionBackend, PackedRows, bits, dtype_name
from kvrelay.backends.cpu import CpuBackend, cut_work
from kvrelay.backends.cpu_build import load_kernel
from kvrelay.backends.torch_sdpa import TorchBackend
from tests.thoroughness import examples
from tests.unit.backends.cases import AttentionCase, dense_attention

# Outputs are means of unit normals; bfloat16 keeps 8 bits of them.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
STORED = [None, *KV_DTYPES.values()]
CHUNK_ROWS = 256
E4M3, E5M2 = KV_DTYPES["fp8_e4m3"], KV_DTYPES["fp8_e5m2"]
MIXED_ROWS = [(0, 1), (0, 37), (15, 1), (16, 1), (33, 20), (70, 1), (47, 2), (0, 16), (5, 3)]


@pytest.fixture(autouse=True, scope="module")
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[CpuBackend, TorchBackend], ids=["cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    chosen: AttentionBackend = request.param()
    return chosen


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(MIXED_ROWS),
        AttentionCase(MIXED_ROWS, window=9),
        AttentionCase(MIXED_ROWS, window=24, softcap=1.5),
        AttentionCase(MIXED_ROWS, with_sinks=True, window=17),
        AttentionCase(MIXED_ROWS, num_kv_heads=1, group=8, head_dim=64, block_size=8),
        AttentionCase(MIXED_ROWS, num_kv_heads=3, group=1, head_dim=128, block_size=48),
        AttentionCase(MIXED_ROWS, group=3, head_dim=80, dtype=torch.bfloat16),
        AttentionCase(MIXED_ROWS, group=5, head_dim=256, dtype=torch.bfloat16, softcap=3.0),
        AttentionCase([(0, 130), (64, 1), (31, 33)], group=4, head_dim=64),
        AttentionCase(MIXED_ROWS, stored=E4M3, group=4, head_dim=64, window=24),
        AttentionCase(MIXED_ROWS, stored=E4M3, dtype=torch.bfloat16, head_dim=128, softcap=1.5),
        AttentionCase(MIXED_ROWS, stored=E5M2, num_kv_heads=1, group=1, head_dim=80, with_sinks=True),
        AttentionCase(MIXED_ROWS, stored=E5M2, dtype=torch.bfloat16, group=9, head_dim=64, block_size=8),
    ],
    ids=lambda case: (
        f"w{case.window}-c{case.softcap}-h{case.num_kv_heads}x{case.group}-d{case.head_dim}"
        + (f"-{dtype_name(case.stored)}" if case.stored else "")
    ),
)
def test_agrees_with_attention_written_out(backend: AttentionBackend, case: AttentionCase) -> None:
    out, _ = case.run(backend)
    torch.testing.assert_close(out.double(), dense_attention(case), atol=TOLERANCE[case.dtype], rtol=0)


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    rows = draw(st.lists(st.tuples(st.integers(0, 1300), st.integers(1, 90)), min_size=1, max_size=5))
    decoding = draw(st.lists(st.integers(0, 2100), max_size=4))
    return AttentionCase(
        rows + [(position, 1) for position in decoding],
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 12])),
        head_dim=draw(st.sampled_from([16, 32, 48, 64, 80, 128, 256])),
        block_size=draw(st.sampled_from([8, 16, 24, 32, 64, 128])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        window=draw(st.none() | st.integers(1, 1500)),
        softcap=draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        with_sinks=draw(st.booleans()),
        stored=draw(st.sampled_from([None, None, E4M3, E5M2])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=examples(60), deadline=None)
@given(cases())
def test_kernel_agrees_with_the_fallback(case: AttentionCase) -> None:
    (ours, our_pool), (theirs, their_pool) = case.run(CpuBackend()), case.run(TorchBackend())
    assert torch.equal(bits(our_pool), bits(their_pool))
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("stored", STORED)
def test_writes_only_the_new_tokens_of_its_layer(backend: AttentionBackend, stored: torch.dtype | None) -> None:
    case = AttentionCase([(13, 9), (40, 1)], block_size=8, stored=stored)
    _, pool = case.run(backend)
    changed = (bits(pool) != bits(case.pool)).any(-1).any(3).nonzero().tolist()
    expected = {
        (int(case.packed.block_tables[row, at // 8]), case.layer, kind, at % 8)
        for row, positions in enumerate([range(13, 22), [40]])
        for at, kind in itertools.product(positions, (0, 1))
    }
    assert {tuple(index) for index in changed} == expected


@pytest.mark.parametrize("stored", STORED)
def test_a_row_depends_on_neither_its_neighbours_nor_the_threads(stored: torch.dtype | None) -> None:
    case = AttentionCase([(1500, 1), (3, 20), (900, 1), (0, 1), (200, 40)], group=4, head_dim=64, stored=stored)
    together, _ = case.run(CpuBackend())
    for row, (position, tokens) in enumerate(case.rows):
        start = int(case.packed.query_starts[row])
        alone = AttentionCase([(position, tokens)], group=4, head_dim=64, stored=stored)
        table = case.packed.block_tables[row : row + 1]
        alone.pool, alone.packed = (
            case.pool,
            PackedRows(np.array([tokens], np.int32), np.array([position], np.int32), table),
        )
        span = slice(start, start + tokens)
        alone.query, alone.key, alone.value = case.query[span], case.key[span], case.value[span]
        torch.set_num_threads(1 + row % 2)
        assert torch.equal(alone.run(CpuBackend())[0], together[span])
    torch.set_num_threads(2)


@st.composite
def cut_rows(draw: st.DrawFn) -> tuple[AttentionCase, list[int]]:
    """A row of some new tokens, and where its chunks begin and end: many of them have one token, as in decoding."""
    case = draw(cases())
    position, tokens = case.rows[0]
    position, tokens = position % 700, draw(st.sampled_from([tokens, 3 * tokens]))
    window = case.window and draw(st.sampled_from([case.window, 1 + case.window % 200]))
    one = AttentionCase(
        [(position, tokens)],
        **{name: getattr(case, name) for name in ("num_kv_heads", "group", "head_dim", "block_size", "dtype")},
        **{name: getattr(case, name) for name in ("softcap", "with_sinks", "stored", "seed")},
        window=window,
    )
    ends = draw(st.sets(st.integers(1, tokens - 1))) if tokens > 1 else set()
    return one, [0, *sorted(ends), tokens]


@settings(max_examples=examples(150), deadline=None)
@given(cut_rows(), st.integers(1, 2))
def test_a_token_gets_the_same_bits_in_a_prompt_in_any_chunk_and_in_decoding(
    cut: tuple[AttentionCase, list[int]], threads: int
) -> None:
    if load_kernel().kvrelay_tiles():
        pytest.skip("by AMX prompts and decoding differ")
    case, ends = cut
    whole, whole_pool = case.run(CpuBackend())
    torch.set_num_threads(threads)
    pool, outputs = case.pool, []
    for begin, end in itertools.pairwise(ends):
        chunk = copy(case)
        position = case.rows[0][0] + begin
        chunk.packed = PackedRows(
            np.array([end - begin], np.int32), np.array([position], np.int32), case.packed.block_tables
        )
        chunk.query, chunk.key, chunk.value = (each[begin:end] for each in (case.query, case.key, case.value))
        chunk.pool = pool
        output, pool = chunk.run(CpuBackend())
        outputs.append(output)
    torch.set_num_threads(2)
    assert torch.equal(bits(pool), bits(whole_pool))
    assert torch.equal(torch.cat(outputs), whole)


@pytest.mark.parametrize("stored", STORED)
def test_strides_of_transposed_heads_are_read(backend: AttentionBackend, stored: torch.dtype | None) -> None:
    case = AttentionCase(MIXED_ROWS, stored=stored)
    straight, _ = case.run(backend)
    for name in ("query", "key", "value"):
        tensor = getattr(case, name)
        setattr(case, name, tensor.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(case.run(backend)[0], straight)


@pytest.mark.parametrize("stored", STORED)
def test_nan_in_a_key_reaches_those_who_see_it_and_no_other_row(
    backend: AttentionBackend, stored: torch.dtype | None
) -> None:
    case = AttentionCase([(40, 1), (40, 30)], window=24, stored=stored)
    case.pool[case.packed.block_tables[1, 1], case.layer, 0, :, 4] = float("nan")  # position 20 of the second row
    out, _ = case.run(backend)
    bad = out.isnan().flatten(1).any(1).tolist()
    assert not bad[0] and all(bad[1:5])


@pytest.mark.parametrize("stored", STORED)
def test_stale_slots_past_the_end_are_never_read(backend: AttentionBackend, stored: torch.dtype | None) -> None:
    case = AttentionCase([(3, 1), (17, 12)], stored=stored)
    for row, end in ((0, 4), (1, 29)):
        case.pool[case.packed.block_tables[row, end // 16], ..., end % 16 :, :] = float("nan")
    assert not case.run(backend)[0].isnan().any()


def test_large_scores_do_not_overflow(backend: AttentionBackend) -> None:
    case = AttentionCase([(100, 1), (40, 40)])
    case.query *= 1e4
    assert case.run(backend)[0].isfinite().all()


def test_pieces_of_a_step_cover_every_query_head_and_key_once() -> None:
    rows = [(1499, 1), (0, 77), (511, 1), (512, 1), (9, 2)]
    packed = AttentionCase(rows, num_kv_heads=4).packed
    for num_threads in (1, 64):
        work = cut_work(packed, num_kv_heads=4, group=2, num_threads=num_threads)
        seen = np.zeros((len(rows), 4, 77, 1500), np.int32)
        for item in work.items:
            heads, queries = slice(item["head_begin"], item["head_end"]), slice(item["query_begin"], item["query_end"])
            seen[item["row"], heads, queries, item["key_begin"] : item["key_end"]] += 1
        for row, (position, tokens) in enumerate(rows):
            for i in range(tokens):
                assert (seen[row, :, i, : position + i + 1] == 1).all()
            assert not seen[row, :, tokens:].any()


@settings(max_examples=examples(60))
@given(
    rows=st.lists(st.tuples(st.integers(0, 2000), st.one_of(st.just(1), st.integers(1, 300))), min_size=1, max_size=9),
    num_kv_heads=st.sampled_from((1, 2, 3, 8)),
    group=st.sampled_from((1, 2, 7, 97)),
    num_threads=st.integers(1, 9),
)
def test_steps_are_cut_as_by_the_slow_way(
    rows: list[tuple[int, int]], num_kv_heads: int, group: int, num_threads: int
) -> None:
    positions, query_lens = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    packed = PackedRows(query_lens, positions, np.zeros((len(rows), 1), np.int32))
    work = cut_work(packed, num_kv_heads, group, num_threads)
    items, split_rows, num_partials = cut_slowly(rows, num_kv_heads, group, num_threads)
    assert work.items.tolist() == items
    assert work.split_rows.tolist() == split_rows
    assert work.num_partials == num_partials
    padded = [(-(-(end - begin) * group // 8) * 8, to - first) for _, first, to, begin, end, *_ in items]
    assert work.max_rows == max(count for count, _ in padded)
    assert work.max_states == max(count * heads for count, heads in padded)


Cut = tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]


def cut_slowly(rows: list[tuple[int, int]], num_kv_heads: int, group: int, num_threads: int) -> Cut:
    """Items, rows of several pieces, and the number of partial results."""
    decoding = [group <= CHUNK_ROWS and tokens == 1 for _, tokens in rows]
    num_pieces = sum(-(-(position + 1) // 512) for (position, _), alone in zip(rows, decoding, strict=True) if alone)
    parts = [each for each in range(1, num_kv_heads + 1) if num_kv_heads % each == 0]
    heads = num_kv_heads // next((each for each in parts if num_pieces * each >= 2 * num_threads), num_kv_heads)
    items: list[tuple[int, ...]] = []
    split_rows: list[tuple[int, ...]] = []
    num_partials, tile = 0, max(1, CHUNK_ROWS // group)
    for row, (position, tokens) in enumerate(rows):
        for begin in range(0, 0 if decoding[row] else tokens, tile):
            end = min(begin + tile, tokens)
            items += [(row, head, head + 1, begin, end, 0, position + end, -1) for head in range(num_kv_heads)]
    for row, (position, _) in enumerate(rows):
        starts = range(0, position + 1, 512) if decoding[row] else range(0)
        several = len(starts) > 1
        for piece, start in enumerate(starts):
            for head in range(0, num_kv_heads, heads):
                partial = num_partials + (piece * num_kv_heads + head) * group if several else -1
                items.append((row, head, head + heads, 0, 1, start, min(start + 512, position + 1), partial))
        if several:
            split_rows.append((row, len(starts), num_partials))
            num_partials += len(starts) * num_kv_heads * group
    items.sort(key=lambda item: -(item[6] - item[5]) * (item[4] - item[3]) * (item[2] - item[1]))
    return items, split_rows, num_partials


def test_kernel_refuses_what_it_does_not_know() -> None:
    unknown: list[dict[str, Any]] = [{"head_dim": 40}, {"dtype": torch.float16}, {"head_dim": 272}]
    for options in unknown:
        case = AttentionCase([(0, 1)], **options)
        with pytest.raises(ValueError, match="cannot hold"):
            CpuBackend().plan(case.pool, case.packed)
        assert case.run(TorchBackend())[0].isfinite().all()
    case = AttentionCase([(0, 1)], dtype=torch.float16, stored=E4M3)  # of which the kernel learns with the first layer
    with pytest.raises(ValueError, match=r"knows no queries of torch\.float16"):
        case.run(CpuBackend())
    assert case.run(TorchBackend())[0].isfinite().all()
