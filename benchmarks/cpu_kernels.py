"""The CPU kernels against torch and against what the machine allows: attention, linear layers, and whole steps.

Read bandwidth is that of a sum over 512 MiB of float32 in huge pages, and the GEMM rate that of torch.mm. Both are
measured between the cases. Attention is one layer: by the kernel over scattered blocks, by gathering blocks for torch's
SDPA, and by SDPA over contiguous keys and values. A time is the least of many, by the thread's CPU time with one thread
and by the wall's clock with several.

Usage: python -m benchmarks.cpu_kernels [--threads 1] [--repeats 20] [--model DIR ...] [--write FILE]

Only steps, of the shape of Qwen3-0.6B with random weights, in a few minutes of an idle machine with 8 GiB free:
    python -m benchmarks.cpu_kernels --threads 2 --only-steps --shape qwen3-0.6b --quantization none
        --decode 1 8 32 --prompts 512 2048 --repeats 10 --rounds 3
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.cpu_kernels_clock import DTYPE, Clock, Machine, scattered_rows
from benchmarks.cpu_kernels_steps import CONTEXT, Steps, model_steps
from benchmarks.peers.make_model import SHAPES, make_config
from kvrelay.backends.backend import AttentionBackend, AttentionParams, KVLayout, allocate_pool
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.engine.fused.kernel import PanelProducts
from kvrelay.engine.fused.panels import pack

BLOCK_SIZES = (8, 16, 32, 64, 128)
VOCAB_SIZE = 151_936  # of Qwen3's models
NUM_LAYERS = 8  # taken in turns, so that a layer's KV is not in the cache


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a model's attention."""

    query: int
    key: int
    dim: int

    @property
    def name(self) -> str:
        """As in the tables."""
        return f"{self.query}/{self.key} heads of {self.dim}"


HEADS = (Heads(8, 4, 64), Heads(16, 8, 128))
LINEARS = ((1024, 4096), (1024, 6144), (3072, 1024), (512, 3072))


class AttentionCase:
    """One layer of attention over bfloat16 KV."""

    def __init__(self, heads: Heads, query_lens: list[int], positions: list[int], block_size: int) -> None:
        self._heads, self._query_lens = heads, query_lens
        self._rows = scattered_rows(query_lens, positions, block_size)
        layout = KVLayout(NUM_LAYERS, heads.key, heads.dim, block_size, DTYPE, None)
        self._pool = allocate_pool(layout, int(self._rows.block_tables.max()) + 1, torch.device("cpu"))
        self._pool.copy_(torch.randn(self._pool.shape[-1]).to(DTYPE).expand(self._pool.shape))
        tokens = sum(query_lens)
        self._query = torch.randn(tokens, heads.query, heads.dim).to(DTYPE)
        self._key, self._value = torch.randn(2, tokens, heads.key, heads.dim).to(DTYPE)

    def paged(self, backend: AttentionBackend, clock: Clock, repeats: int | None = None) -> float:
        """Seconds through a backend."""
        step, params = backend.plan(self._pool, self._rows), AttentionParams(scaling=self._heads.dim**-0.5)
        return clock.least(
            lambda repeat: step.attend(repeat % NUM_LAYERS, self._query, self._key, self._value, params), repeats
        )

    def contiguous(self, clock: Clock) -> float:
        """Seconds of SDPA over keys and values that lie as it likes them, for rows of equal lengths."""
        heads, batch, tokens = self._heads, len(self._query_lens), self._query_lens[0]
        keys = int(self._rows.positions[0]) + tokens
        query = self._query.view(batch, tokens, heads.query, heads.dim).transpose(1, 2)
        key, value = torch.randn(2, batch, heads.key, keys, heads.dim).to(DTYPE)
        return clock.least(
            lambda _: functional.scaled_dot_product_attention(
                query, key, value, is_causal=tokens > 1, enable_gqa=heads.query != heads.key
            ),
            5,
        )


def decode_attention(clock: Clock, machine: Machine) -> Iterator[str]:
    """Lines of the table of decoding."""
    yield "| heads | sequences | block | kernel ms | GB/s | of read bandwidth | gather + SDPA | contiguous SDPA |"
    yield "|---|---|---|---|---|---|---|---|"
    for heads in HEADS:
        for batch in (1, 8, 32, 64):
            for block_size in BLOCK_SIZES if batch == 32 else (16,):
                case = AttentionCase(heads, [1] * batch, [CONTEXT - 1] * batch, block_size)
                kernel = case.paged(CpuBackend(), clock)
                read = batch * CONTEXT * heads.key * heads.dim * 2 * DTYPE.itemsize / kernel / 1e9
                gather, contiguous = case.paged(TorchBackend(), clock, 3), case.contiguous(clock)
                yield (
                    f"| {heads.name} | {batch} | {block_size} | {kernel * 1e3:.3f} | {read:.1f} | "
                    f"{read / machine.read_gb_s():.2f} | {gather / kernel:.1f}x | {contiguous / kernel:.1f}x |"
                )


