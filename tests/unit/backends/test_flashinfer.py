"""What is planned for FlashInfer's kernels, held against their documented meaning and attention written out."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.backends import choose_backend
from kvrelay.backends.backend import KV_DTYPES, KVLayout, LayerKind, PackedRows, bits
from kvrelay.backends.choose_backend import WrongAttention, try_layers
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.flashinfer_kernels import num_chunk_rows, page_rows, workspace_bytes
from kvrelay.backends.torch_sdpa import TorchBackend
from tests.fakes import fake_flashinfer
from tests.fakes.flashinfer_signatures import RECORDED, check_call, describe
from tests.thoroughness import examples
from tests.unit.backends.cases import CPU, AttentionCase, dense_attention

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
KINDS = {LayerKind(8, 0.125, None, None), LayerKind(8, 0.125, 20, None), LayerKind(6, 0.3, None, 30.0)}
E5M2 = KV_DTYPES["fp8_e5m2"]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # outputs are means of unit normals, rounded to 8 or 11 bits


def install(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """A FlashInfer that is the fake but for `parts`."""
    known = {name: part for name, part in vars(fake_flashinfer).items() if name == "__version__" or name[0] != "_"}
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**known | parts))


STORED = st.sampled_from([None, *KV_DTYPES.values()])


def make_backend() -> FlashInferBackend:
    return FlashInferBackend(CPU, fake_flashinfer)


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    chunks = draw(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), max_size=3))
    decoding = draw(st.lists(st.integers(0, 130), min_size=0 if chunks else 1, max_size=4))
    return AttentionCase(
        chunks + [(position, 1) for position in decoding],
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3, 4])),
        head_dim=64,
        block_size=draw(st.sampled_from([8, 16, 24])),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        window=draw(st.none() | st.integers(1, 150)),
        softcap=draw(st.none() | st.sampled_from([0.5, 50.0])),
        with_sinks=draw(st.booleans()),
        stored=draw(STORED),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=examples(40), deadline=None)
@given(cases())
def test_agrees_with_attention_written_out(case: AttentionCase) -> None:
    out, pool = case.run(make_backend())
    _, expected_pool = case.run(TorchBackend())
    torch.testing.assert_close(out.double(), dense_attention(case), atol=TOLERANCE[case.dtype], rtol=0)
    assert torch.equal(bits(pool), bits(expected_pool))


def test_a_step_is_planned_once_for_each_kind_of_layer() -> None:
    case = AttentionCase([(0, 20), (40, 1)], head_dim=64, dtype=torch.bfloat16, num_layers=4)
    backend, pool = make_backend(), case.pool.clone()
    wrappers = (fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    before = [wrapper.planned for wrapper in wrappers]
    windowed = AttentionCase([(0, 20), (40, 1)], head_dim=64, dtype=torch.bfloat16, window=7).params
    step = backend.plan(pool, case.packed)
    for layer, params in enumerate([case.params, windowed, case.params, windowed]):
        step.attend(layer, case.query, case.key, case.value, params)
    assert [wrapper.planned - count for wrapper, count in zip(wrappers, before, strict=True)] == [2, 2]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6), st.data())
def test_pages_name_every_block_of_every_row_in_order(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    case = AttentionCase(rows, block_size=16)
    first = data.draw(st.integers(0, len(rows) - 1))
    last = data.draw(st.integers(first + 1, len(rows)))
    paged = page_rows(case.packed, 16).take(first, last)
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
    "change",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float32, "stored": E5M2},
        *({"head_dim": head_dim} for head_dim in (80, 96, 512)),
        {"num_kv_heads": 129},
    ],
    ids=str,
)
def test_what_the_kernels_do_not_know_is_refused_and_left_to_torch(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    layout = dataclasses.replace(LAYOUT, **change)
    assert isinstance(choose_backend.select_backend(torch.device("cuda"), layout), TorchBackend)
    assert f"FlashInfer knows no {layout.dtype} with {layout.num_kv_heads} heads of {layout.head_dim}" in caplog.text
    if layout.stored is not None:
        return  # queries beside 8 bits come with the first layer
    pool = torch.zeros((1, *layout.block_shape), dtype=layout.dtype)
    with pytest.raises(ValueError, match="FlashInfer cannot hold"):
        make_backend().plan(pool, AttentionCase([(0, 1)]).packed)


@given(st.integers(1, 300), st.integers(1, 32), st.integers(1, 71), st.sampled_from([64, 128, 256]))
def test_the_workspace_holds_what_a_plan_sets_aside(num_sms: int, num_kv_heads: int, group: int, head_dim: int) -> None:
    room = workspace_bytes(num_sms, group, head_dim)
    assert room >= fake_flashinfer.reserved_bytes(num_sms, num_kv_heads * group, num_kv_heads, head_dim)


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("BatchPrefillWithPagedKVCacheWrapper.plan", range(8), {"is_causal": True}),
        ("BatchDecodeWithPagedKVCacheWrapper.plan", range(8), {}),  # the positional use that newer releases drop
        ("BatchDecodeWithPagedKVCacheWrapper.run", range(3), {}),
        ("append_paged_kv_cache", range(7), {}),
    ],
)
def test_the_fake_refuses_what_a_release_would_not_take(name: str, args: range, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="FlashInfer 0"):
        check_call(name, *args, **options)


def test_the_recorded_signatures_are_the_installed_ones() -> None:
    real = pytest.importorskip("flashinfer", exc_type=ImportError)
    if real.__version__ not in RECORDED:
        pytest.skip(f"FlashInfer {real.__version__} is not recorded")
    for name, recorded in RECORDED[real.__version__].items():
        owner, _, method = name.partition(".")
        found = getattr(real, owner)
        if method:
            hidden = "_plan_impl" if method == "plan" and hasattr(found, "_plan_impl") else method
            found = getattr(found, hidden)
        assert describe(inspect.signature(found)) == recorded, name


def test_an_installed_flashinfer_takes_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any release: what a mixed step asks of the fake is bound to the real signatures."""
    real = pytest.importorskip("flashinfer", exc_type=ImportError)
    names = list(RECORDED["0.6.0"])
    calls: list[str] = []

    def bind(name: str, *args: Any, **options: Any) -> None:
        owner, _, method = name.partition(".")
        found = getattr(getattr(real, owner), method) if method else getattr(real, owner)
        inspect.signature(found).bind(*([None] if method else []), *args, **options)
        calls.append(name)

    monkeypatch.setattr(fake_flashinfer, "check_call", bind)
    case = AttentionCase([(0, 20), (40, 1)], head_dim=64, dtype=torch.bfloat16)
    case.run(make_backend())
    of_graphs = {name for name in names if name.endswith("reset_workspace_buffer")}
    assert set(calls) == set(names) - of_graphs


