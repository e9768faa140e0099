"""Whole steps of a model and their parts, for `cpu_kernels`: their times against what the machine allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.cpu_kernels_clock import DTYPE, Clock, Machine, scattered_rows
from kvrelay.backends.backend import StepAttention, allocate_pool
from kvrelay.engine.fused.forward import FusedForward
from kvrelay.engine.fused.kernel import PanelProducts
from kvrelay.engine.fused.panels import PackedLinear
from kvrelay.engine.fused.weights import DecoderWeights
from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.integer_weight import Quantization
from kvrelay.engine.load.model_source import LoadFormat, open_source

CONTEXT = 1024
BLOCK_SIZE = 16
PROMPT_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that are timed, in turns for some rounds: sequences that decode together, and lengths of prompts."""

    quantizations: tuple[Quantization, ...]
    decode: tuple[int, ...]
    prompts: tuple[int, ...]
    rounds: int = 1

    def cases(self) -> list[StepCase]:
        """The steps, each with its name."""
        cases = [StepCase(f"decode {batch}", [1] * batch, [CONTEXT] * batch) for batch in self.decode]
        return cases + [StepCase(f"prompt of {tokens}", [tokens], [0]) for tokens in self.prompts]


@dataclass(frozen=True, slots=True)
class StepCase:
    """The rows of one step: their new tokens, and how many tokens are in the pool before them."""

    name: str
    query_lens: list[int]
    positions: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step must read and compute at least: weights and KV once; products and attention without masked keys."""

    read_bytes: int
    weight_flops: int
    attention_flops: int

    def floor_s(self, read_gb_s: float, gflop_s: float) -> tuple[float, str]:
        """Seconds, and which of the two takes them: `read` or `GEMM`."""
        read, computed = self.read_bytes / read_gb_s / 1e9, (self.weight_flops + self.attention_flops) / gflop_s / 1e9
        return max((read, "read"), (computed, "GEMM"))


def step_work(model: CausalModel, case: StepCase) -> Work:
    """The work of a step. A weight takes 2 FLOPs for each token, a key 4 for each query and element of a head."""
    weights, layout = _weights(model), model.layout
    windows = [layer.attention.sliding_window for layer in weights.layers]
    token_bytes = 2 * layout.num_kv_heads * layout.head_dim * layout.pool_dtype.itemsize
    keys = sum(attended_keys(case, window) for window in windows)
    *inner, head = [each.num_in * each.num_out for each in weights.linears]
    return Work(
        sum(each.nbytes for each in weights.linears) + sum(read_keys(case, window) for window in windows) * token_bytes,
        2 * (sum(inner) * case.num_tokens + head * len(case.query_lens)),
        4 * weights.num_heads * weights.head_dim * keys,
    )


def attended_keys(case: StepCase, window: int | None) -> int:
    """Pairs of a query and a key that it sees, of one layer."""
    total = 0
    for query_len, position in zip(case.query_lens, case.positions, strict=True):
        seen = np.arange(position + 1, position + query_len + 1)
        total += int(seen.sum() if window is None else np.minimum(seen, window).sum())
    return total


def read_keys(case: StepCase, window: int | None) -> int:
    """Keys that some query of their row sees, of one layer."""
    rows = zip(case.query_lens, case.positions, strict=True)
    return sum(query + (position if window is None else min(position, window - 1)) for query, position in rows)


def _weights(model: CausalModel) -> DecoderWeights:
    if not isinstance(model.forward, FusedForward):
        raise SystemExit("the floor of a step is only known for models with fused layers")
    return model.forward.weights


class TimedStep:
    """One step of a model over random KV, without sampling."""

    def __init__(self, model: CausalModel, case: StepCase, clock: Clock) -> None:
        self.case = case
        self._model, self._clock = model, clock
        self._rows = scattered_rows(case.query_lens, case.positions, BLOCK_SIZE)
        self._pool = allocate_pool(model.layout, self._rows.block_tables.size, torch.device("cpu"))
        self._pool.copy_(torch.randn(self._pool.shape[-1]).to(self._pool.dtype).expand(self._pool.shape))
        self._token_ids = torch.randint(0, model.vocab_size, (case.num_tokens,))
        self._at = torch.from_numpy(self._rows.token_positions.astype(np.int64))
        self._last = torch.from_numpy(self._rows.query_starts[1:].astype(np.int64) - 1)

    def seconds(self) -> float:
        """The least time of some repeats."""
        model = self._model
        return self._least(
            lambda: model.logits(model.hidden_states(self._token_ids, self._at, self._plan())[self._last])
        )

    def parts(self) -> dict[str, float]:
        """Seconds of the step's parts, each run for all layers one after another, so that weights and KV come from
        memory as in a step."""
        weights, products = _weights(self._model), PanelProducts(DTYPE)
        found = {}
        for name in ("qkv", "output", "gate_up", "down"):
            linears = [getattr(layer, name) for layer in weights.layers]
            found[name] = self._least(self._multiply(products, linears))
        query = torch.randn(self.case.num_tokens, weights.num_heads, weights.head_dim).to(DTYPE)
        key, value = torch.randn(2, self.case.num_tokens, weights.num_kv_heads, weights.head_dim).to(DTYPE)

        def attend() -> None:
            step = self._plan()
            for index, layer in enumerate(weights.layers):
                step.attend(index, query, key, value, layer.attention)

        found["attention"] = self._least(attend)
        hidden = torch.randn(len(self._last), weights.hidden_size).to(DTYPE)
        found["head"] = self._least(lambda: self._model.logits(hidden))
        return found

    def _multiply(self, products: PanelProducts, linears: Sequence[PackedLinear]) -> Callable[[], None]:
        x = torch.randn(self.case.num_tokens, linears[0].num_in).to(DTYPE)

        def multiply() -> None:
            for each in linears:
                products.linear(each, x)

        return multiply

    def _plan(self) -> StepAttention:
        return self._model.backend.plan(self._pool, self._rows)

    @torch.inference_mode()
    def _least(self, run: Callable[[], object]) -> float:
        run()
        return self._clock.least(lambda _: run(), self._clock.repeats if self.case.num_tokens < 100 else PROMPT_REPEATS)


@dataclass(frozen=True, slots=True)
class Reading:
    """A step of one round, with the better of what the machine allowed before it and after it."""

    seconds: float
    parts: dict[str, float]
    read_gb_s: float
    gflop_s: float


def read_step(step: TimedStep, machine: Machine) -> Reading:
    before = machine.read_gb_s(), machine.gemm_gflop_s(DTYPE)
    seconds, parts = step.seconds(), step.parts()
    after = machine.read_gb_s(), machine.gemm_gflop_s(DTYPE)
    return Reading(seconds, parts, *map(max, before, after))


def model_steps(directory: str, load_format: LoadFormat, steps: Steps, clock: Clock, machine: Machine) -> Iterator[str]:
    """Lines of the tables of a model's steps and of their parts."""
    yield (
        "A step's floor is the longer one of two: reading weights and KV once at the bandwidth measured beside it, and "
        "computing the products of weights and of attention (without masked keys) at the rate of `torch.mm` measured "
        f"beside it. Medians of {steps.rounds} round(s), with least and greatest.\n"
    )
    name = Path(directory).name
    whole = ["| model | quantization | step | ms | read GB | weights GFLOP | attention GFLOP | floor ms | by | ratio |"]
    whole.append("|---|---|---|---|---|---|---|---|---|---|")
    parts = ["| quantization | step | part | ms | share | GB/s | of read bandwidth | of GEMM rate |"]
    parts.append("|---|---|---|---|---|---|---|---|")
    for quantization in steps.quantizations:
        source = open_source(
            directory, "bfloat16", max_model_len=4096, quantization=quantization, load_format=load_format
        )
        model = load_model(source, block_size=BLOCK_SIZE)
        timed = [TimedStep(model, case, clock) for case in steps.cases()]
        rounds = [[read_step(step, machine) for step in timed] for _ in range(steps.rounds)]
        for step, readings in zip(timed, zip(*rounds, strict=True), strict=True):
            work = step_work(model, step.case)
            whole.append(f"| {name} | {quantization} | {step.case.name} | {step_cells(work, readings)} |")
            for line in part_lines(model, step.case, readings):
                parts.append(f"| {quantization} | {step.case.name} | {line} |")
    yield from whole
    yield (
        "\nParts of these steps, each timed by itself for all layers; the rest of the step is norms, rotation, "
        "embeddings and the last norm, and what parts take more or less by themselves. Medians.\n"
    )
    yield from parts


