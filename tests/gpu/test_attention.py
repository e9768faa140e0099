"""FlashInfer's kernels on a GPU against plain torch in float32: random steps, windows, soft caps, groups, prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvrelay.backends.backend import (
    AttentionBackend,
    KVLayout,
    LayerKind,
    PackedRows,
    StepAttention,
    allocate_pool,
    as_stored,
    bits,
    split_rows,
)
from kvrelay.backends.choose_backend import select_backend, try_layers
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.torch_sdpa import TorchBackend
from tests.fakes import fake_flashinfer
from tests.gpu.conftest import KERNELS_TIMEOUT_S, skip_without_flashinfer

pytestmark = pytest.mark.timeout(KERNELS_TIMEOUT_S)
# Beside 1 + |expected|: the result, and parts that are merged, are rounded to 8 or 11 bits, weights are as well.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
CAPPED_TOLERANCE = 3e-2  # the fast tanh is off by 2^-11 of a logit, and a weight by as much as its logit
NUM_LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Shape:
    """Layers of a model, and the blocks of its pool."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    block_size: int = 16
    stored: torch.dtype | None = None  # of the pool; None: dtype

    @property
    def layout(self) -> KVLayout:
        return KVLayout(NUM_LAYERS, self.num_kv_heads, self.head_dim, self.block_size, self.dtype, self.stored)

    @property
    def kind(self) -> LayerKind:
        return LayerKind(self.num_heads, self.head_dim**-0.5, self.window, self.softcap)


# Each names a kernel to compile: groups below 4 decode on CUDA cores, others on tensor cores.
SHAPES = {
    "llama": Shape(32, 8, 128),
    "far-window": Shape(32, 8, 128, window=700),  # what is in sight is split over the GPU's processors
    "mha": Shape(8, 8, 64, torch.float16, block_size=8),
    "group-of-3": Shape(9, 3, 64),
    "group-of-5": Shape(40, 8, 128),
    "group-of-16": Shape(64, 4, 128, block_size=32),
    "one-kv-head": Shape(24, 1, 128),
    "mistral": Shape(32, 8, 128, window=50),
    "gemma2": Shape(8, 4, 256, window=70, softcap=50.0),
    "gemma2-full": Shape(8, 4, 256, softcap=50.0),
    "llama-e4m3": Shape(32, 8, 128, stored=torch.float8_e4m3fn),
    "group-of-3-e5m2": Shape(9, 3, 64, stored=torch.float8_e5m2),
}


def backend_for(device: torch.device, *, batch_invariant: bool = False) -> FlashInferBackend:
    skip_without_flashinfer(device)
    module = fake_flashinfer if device.type == "cpu" else None
    return FlashInferBackend(device, module, batch_invariant=batch_invariant)


