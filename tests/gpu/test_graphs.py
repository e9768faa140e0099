"""CUDA graphs on a GPU: tokens in float32, hidden states through FlashInfer, waits, order and memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.backends.backend import (
    AttentionBackend,
    AttentionParams,
    KVLayout,
    PackedRows,
    allocate_pool,
    bits,
    pad_rows,
)
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.make import PoolSizing, make_runner
from kvrelay.engine.pool_size import make_gauge
from kvrelay.engine.run.graphs import CudaGraphRecorder, DecodeGraphs, GraphSettings, capture_graphs
from kvrelay.protocol.sampling import Sampling
from tests.fakes import fake_cuda_graphs, pretended_flashinfer
from tests.fakes.fake_cuda_graphs import FakeRecorder
from tests.gpu.conftest import KERNELS_TIMEOUT_S, NO_FLASHINFER, skip_without_flashinfer
from tests.gpu.reference import paged_logits, prompts
from tests.tiny_models import build_model
from tests.unit.engine import driving

SIZES = (1, 2, 5, 8)
NUM_OUTPUT = 24
NUM_BLOCKS, BLOCK_SIZE, ROW_BLOCKS = 96, 16, 12
TOLERANCE = 2e-2  # relative, of a norm of bfloat16


def recorder_of(device: torch.device) -> CudaGraphRecorder:
    return CudaGraphRecorder(device) if device.type == "cuda" else FakeRecorder()


class DenseBackend(TorchBackend):
    """Any precision: captured steps gather as many blocks as a row may have, and mask what it has not."""

    def fixed_steps(self, pool: torch.Tensor, max_rows: int, max_row_blocks: int) -> Callable[[int], _DenseStep]:
        return lambda num_rows: _DenseStep(pool, num_rows, max_row_blocks)


class _DenseStep:
    def __init__(self, pool: torch.Tensor, num_rows: int, max_row_blocks: int) -> None:
        self._pool = pool
        self._blocks = torch.zeros(num_rows, max_row_blocks, dtype=torch.int64, device=pool.device)
        self._positions, self._last_blocks = torch.zeros(2, num_rows, dtype=torch.int64, device=pool.device)

    def replan(self, rows: PackedRows) -> None:
        width = min(rows.block_tables.shape[1], self._blocks.shape[1])
        tables = torch.from_numpy(rows.block_tables[:, :width].astype(np.int64))
        self._blocks[:, :width].copy_(tables)
        self._positions.copy_(torch.from_numpy(rows.positions.astype(np.int64)))
        self._last_blocks.copy_(torch.from_numpy(rows.token_blocks(self._pool.shape[4]).astype(np.int64)))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        block_size, group = self._pool.shape[4], query.shape[1] // key.shape[1]
        cache = self._pool[:, layer]
        cache[self._last_blocks, 0, :, self._positions % block_size] = key
        cache[self._last_blocks, 1, :, self._positions % block_size] = value
        gathered = (cache[:, which][self._blocks].transpose(2, 3).flatten(1, 2) for which in (0, 1))
        keys, values = (each.repeat_interleave(group, 2) for each in gathered)
        scores = torch.einsum("nhd,nkhd->nhk", query, keys) * params.scaling
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        distance = self._positions[:, None] - torch.arange(keys.shape[1], device=query.device)
        seen = (distance >= 0) & (distance < (params.sliding_window or keys.shape[1]))
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return torch.einsum("nhk,nkhd->nhd", weights, values).contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
def test_float32_tokens_are_those_of_steps_launched_kernel_by_kernel(
    device: torch.device, architecture: str, tmp_path: Path
) -> None:
    directory = str(build_model(architecture, tmp_path))
    graphs = GraphSettings(SIZES, recorder_of)
    outputs = []
    for settings in (graphs, None):
        runner = make_runner(
            directory,
            dtype="float32",
            device=device,
            num_blocks=NUM_BLOCKS,
            max_model_len=128,
            backend=DenseBackend(),
            graphs=settings,
        )
        sequences = driving.start(runner, prompts(11, 60), Sampling(temperature=0.0), NUM_OUTPUT)
        driving.run(runner, sequences)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]


@pytest.fixture(params=[("mistral", "auto"), ("wide-qwen3", "auto"), ("wide-qwen3", "fp8_e4m3")], ids="-".join)
def model(device: torch.device, tmp_path: Path, request: pytest.FixtureRequest) -> CausalModel:
    """A sliding window, by the decode kernel on CUDA cores; many heads a KV head, on tensor cores; also with 8 bits."""
    architecture, kv_cache_dtype = request.param
    skip_without_flashinfer(device)
    backend: AttentionBackend = FlashInferBackend(device, fake_cuda_graphs if device.type == "cpu" else None)
    directory, longest = build_model(architecture, tmp_path, dtype=torch.bfloat16), ROW_BLOCKS * BLOCK_SIZE
    source = open_source(str(directory), "bfloat16", device, longest, kv_cache_dtype=kv_cache_dtype)
    return load_model(source, BLOCK_SIZE, backend)


Step = tuple[np.ndarray[tuple[int], np.dtype[np.int64]], PackedRows]


def random_steps(count: int) -> list[Step]:
    """Steps of one to eight tokens at any positions; what lies before them in the pool is random. Some rows have
    several tokens, as with drafts."""
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(count):
        num_tokens = int(rng.integers(1, SIZES[-1] + 1))
        ends = np.unique([*rng.integers(1, num_tokens + 1, rng.integers(1, num_tokens + 1)), num_tokens])
        query_lens = np.diff(ends, prepend=0).astype(np.int32)
        num_rows = len(query_lens)
        tables = rng.permutation(NUM_BLOCKS)[: num_rows * ROW_BLOCKS].astype(np.int32).reshape(num_rows, -1)
        positions = rng.integers(0, ROW_BLOCKS * BLOCK_SIZE + 1 - query_lens, num_rows).astype(np.int32)
        steps.append((rng.integers(0, 300, num_tokens), PackedRows(query_lens, positions, tables)))
    return steps


def random_pool(layout: KVLayout, device: torch.device) -> torch.Tensor:
    pool = allocate_pool(layout, NUM_BLOCKS + 1, device)
    return pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def captured(model: CausalModel, pool: torch.Tensor) -> DecodeGraphs:
    return capture_graphs(model, pool, SIZES, recorder_of(pool.device))


@pytest.mark.everyday(1)
@pytest.mark.timeout(KERNELS_TIMEOUT_S)
def test_replays_through_flashinfer_agree_with_its_launches(device: torch.device, model: CausalModel) -> None:
    pool = random_pool(model.layout, device)
    graphs = captured(model, pool)
    for token_ids, rows in random_steps(30):
        with torch.inference_mode():
            positions = torch.from_numpy(rows.token_positions.astype(np.int64)).to(device)
            step = model.backend.plan(pool, rows)
            expected = model.hidden_states(torch.from_numpy(token_ids).to(device), positions, step)
            written = pool.clone()
            got = graphs.hidden_states(token_ids, rows)
        assert (got - expected).norm() <= TOLERANCE * expected.norm()
        # The same K/V in the same places, up to how matrices of another number of rows are multiplied.
        # A last bit of 16 may decide which of two 8-bit numbers it is: they are up to an eighth apart.
        rtol = 5e-2 if model.layout.stored is None else 0.15
        torch.testing.assert_close(pool[:NUM_BLOCKS].float(), written[:NUM_BLOCKS].float(), atol=5e-2, rtol=rtol)


@pytest.mark.everyday(1)
@pytest.mark.timeout(KERNELS_TIMEOUT_S)
def test_steps_behind_one_another_neither_wait_nor_mix(device: torch.device, model: CausalModel) -> None:
    """All are asked for before the first is done: no buffer is filled anew while a step may still read it."""
    steps = random_steps(40)
    pools = [random_pool(model.layout, device) for _ in range(2)]
    graphs = [captured(model, pool) for pool in pools]
    one_by_one, at_once = [], []
    with torch.inference_mode():
        for token_ids, rows in steps:
            one_by_one.append(graphs[0].hidden_states(token_ids, rows).clone().cpu())  # waits
        for token_ids, rows in steps[:10]:  # the allocators have what they need
            graphs[1].hidden_states(token_ids, rows)
        pools[1].copy_(random_pool(model.layout, device))
        with no_waits(device):
            for token_ids, rows in steps:
                at_once.append(graphs[1].hidden_states(token_ids, rows).clone())
    for got, expected in zip(at_once, one_by_one, strict=True):
        assert torch.equal(got.cpu(), expected)


def logits_by_graphs(model: CausalModel, given: list[list[int]], device: torch.device) -> list[torch.Tensor]:
    """Logits `[tokens, vocab]` of prompts that are computed token by token beside each other, on the CPU."""
    graphs = captured(model, random_pool(model.layout, device))
    tables = np.random.default_rng(1).permutation(NUM_BLOCKS)[: len(given) * ROW_BLOCKS].astype(np.int32)
    parts: list[list[torch.Tensor]] = [[] for _ in given]
    for position in range(max(map(len, given))):
        alive = [row for row, prompt in enumerate(given) if position < len(prompt)]
        ones = np.ones(len(alive), np.int32)
        rows = PackedRows(ones, position * ones, tables.reshape(len(given), -1)[alive])
        tokens = np.array([given[row][position] for row in alive])
        found = model.logits(graphs.hidden_states(tokens, rows).clone()).float().cpu()
        for row, part in zip(alive, found.split(1), strict=True):
            parts[row].append(part)
    return [torch.cat(each) for each in parts]


@pytest.mark.parametrize("architecture", ["wide-qwen3", "mistral"])
@pytest.mark.timeout(KERNELS_TIMEOUT_S)
def test_batch_invariant_logits_have_the_same_bits_in_any_step(
    device: torch.device, architecture: str, tmp_path: Path
) -> None:
    """In a crowd and alone, in prompts cut anywhere and decoding, by launches and by graphs."""
    if device.type == "cpu":
        pytest.skip("there it is no choice: component/embedded/test_same_bits")
    skip_without_flashinfer(device)
    directory = build_model(architecture, tmp_path, dtype=torch.bfloat16)
    source = open_source(str(directory), "bfloat16", device, ROW_BLOCKS * BLOCK_SIZE)
    model = load_model(source, BLOCK_SIZE, batch_invariant=True)
    is_real = sys.modules.get("flashinfer") is not pretended_flashinfer
    given = prompts(SIZES[-1] if is_real else 3, ROW_BLOCKS * BLOCK_SIZE if is_real else 30)
    expected = paged_logits(model, given)
    ways = [paged_logits(model, given, seed=1), [paged_logits(model, [prompt], seed=2)[0] for prompt in given]]
    ways.append(logits_by_graphs(model, given, device))
    for way in ways:
        for got, wanted in zip(way, expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.timeout(KERNELS_TIMEOUT_S)
def test_padding_writes_to_the_scratch_block_alone(device: torch.device, model: CausalModel) -> None:
    pool = random_pool(model.layout, device)
    graphs = captured(model, pool)
    for token_ids, rows in random_steps(10):
        before = pool.clone()
        with torch.inference_mode():
            graphs.hidden_states(token_ids, rows)
        size = next(size for size in SIZES if size >= len(token_ids))
        written = np.unique(pad_rows(rows, size, NUM_BLOCKS).token_blocks(BLOCK_SIZE))
        untouched = np.setdiff1d(np.arange(NUM_BLOCKS + 1), written)
        assert torch.equal(bits(pool)[untouched], bits(before)[untouched])


@pytest.mark.timeout(KERNELS_TIMEOUT_S)
def test_what_graphs_keep_is_part_of_the_share(device: torch.device, tmp_path: Path) -> None:
    if device.type == "cpu":
        pytest.skip("a CPU's gauge counts what other tests take; unit/engine has one with a gauge of its own")
    if NO_FLASHINFER:
        pytest.skip(NO_FLASHINFER)
    directory = str(build_model("mistral", tmp_path, dtype=torch.bfloat16))
    gauge = make_gauge(device)
    sizing = PoolSizing(0.1, token_budget=2048, max_running=64)
    runner = make_runner(
        directory, dtype="bfloat16", device=device, size_pool=sizing, graphs=GraphSettings((1, 8, 32, 64))
    )
    assert runner.spec.num_blocks > 0
    assert gauge.rest() <= gauge.total() * 0.1 + (64 << 20)  # what libraries load with their first kernels
