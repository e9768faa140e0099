"""Keys and values of 8 bits: how they are rounded, what the kernels read of them, and that chunks do not matter."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.backends import cpu_build
from kvrelay.backends.backend import (
    KV_DTYPES,
    AttentionBackend,
    AttentionParams,
    KVLayout,
    PackedRows,
    allocate_pool,
    as_stored,
    bits,
    dtype_name,
)
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.torch_sdpa import TorchBackend
from tests.fakes import fake_flashinfer
from tests.thoroughness import examples
from tests.unit.backends.cases import CPU, AttentionCase

EIGHT_BIT = pytest.mark.parametrize("stored", KV_DTYPES.values(), ids=KV_DTYPES.keys())
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": CpuBackend,
    "torch": TorchBackend,
    "flashinfer": lambda: FlashInferBackend(CPU, fake_flashinfer),
}


def decode(code: int, stored: torch.dtype) -> float:
    """What a code stands for, by the formats' definition (Micikevicius et al., "FP8 formats for deep learning")."""
    mantissa_bits = 3 if stored == torch.float8_e4m3fn else 2
    bias = 7 if stored == torch.float8_e4m3fn else 15
    magnitude = code & 0x7F
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    sign = -1.0 if code & 0x80 else 1.0
    if stored == torch.float8_e4m3fn and magnitude == 0x7F:
        return math.nan
    if stored == torch.float8_e5m2 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    scaled = mantissa if exponent == 0 else mantissa + (1 << mantissa_bits)
    return sign * scaled * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)


def nearest(x: float, stored: torch.dtype) -> float:
    """The finite number of the format that is nearest to `x`; of two, the one whose code is even."""
    finite = {code: decode(code, stored) for code in range(128) if math.isfinite(decode(code, stored))}
    within = min(abs(x), max(finite.values()))
    best = min(finite, key=lambda code: (abs(finite[code] - within), code & 1))
    return math.copysign(finite[best], x)


numbers = st.floats(width=32, allow_nan=False) | st.floats(-600, 600, width=32) | st.floats(-0.0625, 0.0625, width=32)


@EIGHT_BIT
@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(numbers, min_size=1, max_size=20),
    st.lists(st.integers(0, 121), max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_numbers_are_rounded_to_the_nearest_that_there_is(
    stored: torch.dtype, drawn: list[float], codes: list[int], dtype: torch.dtype
) -> None:
    halfway = [(decode(code, stored) + decode(code + 1, stored)) / 2 for code in codes]
    tensor = torch.tensor(drawn + halfway).to(dtype)
    expected = [nearest(x, stored) for x in tensor.double().tolist()]
    assert as_stored(tensor, stored).double().tolist() == expected


@EIGHT_BIT
def test_no_number_becomes_nan_and_nan_stays(stored: torch.dtype) -> None:
    most = torch.finfo(stored).max
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        beyond = torch.tensor([1.04 * most, -1.3 * most, math.inf, -math.inf, math.nan]).to(dtype)
        given = as_stored(beyond, stored).double()
        assert given[:4].tolist() == [most, -most, most, -most]
        assert given[4].isnan()


def test_names_are_those_that_users_know() -> None:
    names = [dtype_name(dtype) for dtype in (*KV_DTYPES.values(), torch.bfloat16)]
    assert names == ["fp8_e4m3", "fp8_e5m2", "bfloat16"]


def values_read(backend: AttentionBackend, stored: torch.dtype) -> torch.Tensor:
    """What attention reads of all 256 codes, as values of one token that has all the weight."""
    pool = allocate_pool(KVLayout(1, 256, 16, 8, torch.float32, stored), 1, CPU)
    rows = PackedRows(np.ones(1, np.int32), np.ones(1, np.int32), np.zeros((1, 1), np.int32))
    bits(pool)[0, 0, 1, :, 0] = torch.arange(256, dtype=torch.uint8)[:, None]
    pool[0, 0, 0, :, 0] = 16.0  # the first token's keys; the second one's are negative
    zeros = torch.zeros(1, 256, 16)
    out = backend.plan(pool, rows).attend(0, zeros + 16, zeros - 16, zeros, AttentionParams(1.0))
    return out[0, :, 0]


@EIGHT_BIT
@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_every_code_is_read_as_what_it_stands_for(name: str, stored: torch.dtype) -> None:
    read = values_read(BACKENDS[name](), stored).double()
    expected = torch.tensor([decode(code, stored) for code in range(256)], dtype=torch.float64)
    finite = expected.isfinite()
    assert torch.equal(read[finite], expected[finite])
    assert not read[~finite].isfinite().any()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_kernel_for_cpus_without_conversion_of_halves_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = tuple(flag for flag in cpu_build._FLAGS if not flag.startswith("-march"))
    monkeypatch.setattr(cpu_build, "_FLAGS", flags)
    built = cpu_build.build_kernel("gcc", tmp_path, link_openmp=not cpu_build._load_torch_openmp())
    monkeypatch.setattr("kvrelay.backends.cpu.load_kernel", lambda: ctypes.CDLL(str(built)))
    plain = CpuBackend()
    for stored in KV_DTYPES.values():
        read, expected = values_read(plain, stored), values_read(TorchBackend(), stored)
        assert torch.equal(read[expected.isfinite()], expected[expected.isfinite()])
        assert not read[~expected.isfinite()].isfinite().any()
        case = AttentionCase([(40, 1), (3, 20), (600, 1)], group=3, head_dim=48, stored=stored, window=30)
        torch.testing.assert_close(case.run(plain)[0], case.run(TorchBackend())[0], atol=2e-5, rtol=0)


@st.composite
def prompts_in_chunks(draw: st.DrawFn) -> tuple[AttentionCase, list[int]]:
    """A prompt behind some cached tokens as one chunk, and where else it may be cut."""
    start, length = draw(st.integers(0, 40)), draw(st.integers(2, 60))
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=5))
    case = AttentionCase(
        [(start, length)],
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 4])),
        head_dim=64,
        block_size=draw(st.sampled_from([8, 16])),
        dtype=torch.bfloat16,
        stored=draw(st.sampled_from(list(KV_DTYPES.values()))),
        window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.none() | st.just(5.0)),
        with_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    case.key *= 300  # some keys beyond the reach of e4m3, so that a few weigh more than all the rest
    return case, sorted({0, length, *cuts})


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=examples(40), deadline=None)
@given(prompts_in_chunks())
def test_a_prompt_in_one_chunk_sees_what_it_sees_in_many(name: str, drawn: tuple[AttentionCase, list[int]]) -> None:
    """A chunk that saw its own keys before they are rounded would be off by 6 percent of a logit of tens."""
    case, cuts = drawn
    backend = BACKENDS[name]()
    whole, whole_pool = case.run(backend)
    pool, parts, position = case.pool.clone(), [], case.rows[0][0]
    for first, last in pairwise(cuts):
        lengths, positions = np.array([last - first], np.int32), np.array([position + first], np.int32)
        step = backend.plan(pool, PackedRows(lengths, positions, case.packed.block_tables))
        query, key, value = (tensor[first:last] for tensor in (case.query, case.key, case.value))
        parts.append(step.attend(case.layer, query, key, value, case.params))
    assert torch.equal(bits(pool), bits(whole_pool))
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-2, rtol=0)