def step_cells(work: Work, readings: Sequence[Reading]) -> str:
    floors = [work.floor_s(each.read_gb_s, each.gflop_s) for each in readings]
    ratios = [each.seconds / floor for each, (floor, _) in zip(readings, floors, strict=True)]
    cells = [
        spread([each.seconds * 1e3 for each in readings], ".1f"),
        f"{work.read_bytes / 1e9:.2f}",
        f"{work.weight_flops / 1e9:.0f}",
        f"{work.attention_flops / 1e9:.1f}",
        spread([floor * 1e3 for floor, _ in floors], ".1f"),
        "/".join(dict.fromkeys(limit for _, limit in floors)),
        spread(ratios, ".2f"),
    ]
    return " | ".join(cells)


def part_lines(model: CausalModel, case: StepCase, readings: Sequence[Reading]) -> Iterator[str]:
    """Cells from the part's name on."""
    weights = _weights(model)
    step = median(each.seconds for each in readings)
    rest = step
    for name in readings[0].parts:
        taken = median(each.parts[name] for each in readings)
        rest -= taken
        work = part_work(model, weights, case, name)
        read = work.read_bytes / taken / 1e9
        rate = (work.weight_flops + work.attention_flops) / taken / 1e9
        yield (
            f"{name} | {taken * 1e3:.2f} | {taken / step:.0%} | {read:.1f} | "
            f"{read / median(each.read_gb_s for each in readings):.2f} | "
            f"{rate / median(each.gflop_s for each in readings):.2f}"
        )
    yield f"rest | {rest * 1e3:.2f} | {rest / step:.0%} | | | "


def part_work(model: CausalModel, weights: DecoderWeights, case: StepCase, name: str) -> Work:
    """The part of `step_work`."""
    if name == "attention":
        whole, linears = step_work(model, case), sum(each.nbytes for each in weights.linears)
        return Work(whole.read_bytes - linears, 0, whole.attention_flops)
    if name == "head":
        head = weights.linears[-1]
        return Work(head.nbytes, 2 * head.num_in * head.num_out * len(case.query_lens), 0)
    linears_of = [getattr(layer, name) for layer in weights.layers]
    count = sum(each.num_in * each.num_out for each in linears_of)
    return Work(sum(each.nbytes for each in linears_of), 2 * count * case.num_tokens, 0)


def spread(values: Sequence[float], form: str) -> str:
    """The median, with the least and the greatest if there are several."""
    middle = f"{median(values):{form}}"
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"
