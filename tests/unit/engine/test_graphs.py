"""Captured decoding steps give what steps launched op by op give, and touch nothing else."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from kvrelay.backends.backend import PackedRows
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine import make as make_module
from kvrelay.engine.load.causal_model import load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.make import PoolSizing, make_runner
from kvrelay.engine.pool_size import MemoryProfile, PoolDoesNotFit, blocks_for_profile
from kvrelay.engine.run import graphs as graphs_module
from kvrelay.engine.run.graph_check import GraphsDiffer, Waits
from kvrelay.engine.run.graph_sizes import default_sizes, padded_size
from kvrelay.engine.run.graphs import CudaGraphRecorder, GraphSettings, capture_graphs
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.protocol.sampling import Sampling
from kvrelay.step.batch import WorkerBatch, WorkerRow
from tests.fakes import fake_cuda_graphs
from tests.fakes.fake_cuda_graphs import CapturableTorchBackend, FakeRecorder
from tests.fakes.late_copies import LateCopies
from tests.tiny_models import ARCHITECTURES, build_model, build_tokenizer
from tests.unit.backends.cases import CPU
from tests.unit.engine.driving import Driven, run, start

SIZES = (1, 2, 5, 8)
NUM_BLOCKS = 96
MIB = 1 << 20


def graphs_of(recorder: FakeRecorder, sizes: tuple[int, ...] = SIZES) -> GraphSettings:
    return GraphSettings(sizes, lambda _: recorder)


def captured_runner(model: Path, recorder: FakeRecorder, **options: Any) -> TransformersRunner:
    options = {"num_blocks": NUM_BLOCKS, "max_model_len": 256, **options}
    return make_runner(
        str(model), dtype="float32", backend=CapturableTorchBackend(), graphs=graphs_of(recorder), **options
    )


def plain_runner(model: Path) -> TransformersRunner:
    return make_runner(str(model), dtype="float32", num_blocks=NUM_BLOCKS, backend=TorchBackend(), max_model_len=256)


def outputs(runner: TransformersRunner, sampling: Sampling, seed: int, vocab_size: int = 300) -> list[Driven]:
    """Eleven sequences, more than the largest graph holds, in steps of any of them; prompts in chunks between."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab_size, rng.integers(1, 40)).tolist() for _ in range(11)]
    sequences = start(runner, prompts, sampling, num_output=25, seed=seed)
    run(runner, sequences, seed=seed, max_chunk=60)
    for sequence in sequences:
        runner.drop_sequence(sequence.key)
    return sequences


@pytest.mark.everyday(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_steps_launched_op_by_op(architecture: str, model_dir: Callable[[str], Path]) -> None:
    recorder = FakeRecorder()
    captured = captured_runner(model_dir(architecture), recorder)
    plain = plain_runner(model_dir(architecture))
    assert recorder.num_captured == len(SIZES)
    for seed, sampling in enumerate([Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.9, seed=3)]):
        got, expected = (outputs(runner, sampling, seed) for runner in (captured, plain))
        assert [sequence.output for sequence in got] == [sequence.output for sequence in expected]
    assert recorder.num_replayed > 10
    torch.testing.assert_close(captured.pool, plain.pool, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_rows_of_several_tokens_are_replayed_too(architecture: str, model_dir: Callable[[str], Path]) -> None:
    """Chunks of up to three tokens, so that two sequences always fit the largest graph."""
    recorder = FakeRecorder()
    captured, plain = captured_runner(model_dir(architecture), recorder), plain_runner(model_dir(architecture))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 300, length).tolist() for length in (31, 20)]
    before, num_steps, found = recorder.num_replayed, [], []
    for runner in (captured, plain):
        sequences = start(runner, prompts, Sampling(temperature=0.7, seed=5), num_output=12)
        num_steps.append(run(runner, sequences, max_chunk=3))
        found.append([sequence.output for sequence in sequences])
    assert found[0] == found[1]
    assert recorder.num_replayed - before == num_steps[0]
    torch.testing.assert_close(captured.pool, plain.pool, atol=1e-4, rtol=1e-4)