# -- batch-invariant attention ----------------------------------------------------------------------------------------


class _Rounding(fake_flashinfer._Wrapper):
    """Each token's result shows on what its bits depend, by the sources of 0.7.2: the tile of queries, the mask, the
    parts of the row, the tiles of keys, and the key at which the first one begins."""

    has_causal_kernel = False

    def run(self, *args: Any, **options: Any) -> Any:
        out, plan = super().run(*args, **options), self._plan
        starts, (page_starts, _, last_page_lens), (num_heads, num_kv_heads, _, page_size) = (
            plan["indptr"].tolist(),
            plan["pages"],
            plan["shape"],
        )
        group, num_rows = num_heads // num_kv_heads, len(last_page_lens)
        mean = starts[-1] * group // num_rows
        tile = 128 if mean > 64 else 64 if mean > 16 else 16
        num_parts = 1 if plan.get("disable_split_kv") else 1 + 8 // num_rows
        for row in range(num_rows):
            num_keys = int(page_starts[row + 1] - page_starts[row] - 1) * page_size + int(last_page_lens[row])
            for token in range(starts[row], starts[row + 1]):
                tile_first = starts[row] + (token - starts[row]) * group // tile * tile // group
                left = num_keys - (starts[row + 1] - tile_first) - plan["window_left"]
                first_key = max(0, left) if plan["window_left"] >= 0 else 0
                shown = (tile, self.has_causal_kernel, num_parts, -(-(num_keys - first_key) // 64), first_key)
                out[token] *= 1 + hash(shown) % 61 / 61
        return out


class _RoundingPrefill(_Rounding, fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    has_causal_kernel = True


class _RoundingDecode(_Rounding, fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    pass


_ROUNDING: dict[str, Any] = {
    "BatchPrefillWithPagedKVCacheWrapper": _RoundingPrefill,
    "BatchDecodeWithPagedKVCacheWrapper": _RoundingDecode,
}


def attend_in_steps(backend: FlashInferBackend, case: AttentionCase, cuts: list[int], *, crowded: bool) -> torch.Tensor:
    """The result of a prompt that is computed up to each of `cuts`, beside its own other sequences or alone."""
    pool, length = case.pool.clone(), cuts[-1]
    parts = []
    for first, last in zip([0, *cuts], cuts, strict=False):
        tokens = [torch.arange(first, last)]
        lens, positions, tables = [last - first], [first], [case.packed.block_tables[0]]
        for row in range(1, len(case.rows) if crowded else 1):
            position, num_tokens = case.rows[row]
            start = int(case.packed.query_starts[row])
            tokens.append(torch.arange(start, start + num_tokens))
            lens.append(num_tokens)
            positions.append(position)
            tables.append(case.packed.block_tables[row])
        rows = PackedRows(np.array(lens, np.int32), np.array(positions, np.int32), np.stack(tables))
        at = torch.cat(tokens)
        step = backend.plan(pool, rows)
        out = step.attend(case.layer, case.query[at], case.key[at], case.value[at], case.params)
        parts.append(out[: last - first])
    assert length == case.rows[0][1]
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 24])
def test_invariant_attention_of_a_token_has_the_same_bits_in_any_step(group: int, window: int | None) -> None:
    length = 150  # keys in three tiles
    others = [(0, 30), (100, 1), (3, 1), (64, 2)]
    case = AttentionCase([(0, length), *others], group=group, head_dim=64, dtype=torch.bfloat16, window=window)
    ways = [([length], False), ([length], True), ([1, 2, 50, 63, 64, 67, 129, length], True)]
    ways.append((list(range(1, length + 1)), False))
    found = {}
    for batch_invariant in (True, False):
        module = SimpleNamespace(**vars(fake_flashinfer) | _ROUNDING)
        backend = FlashInferBackend(CPU, module, batch_invariant=batch_invariant)
        found[batch_invariant] = [attend_in_steps(backend, case, cuts, crowded=crowded) for cuts, crowded in ways]
    assert all(torch.equal(out, found[True][0]) for out in found[True])
    assert not any(torch.equal(out, found[False][0]) for out in found[False][1:]), "the fake shows no difference"


def test_invariant_attention_agrees_with_attention_written_out() -> None:
    case = AttentionCase([(5, 40), (0, 9), (100, 1)], head_dim=64, dtype=torch.bfloat16, window=30, softcap=5.0)
    out, pool = case.run(FlashInferBackend(CPU, fake_flashinfer, batch_invariant=True))
    torch.testing.assert_close(out.double(), dense_attention(case), atol=TOLERANCE[case.dtype], rtol=0)
    assert torch.equal(pool, case.run(TorchBackend())[1])


def test_an_older_flashinfer_is_not_invariant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, __version__="0.7.0.post2")
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), FlashInferBackend)
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS, batch_invariant=True), TorchBackend)
    assert "batch_invariant needs FlashInfer 0.7.1, not 0.7.0.post2" in caplog.text
    install(monkeypatch, __version__="0.10.0")
    assert choose_backend.select_flashinfer(CPU, LAYOUT, KINDS, batch_invariant=True).batch_invariant