class Step:
    """Random rows over scattered blocks, with pool and new tokens on the device."""

    def __init__(self, shape: Shape, device: torch.device, rng: np.random.Generator) -> None:
        large = device.type == "cuda"
        chunks = [(int(rng.integers(300)), int(rng.integers(2, 600 if large else 20))) for _ in range(rng.integers(3))]
        longest = 3000 if large else 90  # on a GPU, some rows are split over its processors
        decoding = [(int(rng.integers(longest)), 1) for _ in range(rng.integers(1, 40 if large else 5))]
        positions, lengths = zip(*chunks, *decoding, strict=True)
        self.shape, size = shape, shape.block_size
        counts = [-(-(position + length) // size) for position, length in zip(positions, lengths, strict=True)]
        tables = np.zeros((len(counts), max(counts)), np.int32)
        ids = np.split(rng.permutation(sum(counts)).astype(np.int32), np.cumsum(counts)[:-1])
        for row, blocks in enumerate(ids):
            tables[row, : len(blocks)] = blocks
        self.rows = PackedRows(np.array(lengths, np.int32), np.array(positions, np.int32), tables)
        generator = torch.Generator(device).manual_seed(int(rng.integers(1 << 30)))

        def draw(*dimensions: int) -> torch.Tensor:
            return torch.randn(dimensions, generator=generator, device=device).to(shape.dtype)

        self.pool = allocate_pool(shape.layout, sum(counts), device)
        self.pool.copy_(draw(*self.pool.shape))
        self.query = 3 * draw(sum(lengths), shape.num_heads, shape.head_dim)
        # As models give them: heads before tokens, transposed.
        self.key, self.value = draw(2, shape.num_kv_heads, sum(lengths), shape.head_dim).transpose(1, 2)

    def plan(self, backend: AttentionBackend) -> StepAttention:
        return backend.plan(self.pool, self.rows)

    def attend(self, planned: StepAttention) -> torch.Tensor:
        return planned.attend(LAYER, self.query, self.key, self.value, self.shape.kind.params)

    def expected(self) -> torch.Tensor:
        """In float32, from the same numbers, keys and values as the pool keeps them; the pool stays as it is."""
        planned = TorchBackend().plan(self.pool.float(), self.rows)
        key, value = (as_stored(tensor, self.pool.dtype).float() for tensor in (self.key, self.value))
        return planned.attend(LAYER, self.query.float(), key, value, self.shape.kind.params)


def compare(out: torch.Tensor, expected: torch.Tensor, softcap: float | None = None) -> None:
    tolerance = TOLERANCE[out.dtype] if softcap is None else CAPPED_TOLERANCE
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def check(step: Step, backend: AttentionBackend) -> None:
    expected, pool = step.expected(), step.pool.clone()
    TorchBackend().plan(pool, step.rows).attend(LAYER, step.query, step.key, step.value, step.shape.kind.params)
    out = step.attend(step.plan(backend))
    compare(out, expected, step.shape.softcap)
    assert torch.equal(bits(step.pool), bits(pool)), "keys and values of other layers or blocks were written"


@pytest.mark.parametrize("name", SHAPES)
def test_random_steps_agree_with_torch_in_float32(device: torch.device, name: str) -> None:
    backend = backend_for(device)
    for seed in range(20 if device.type == "cuda" else 3):
        check(Step(SHAPES[name], device, np.random.default_rng(seed)), backend)


@pytest.mark.parametrize("name", SHAPES)
def test_invariant_attention_has_the_same_bits_alone_and_token_by_token(device: torch.device, name: str) -> None:
    backend = backend_for(device, batch_invariant=True)
    for seed in range(5 if device.type == "cuda" else 1):
        step = Step(SHAPES[name], device, np.random.default_rng(seed))
        check(step, backend)
        rows, whole = step.rows, step.attend(step.plan(backend))
        parts = [split_rows(rows)]
        for row in range(len(rows.positions)):
            each = slice(row, row + 1)
            parts.append(PackedRows(rows.query_lens[each], rows.positions[each], rows.block_tables[each]))
        places = [slice(None), *(slice(*rows.query_starts[row : row + 2].tolist()) for row in range(len(parts) - 1))]
        for part, at in zip(parts, places, strict=True):
            planned = backend.plan(step.pool, part)
            out = planned.attend(LAYER, step.query[at], step.key[at], step.value[at], step.shape.kind.params)
            assert torch.equal(out, whole[at])


def test_steps_planned_while_the_last_one_still_waits_for_the_device(device: torch.device) -> None:
    """A plan goes to the device from memory that the next plan overwrites."""
    backend = backend_for(device)
    steps = [Step(SHAPES["llama"], device, np.random.default_rng(seed)) for seed in range(6)]
    expected = [step.expected() for step in steps]
    for step in steps:
        step.attend(step.plan(backend))  # compiles; the pool now holds the tokens, as the reference has it
    outputs = []
    for step in steps:
        if device.type == "cuda":
            torch.cuda._sleep(50_000_000)
        outputs.append(step.attend(step.plan(backend)))
    for out, reference in zip(outputs, expected, strict=True):
        compare(out, reference)


@pytest.mark.parametrize("names", [("gemma2", "gemma2-full"), ("llama-e4m3",)], ids=str)
def test_the_trial_at_the_start_is_passed(device: torch.device, names: tuple[str, ...]) -> None:
    kinds = [SHAPES[name].kind for name in names]
    try_layers(backend_for(device), SHAPES[names[0]].layout, kinds, device)


def test_flashinfer_is_chosen_on_a_gpu(device: torch.device) -> None:
    skip_without_flashinfer(device)
    shape = SHAPES["llama"]
    chosen = select_backend(device, shape.layout, [shape.kind])
    assert isinstance(chosen, FlashInferBackend) == (device.type == "cuda")