def test_rows_that_would_read_too_much_again_are_launched(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = plain_runner(model_dir("llama")).spec
    token_bytes = 2 * layout.num_kv_heads * layout.head_dim * 4
    monkeypatch.setattr(graphs_module, "_REREAD_BYTES", 60 * token_bytes)
    recorder = FakeRecorder()
    runner = captured_runner(model_dir("llama"), recorder)
    (sequence,) = start(runner, [[1] * 100], Sampling(temperature=0), num_output=1)
    replayed = []
    for step, num_tokens in enumerate((1, 3, 16, 3, 3, 2, 1)):  # at positions 0, 1, 4, 20, 23, 26, 28
        before = recorder.num_replayed
        row = sequence.row(num_tokens)
        sequence.take(row, runner.execute(WorkerBatch(step, [row])).rows[0])
        replayed.append(recorder.num_replayed - before)
    assert replayed == [1, 1, 0, 1, 1, 1, 1]  # 2 * 23, 2 * 26 and 1 * 28 tokens
    row = sequence.row(3)
    assert not runner.execute(WorkerBatch(7, [row])).captured  # 2 * 32


def test_only_the_blocks_of_a_step_and_the_scratch_block_are_written(model_dir: Callable[[str], Path]) -> None:
    runner = captured_runner(model_dir("llama"), FakeRecorder())
    assert not runner.pool.any()  # after the capture
    runner.pool.fill_(7.0)
    sequences = start(runner, [[1, 2, 3]] * 3, Sampling(temperature=0), num_output=4)
    run(runner, sequences)
    owned = np.concatenate([sequence.blocks for sequence in sequences])
    others = np.setdiff1d(np.arange(NUM_BLOCKS), owned)
    assert bool((runner.pool[others] == 7.0).all())
    assert bool((runner.pool[owned] != 7.0).any())


def test_the_scratch_block_is_in_nobodys_books(model_dir: Callable[[str], Path]) -> None:
    runner = captured_runner(model_dir("llama"), FakeRecorder())
    assert runner.spec.num_blocks == len(runner.pool) == len(runner.pool_bytes) == NUM_BLOCKS
    block_bytes = runner.spec.block_bytes
    of_memory = captured_runner(model_dir("llama"), FakeRecorder(), num_blocks=None, memory_bytes=20 * block_bytes)
    assert of_memory.spec.num_blocks == 19


def test_a_captured_step_waits_once(model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FakeRecorder()
    runner = captured_runner(model_dir("qwen3"), recorder)
    sequences = start(runner, [[1, 2, 3]] * 3, Sampling(temperature=0.8, seed=1), num_output=9)
    runner.execute(WorkerBatch(0, [sequence.row(3) for sequence in sequences]))
    copies = LateCopies(monkeypatch)
    rows = [
        WorkerRow(sequence.key, np.zeros(1, np.int32), 3, sequence.blocks, True, False, has_placeholder=True)
        for sequence in sequences
    ]
    before = recorder.num_replayed
    with Waits() as waits:
        runner.execute(WorkerBatch(1, rows))
    assert recorder.num_replayed == before + 1
    assert waits.ops == []
    assert copies.num_started == len(copies.landed) == 1


def test_hidden_states_through_flashinfer(tmp_path: Path) -> None:
    """Mistral: a sliding window. In bfloat16, so up to rounding."""
    directory = build_model("mistral", tmp_path, dtype=torch.bfloat16)
    source = open_source(str(directory), "bfloat16", max_model_len=128)
    model = load_model(source, 16, FlashInferBackend(CPU, fake_cuda_graphs))
    runner = TransformersRunner(model, 40, with_scratch=True)
    pool = torch.zeros_like(runner._blocks)
    graphs = capture_graphs(model, pool, (4, 2), FakeRecorder())
    rng = np.random.default_rng(0)
    tables = rng.permutation(40).astype(np.int32)[:24].reshape(3, 8)
    for position in range(60):
        count = int(rng.integers(1, 4))
        rows = PackedRows(np.ones(3, np.int32), np.full(3, position, np.int32), tables)
        some = PackedRows(rows.query_lens[:count], rows.positions[:count], tables[:count])
        token_ids = rng.integers(0, 300, 3)
        with torch.inference_mode():
            # All rows go on; those of the captured step are computed twice, over the same keys and values.
            step = model.backend.plan(pool, rows)
            positions = torch.from_numpy(rows.token_positions.astype(np.int64))
            expected = model.hidden_states(torch.from_numpy(token_ids), positions, step)[:count]
            got = graphs.hidden_states(token_ids[:count], some)
        assert (got - expected).norm() <= 2e-2 * expected.norm()


@given(st.integers(1, 3000), st.data())
def test_padding_is_an_eighth_at_most_beyond_64(max_running: int, data: st.DataObject) -> None:
    sizes = default_sizes(max_running)
    assert sizes[-1] == max_running
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 3 + 8 * max(1, max_running.bit_length() - 2)
    num_rows = data.draw(st.integers(1, max_running))
    size = padded_size(sizes, num_rows)
    assert size == min(each for each in sizes if each >= num_rows)
    assert size - num_rows <= max(7, num_rows // 8)
    assert padded_size(sizes, max_running + 1) is None


class FakeCuda:
    """The part of `torch.cuda` that captures, with what its calls may be given; notes who ran where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.pools: list[object] = []
        self.num_streams = 0
        self._place = ["default stream"]
        # A stream that is not there must not be left to tests that have a GPU.
        monkeypatch.setattr(graphs_module, "_capture_stream", cache(graphs_module._capture_stream.__wrapped__))
        capture = inspect.signature(torch.cuda.graph.__init__)
        replaced: dict[str, Any] = {
            "device": lambda _: nullcontext(),
            "Stream": self._stream,
            "current_stream": lambda: SimpleNamespace(name="default stream", wait_stream=self._wait("default stream")),
            "stream": lambda stream: self._at(stream.name),
            "CUDAGraph": lambda: SimpleNamespace(pool=lambda: "the pool", replay=lambda: self.events.append("replay")),
        }

        def graph(*arguments: Any, **options: Any) -> Any:
            bound = capture.bind(None, *arguments, **options).arguments
            self.pools.append(bound["pool"])
            assert bound["capture_error_mode"] == "thread_local", "what other threads ask for would end the capture"
            assert not torch.is_inference_mode_enabled(), "the generator's tensors would be of that mode for all"
            return self._at(f"capture on {bound['stream'].name}")

        for name, fake in (replaced | {"graph": graph}).items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def forward(self) -> None:
        self.events.append(f"forward in {self._place[-1]}")

    def _stream(self, _: torch.device) -> SimpleNamespace:
        self.num_streams += 1
        return SimpleNamespace(name="side stream", wait_stream=self._wait("side stream"))

    def _wait(self, name: str) -> Callable[[Any], None]:
        return lambda other: self.events.append(f"{name} waits for {other.name}")

    @contextmanager
    def _at(self, place: str) -> Iterator[None]:
        self._place.append(place)
        yield
        self._place.pop()


def test_a_capture_comes_after_a_warm_up_and_joins_the_memory_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    recorder = CudaGraphRecorder(torch.device("cuda", 0))
    with torch.inference_mode():
        replays = [recorder.record(cuda.forward) for _ in range(3)]
    assert cuda.events[:4] == [
        "side stream waits for default stream",
        "forward in side stream",
        "default stream waits for side stream",
        "forward in capture on side stream",
    ]
    assert cuda.events == cuda.events[:4] * 3
    assert cuda.pools == [None, "the pool", "the pool"]
    replays[1]()
    assert cuda.events[-1] == "replay"
    CudaGraphRecorder(torch.device("cuda", 0)).record(cuda.forward)
    assert cuda.num_streams == 1, "cuBLAS keeps memory for each stream"
    assert cuda.pools[-1] is None, "the memory of graphs that may be gone is not joined"


# -- what cannot be captured ------------------------------------------------------------------------------------------


def test_a_backend_that_cannot_is_named(model_dir: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(
        str(model_dir("llama")), num_blocks=NUM_BLOCKS, backend=TorchBackend(), graphs=graphs_of(FakeRecorder())
    )
    assert "no CUDA graphs: attention by the torch backend" in caplog.text
    assert outputs(runner, Sampling(temperature=0), 0)


def test_a_forward_that_waits_is_not_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = {**ARCHITECTURES["llama"]().to_dict(), "rope_parameters": rope}
    AutoModelForCausalLM.from_config(LlamaConfig(**config)).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    recorder = FakeRecorder()
    runner = captured_runner(tmp_path, recorder)
    assert "no CUDA graphs: its forward waits for the device: aten." in caplog.text
    assert recorder.num_captured == 0
    assert outputs(runner, Sampling(temperature=0), 0)


def test_a_device_that_refuses_is_an_error_that_names_the_way_out(model_dir: Callable[[str], Path]) -> None:
    class Refuses(FakeRecorder):
        def record(self, forward: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(ValueError, match=r"cuda_graphs: .*--no-cuda-graphs.*not permitted"):
        captured_runner(model_dir("llama"), Refuses())


@pytest.mark.parametrize("spoil", ["positions", "blocks", "plan", "one size"])
def test_graphs_that_follow_their_buffers_in_part_are_refused_at_the_start(
    spoil: str, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(CapturableTorchBackend):
        """Its steps take no new plan, or a part of one, after the one for the capture."""

        def fixed_steps(self, *arguments: Any) -> Callable[[int], Any]:
            make = super().fixed_steps(*arguments)

            def make_step(num_rows: int) -> Any:
                step = make(num_rows)
                replan, seen = step.replan, []

                def replan_in_part(rows: PackedRows) -> None:
                    seen.append(rows)
                    first = seen[0]
                    match spoil:
                        case "positions":
                            rows = PackedRows(rows.query_lens, first.positions, rows.block_tables)
                        case "blocks":
                            tables = np.where(rows.block_tables > 0, rows.block_tables % 3, 0).astype(np.int32)
                            rows = rows if rows is first else PackedRows(rows.query_lens, rows.positions, tables)
                        case "plan":
                            rows = first
                        case "one size":
                            rows = first if num_rows == 5 else rows
                    replan(rows)

                monkeypatch.setattr(step, "replan", replan_in_part)
                return step

            return make_step

    with pytest.raises(GraphsDiffer, match=r"cuda_graphs: captured steps.* are off by .*--no-cuda-graphs"):
        make_runner(
            str(model_dir("llama")),
            dtype="float32",
            backend=Forgetful(),
            num_blocks=NUM_BLOCKS,
            max_model_len=256,
            graphs=graphs_of(FakeRecorder()),
        )


def test_a_layer_that_reads_before_all_rows_are_written_is_refused(model_dir: Callable[[str], Path]) -> None:
    """Rows of several tokens are replayed as rows of one token, of which each reads what the others write."""

    class OneAfterTheOther(CapturableTorchBackend):
        def fixed_steps(self, *arguments: Any) -> Callable[[int], Any]:
            make, pool = super().fixed_steps(*arguments), arguments[0]

            def make_step(num_rows: int) -> Any:
                step: Any = make(num_rows)

                def attend(layer: int, query: Any, key: Any, value: Any, params: Any) -> torch.Tensor:
                    out = torch.empty_like(query)
                    inputs = (step._positions, step._tables, query, key, value)
                    fake_cuda_graphs.launch(attend_to_each, pool, inputs, layer, params, out)
                    return out

                step.attend = attend
                return step

            return make_step

    def attend_to_each(pool: Any, inputs: Any, layer: int, params: Any, out: torch.Tensor) -> None:
        for row in reversed(range(len(out))):  # the last tokens first
            positions, tables, *own = (each[row : row + 1] for each in inputs)
            rows = PackedRows(np.ones(1, np.int32), positions.numpy(), tables.numpy())
            out[row : row + 1] = TorchBackend().plan(pool, rows).attend(layer, own[0], own[1], own[2], params)

    with pytest.raises(GraphsDiffer, match=r"cuda_graphs: captured steps.* are off by .*--no-cuda-graphs"):
        make_runner(
            str(model_dir("llama")),
            dtype="float32",
            backend=OneAfterTheOther(),
            num_blocks=NUM_BLOCKS,
            max_model_len=256,
            graphs=graphs_of(FakeRecorder()),
        )


def test_what_runs_as_a_graph_is_said_once(
    model_dir: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(make_module, "make_gauge", lambda _: FakeGauge(FakeRecorder(), 1000 * MIB))
    sizing = PoolSizing(0.9, token_budget=64, max_running=8)
    captured_runner(model_dir("llama"), FakeRecorder(), num_blocks=None, size_pool=sizing)
    assert caplog.text.count("CUDA graphs captured") == 1
    assert "Steps of up to 8 tokens" in caplog.text


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass
class FakeGauge:
    """A device on which each captured size keeps 3 MiB, and a step takes 10."""

    recorder: FakeRecorder
    size: int
    rests: list[int] = field(default_factory=list)

    def total(self) -> int:
        return self.size

    def rest(self) -> int:
        self.rests.append(100 * MIB + 3 * MIB * self.recorder.num_captured)
        return self.rests[-1]

    def peak(self) -> int:
        return self.rests[-1] + 10 * MIB

    def free(self) -> int | None:
        return None

    def keep(self) -> None:
        pass


def test_graphs_are_counted_before_the_pool_is_sized(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FakeRecorder()
    monkeypatch.setattr(make_module, "make_gauge", lambda _: FakeGauge(recorder, 200 * MIB))
    sizing = PoolSizing(1.0, token_budget=64, max_running=8)
    runner = captured_runner(model_dir("llama"), recorder, num_blocks=None, size_pool=sizing)
    block_bytes = runner.spec.block_bytes
    assert recorder.num_captured == 2 * len(SIZES)  # once to measure, once over the pool
    step = 10 * MIB - blocks_for_profile(64, 8, 16) * block_bytes  # the gauge's peak has the pool of the profile
    left = 200 * MIB - 100 * MIB - step - 3 * MIB * len(SIZES) - block_bytes
    assert runner.spec.num_blocks == left // block_bytes


def test_a_pool_that_graphs_leave_no_room_for_is_refused_with_the_numbers() -> None:
    profile = MemoryProfile(total=1000 * MIB, resting=300 * MIB, step=100 * MIB, graphs=50 * MIB)
    assert profile.pool_bytes(0.5) == 50 * MIB
    with pytest.raises(PoolDoesNotFit, match=r"step 100 MiB and its CUDA graphs 50 MiB, which leaves 50 MiB"):
        profile.num_blocks(0.5, block_bytes=MIB, least=51)
    beside_others = MemoryProfile(1000 * MIB, 300 * MIB, 100 * MIB, free=120 * MIB, graphs=15 * MIB)
    assert beside_others.pool_bytes(0.9) == 5 * MIB