# -- flashinfer is tried at the start --------------------------------------------------------------------------------


def test_without_flashinfer_torch_attends_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), TorchBackend)
    assert "FlashInfer cannot be loaded: ModuleNotFoundError" in caplog.text


@pytest.mark.parametrize("stored", [None, *KV_DTYPES.values()])
def test_a_flashinfer_that_passes_the_trial_is_taken(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype | None
) -> None:
    install(monkeypatch)
    layout = dataclasses.replace(LAYOUT, stored=stored)
    assert isinstance(choose_backend.select_flashinfer(CPU, layout, KINDS), FlashInferBackend)


def test_a_flashinfer_without_kernels_for_8_bits_leaves_attention_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Older(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            if options["kv_data_type"] != options["q_data_type"]:
                raise RuntimeError("no kernel for 8-bit keys")
            super().plan(*args, **options)

    install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=Older)
    assert isinstance(
        choose_backend.select_flashinfer(CPU, dataclasses.replace(LAYOUT, stored=E5M2), KINDS), TorchBackend
    )
    assert "FlashInfer does not work: RuntimeError: no kernel for 8-bit keys" in caplog.text
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), FlashInferBackend)


def test_the_trials_workspace_and_wrappers_are_those_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made once, and before memory is profiled."""
    workspaces: list[torch.Tensor] = []  # of each wrapper

    def counted(base: type[Any]) -> type[Any]:
        class Counted(base):  # type: ignore[misc]
            def __init__(self, workspace: torch.Tensor, *arguments: Any, **options: Any) -> None:
                workspaces.append(workspace)
                super().__init__(workspace, *arguments, **options)

        return Counted

    names = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
    parts: dict[str, Any] = {name: counted(getattr(fake_flashinfer, name)) for name in names}
    install(monkeypatch, **parts)
    case = AttentionCase([(0, 20), (100, 1), (90, 1), (95, 1)], head_dim=64, dtype=torch.bfloat16)
    kind = LayerKind(case.num_kv_heads * case.group, case.params.scaling, None, None)
    backend = choose_backend.select_flashinfer(CPU, LAYOUT, {kind})
    assert len(workspaces) == 2, "for chunks, for single tokens"
    assert all(each is workspaces[0] for each in workspaces)
    case.run(backend)
    assert len(workspaces) == 2


class WithoutCompiler(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    """Its prefill kernels came built; those of decoding with a soft cap did not."""

    def plan(self, *args: Any, **options: Any) -> None:
        if options["logits_soft_cap"]:
            raise RuntimeError("Ninja build failed.\n" + "[1/3] nvcc\n" * 200 + "/bin/sh: 1: nvcc: not found")
        super().plan(*args, **options)


def test_kernels_that_cannot_be_built_leave_attention_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=WithoutCompiler)
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), TorchBackend)
    assert "FlashInfer does not work: RuntimeError: Ninja build failed." in caplog.text
    assert caplog.messages[-1].endswith("nvcc: not found")
    assert len(caplog.messages[-1]) < 800
    uncapped = {kind for kind in KINDS if kind.softcap is None}
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, uncapped), FlashInferBackend)


class WithoutNewerKernels(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """Those that FlashInfer takes by itself on the newest GPUs cannot be compiled."""

    def plan(self, *args: Any, **options: Any) -> None:
        if self.options.get("backend", "auto") == "auto":
            raise RuntimeError("Ninja build failed.\nfatal error: curand_kernel.h: No such file or directory")
        super().plan(*args, **options)


def test_where_the_newest_kernels_fail_those_of_older_gpus_compute_chunks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=WithoutNewerKernels)
    monkeypatch.setattr(choose_backend, "_has_kernels_of_its_own", lambda device: True)
    backend = choose_backend.select_flashinfer(CPU, LAYOUT, KINDS)
    assert isinstance(backend, FlashInferBackend)
    assert "kernels for older GPUs: newer ones fail: RuntimeError: Ninja build failed" in caplog.text
    assert "plain torch" not in caplog.text
    case = AttentionCase([(5, 20), (100, 1)], head_dim=64, dtype=torch.bfloat16)
    out, _ = case.run(backend)
    torch.testing.assert_close(out.double(), dense_attention(case), atol=TOLERANCE[case.dtype], rtol=0)


def test_on_gpus_without_newer_kernels_they_are_not_tried_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=WithoutNewerKernels)
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), TorchBackend)
    assert "older GPUs" not in caplog.text
    assert caplog.messages[-1].endswith("curand_kernel.h: No such file or directory")


def test_where_no_kernels_work_attention_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=WithoutCompiler)
    monkeypatch.setattr(choose_backend, "_has_kernels_of_its_own", lambda device: True)
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), TorchBackend)
    assert [("older GPUs" in text, "in plain torch" in text) for text in caplog.messages[-2:]] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("option", [{"window_left": -1}, {"logits_soft_cap": 1.0}, {"sm_scale": 1.0}], ids=str)
def test_kernels_that_compute_something_else_fail_the_trial(option: dict[str, Any]) -> None:
    class Deaf(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            super().plan(*args, **options | option)

    module = SimpleNamespace(**vars(fake_flashinfer) | {"BatchPrefillWithPagedKVCacheWrapper": Deaf})
    with pytest.raises(WrongAttention, match="is off by"):
        try_layers(FlashInferBackend(CPU, module), LAYOUT, KINDS, CPU)


def test_keys_written_elsewhere_fail_the_trial() -> None:
    def append(*args: Any) -> None:
        fake_flashinfer.append_paged_kv_cache(*args)
        args[4][0][0] += 1

    module = SimpleNamespace(**vars(fake_flashinfer) | {"append_paged_kv_cache": append})
    with pytest.raises(WrongAttention, match="written to other places"):
        try_layers(FlashInferBackend(CPU, module), LAYOUT, KINDS, CPU)