def prompt_attention(clock: Clock, machine: Machine) -> Iterator[str]:
    """Lines of the table of prompts."""
    yield "| heads | tokens | block | kernel ms | GFLOP/s | of the GEMM rate | gather + SDPA | contiguous SDPA |"
    yield "|---|---|---|---|---|---|---|---|"
    for heads in HEADS:
        for tokens in (512, 2048):
            for block_size in BLOCK_SIZES if tokens == 512 else (16,):
                case = AttentionCase(heads, [tokens], [0], block_size)
                kernel = case.paged(CpuBackend(), clock)
                rate = 2 * heads.query * heads.dim * tokens * tokens / kernel / 1e9
                gather, contiguous = case.paged(TorchBackend(), clock, 3), case.contiguous(clock)
                yield (
                    f"| {heads.name} | {tokens} | {block_size} | {kernel * 1e3:.2f} | {rate:.0f} | "
                    f"{rate / machine.gemm_gflop_s(DTYPE):.2f} | {gather / kernel:.1f}x | {contiguous / kernel:.1f}x |"
                )


def linear_layers(clock: Clock, machine: Machine) -> Iterator[str]:
    """Lines of the table of products. Copies of the weights take turns, so that they come from memory."""
    yield "| type | in x out | tokens | kernel ms | GB/s | of read bandwidth | GFLOP/s | of the GEMM rate | torch |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for dtype in (torch.bfloat16, torch.float32):
        for num_in, num_out in LINEARS:
            yield from linear_shape(PanelProducts(dtype), dtype, num_in, num_out, clock, machine)


def linear_shape(
    products: PanelProducts, dtype: torch.dtype, num_in: int, num_out: int, clock: Clock, machine: Machine
) -> Iterator[str]:
    """Lines for one shape."""
    plain = [torch.randn(num_out, num_in).to(dtype) for _ in range(1 + 2**27 // (num_in * num_out * 4))]
    packed = [pack([weight], None) for weight in plain]
    for tokens in (1, 8, 16, 32, 64, 512):
        x = torch.randn(tokens, num_in).to(dtype)
        kernel = clock.least(lambda repeat, x=x: products.linear(packed[repeat % len(packed)], x))  # type: ignore[misc]
        theirs = clock.least(lambda repeat, x=x: functional.linear(x, plain[repeat % len(plain)]))  # type: ignore[misc]
        read, rate = packed[0].nbytes / kernel / 1e9, 2 * tokens * num_in * num_out / kernel / 1e9
        yield (
            f"| {str(dtype).removeprefix('torch.')} | {num_in} x {num_out} | {tokens} | {kernel * 1e3:.3f} | "
            f"{read:.1f} | {read / machine.read_gb_s():.2f} | {rate:.0f} | "
            f"{rate / machine.gemm_gflop_s(dtype):.2f} | {theirs / kernel:.2f}x |"
        )


def cpu_name() -> str:
    """The model name of the first CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def tables(arguments: argparse.Namespace) -> Iterator[str]:
    """All lines of the report."""
    clock = Clock(arguments.threads, arguments.repeats)
    machine = Machine(clock)
    yield "# CPU kernels\n"
    yield f"`python -m benchmarks.cpu_kernels {' '.join(sys.argv[1:])}`\n"
    yield (
        f"{cpu_name()}, {os.cpu_count()} CPUs, {arguments.threads} threads, torch {torch.__version__}, "
        f"{PanelProducts(DTYPE).instructions}. At the start: {machine.read_gb_s():.1f} GB/s read, "
        f"{machine.gemm_gflop_s(DTYPE):.0f} GFLOP/s bfloat16, {machine.gemm_gflop_s(torch.float32):.0f} float32.\n"
    )
    if not arguments.only_steps:
        yield f"## Attention of decoding, one layer, context {CONTEXT}, bfloat16\n"
        yield from decode_attention(clock, machine)
        yield "\n## Attention of prompts, one layer, bfloat16\n"
        yield from prompt_attention(clock, machine)
        yield "\n## Linear layers\n"
        yield from linear_layers(clock, machine)
    steps = Steps(
        *(tuple(arguments.quantization), tuple(arguments.decode), tuple(arguments.prompts)), rounds=arguments.rounds
    )
    for directory in arguments.model:
        yield f"\n## Steps of {Path(directory).name}, context {CONTEXT}, bfloat16\n"
        yield from model_steps(directory, "auto", steps, clock, machine)
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory() as parent:
            directory = str(Path(parent) / shape)
            make_config(shape, VOCAB_SIZE).save_pretrained(directory)
            yield f"\n## Steps of the shape {shape}, context {CONTEXT}, bfloat16\n"
            yield from model_steps(directory, "dummy", steps, clock, machine)


def main() -> None:
    """Prints the tables, and writes them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--model", action="append", default=[], help="a model's directory, for whole steps")
    parser.add_argument("--shape", action="append", default=[], choices=sorted(SHAPES), help="random weights instead")
    parser.add_argument("--only-steps", action="store_true", help="no tables of single kernels")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="sequences of a step")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 2048], help="tokens")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all steps of a model in turns")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = []
    for line in tables(arguments):
        print(line, flush=True)
        lines.append(line)
    if arguments.write:
        arguments.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
