"""Constrained output: what jump-forward saves. What masks cost is in `mask_cost.py`.

Programs are answers under a JSON schema by the demo model, on a worker's step loop without the services around it. The
model is small and knows no JSON, so free strings and numbers are bounded, as a schema for extraction bounds them.

- Steps per token: answers to `SCHEMAS` with jump-forward and with masks alone, in turns on the same prompts, which must
  be equal. Steps are counted for each sequence, so the figure does not depend on the machine.
- Programs per CPU second: their ratio in each pair of turns. CPU time of the process, with the threads for masks: on a
  machine that others use too, it varies less than wall time.

- With `--against`: programs per second over HTTP, of this server with jump-forward and with masks alone and of other
  servers, on another model and with the same schemas (`json_programs.py`).

Usage: python -m benchmarks.json_decoding [--model DIR] [--repeats 5] [--write benchmarks/results/json_decoding.md]
           [--against NAME=URL | vllm-xgrammar | vllm-guidance]... [--served-model DIR] [--venv vllm=DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.json_programs import HEAD, compare, running, variants_of
from benchmarks.peers.machine import package_versions
from benchmarks.peers.servers import Setting
from benchmarks.sequences import sampled_sequence
from kvrelay.engine.make import make_runner
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.process import event_loop_factory
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.grammar import Grammar, GrammarKind
from kvrelay.protocol.sampling import FinishReason
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduler_names import DEFAULT_SCHEDULER
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.policies.scheduler_registry import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.worker.step_loop import StepCallbacks, StepLoop, StepTotals

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
BLOCK_SIZE = 16
PROMPT_TOKENS = 32
BATCH = 32
MAX_TOKENS = 400


def record(**properties: Any) -> dict[str, Any]:
    """A schema of an object with all of these properties."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text(max_length: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^[A-Za-z ]{{0,{max_length}}}$"}


AMOUNT = {"type": "integer", "minimum": 0, "maximum": 9999}
ADDRESS = record(street_name=text(12), house_number=AMOUNT, postal_code={"type": "string", "pattern": "^[0-9]{5}$"})
SCHEMAS: dict[str, dict[str, Any]] = {
    "character": record(
        name=text(16),
        house={"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
        blood_status={"enum": ["Pure-blood", "Half-blood", "Muggle-born"]},
        occupation={"enum": ["student", "teacher", "auror", "minister"]},
        is_alive={"type": "boolean"},
    ),
    "city": record(name=text(16), country=text(16), latitude=AMOUNT, population=AMOUNT, top_three_landmarks=text(24)),
    "invoice": record(
        invoice_number=AMOUNT,
        customer=record(full_name=text(16), billing_address=ADDRESS),
        currency={"enum": ["EUR", "USD", "GBP"]},
        total_amount=AMOUNT,
        payment_status={"enum": ["paid", "outstanding", "cancelled"]},
    ),
    "weather call": record(
        tool_name={"const": "get_current_weather"},
        arguments=record(
            location=text(16), unit={"enum": ["celsius", "fahrenheit"]}, include_forecast={"type": "boolean"}
        ),
    ),
    "review": record(
        sentiment={"enum": ["positive", "negative", "neutral"]},
        confidence_percent={"type": "integer", "minimum": 0, "maximum": 100},
        mentions_delivery={"type": "boolean"},
        mentions_price={"type": "boolean"},
        short_summary=text(24),
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`tokens` and `steps`: of all answers. A sequence's step is a token sampled."""

    cpu_s: float
    tokens: int
    steps: int
    num_complete: int
    outputs: dict[SequenceKey, list[int]]
    totals: StepTotals


class Run:
    """Sequences on a step loop, from their arrival to their ends. `grammars`: None for an unconstrained sequence."""

    def __init__(
        self,
        runner: TransformersRunner,
        grammars: list[Grammar | None],
        seed: int,
        max_tokens: int,
        *,
        jumps: bool,
    ) -> None:
        spec = runner.spec
        pool = BlockPool(spec.num_blocks, BLOCK_SIZE)
        limits = SchedulerLimits(512, BATCH, spec.max_model_len, frozenset(spec.eos_token_ids))
        settings = SchedulerSettings(jump_forward=jumps)
        self.scheduler = make_scheduler(DEFAULT_SCHEDULER, limits, pool, PrefixCache(pool), settings)
        self.loop = StepLoop(runner, self.scheduler, overlap=False)
        self.grammars = grammars
        self.seed = seed
        self.max_tokens = max_tokens
        self.steps = self.num_complete = 0
        self.outputs: dict[SequenceKey, list[int]] = {}

    def committed(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.sequence.key, []).extend(output.token_ids)
            self.steps += bool(output.token_ids)
            if output.finish is not None:
                self.num_complete += output.finish is FinishReason.STOP_TOKEN
                self.loop.forget(output.sequence.key)
        if not self.scheduler.has_work:
            self.loop.stop()

    def failed(self, sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise RuntimeError(cause)

    async def serve(self) -> Outcome:
        rng = np.random.default_rng(self.seed)
        for number, grammar in enumerate(self.grammars):
            prompt = rng.integers(5, 2000, PROMPT_TOKENS)
            seed = self.seed * 1000 + number
            self.loop.add(sampled_sequence(number, prompt, self.max_tokens, BLOCK_SIZE, seed, grammar))
        started = time.process_time()
        await self.loop.run(StepCallbacks(lambda plan: None, self.committed, self.failed))
        spent = time.process_time() - started
        tokens = sum(map(len, self.outputs.values()))
        return Outcome(spent, tokens, self.steps, self.num_complete, self.outputs, self.loop.totals)


def measure(
    runner: TransformersRunner,
    grammars: list[Grammar | None],
    seed: int = 1,
    max_tokens: int = MAX_TOKENS,
    *,
    jumps: bool = False,
) -> Outcome:
    """One run on an event loop of its own."""
    with asyncio.Runner(loop_factory=event_loop_factory()) as loop:
        return loop.run(Run(runner, grammars, seed, max_tokens, jumps=jumps).serve())


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), whitespace="")


def steps_per_token(runner: TransformersRunner, repeats: int) -> list[str]:
    """A line for each schema, and one for all: both ways in turns, on the same prompts and with the same outputs."""
    lines, ratios = [], []
    sums = np.zeros(4)
    for name, schema in SCHEMAS.items():
        grammars: list[Grammar | None] = [grammar_of(schema)] * 8
        measure(runner, grammars[:1])  # compiles the schema
        own = np.zeros(4)
        for repeat in range(repeats):
            order = (True, False) if repeat % 2 else (False, True)
            runs = {jumps: measure(runner, grammars, repeat, jumps=jumps) for jumps in order}
            if runs[True].outputs != runs[False].outputs:
                raise RuntimeError(f"{name}: outputs with jump-forward are others than with masks alone")
            own += [runs[True].steps, runs[False].steps, runs[True].tokens, runs[True].num_complete]
            ratios.append(runs[False].cpu_s / runs[True].cpu_s)
        sums += own
        lines.append(line(name, own))
        print(lines[-1], flush=True)
    low, high = np.quantile(ratios, [0.25, 0.75])
    return [
        *lines,
        line("all", sums),
        "",
        f"Programs per CPU second, with jump-forward over without: {np.median(ratios):.2f} (median of {len(ratios)} "
        f"pairs; quartiles {low:.2f} to {high:.2f}). Outputs were equal, token for token, in all pairs.",
    ]


def line(name: str, sums: np.ndarray) -> str:
    steps, masked_steps, tokens, complete = sums
    return f"| {name} | {tokens / complete:.0f} | {steps / tokens:.2f} | {masked_steps / tokens:.2f} |"


def on_a_step_loop(model: str, repeats: int) -> list[str]:
    """The page's first part."""
    load = os.getloadavg()[0]
    runner = make_runner(model, dtype="float32", num_threads=1, num_blocks=1200)
    return [
        "## On a step loop",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores (load {load:.0f} when it began), one thread for the demo "
        f"model, CPython {platform.python_version()}, {repeats} repeats.",
        "",
        "| schema | tokens per answer | steps per token, jump-forward | masks alone |",
        "|---|---:|---:|---:|",
        *steps_per_token(runner, repeats),
        "",
    ]


def over_http(given: argparse.Namespace) -> list[str]:
    """The page's second part."""
    cores = sorted(os.sched_getaffinity(0))
    setting = Setting(given.served_model, cores, 1, max_model_len=2048, max_running=BATCH, venvs=dict(given.venv))
    with running(variants_of(given.against), setting) as servers:
        load, rows = os.getloadavg()[0], []
        for concurrency in given.concurrency:
            rows += compare(
                servers,
                SCHEMAS,
                concurrency=concurrency,
                rounds=given.rounds,
                per_schema=max(2, 2 * concurrency // len(SCHEMAS)),
                max_tokens=MAX_TOKENS,
            )
        versions = [package_versions(server.python, server.packages) for server in servers.values()]
    names = {f"{name} {version}" for each in versions for name, version in each.items() if name in ("vllm", "torch")}
    return [
        "## Over HTTP, beside other servers",
        "",
        f"{platform.machine()} with {len(cores)} cores for the servers and the client (load {load:.0f} when it began), "
        f"the model of {given.served_model.name} in {setting.dtype} with random weights; {', '.join(sorted(names))}. "
        f"{given.rounds} rounds; medians, and the least and the most of the ratios within a round. All servers get "
        "the same requests, without whitespace between the tokens of JSON. Strings are sampled at temperature 1, so "
        "answers differ between servers in their length; tokens/s compare without that. `jump-forward` and `masks "
        "alone` are kvrelay. vLLM has no jump-forward; its backends are XGrammar and llguidance (`guidance`).",
        "",
        *HEAD,
        *rows,
        "",
    ]


def _venv(text: str) -> tuple[str, Path]:
    peer, _, path = text.partition("=")
    return peer, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--repeats", type=int, default=5, help="0: only the servers of --against")
    parser.add_argument("--against", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--served-model", type=Path, help="the model of --against")
    parser.add_argument("--venv", type=_venv, action="append", default=[], metavar="PEER=DIR")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--concurrency", type=lambda text: list(map(int, text.split(","))), default=[1, 8])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.against and arguments.served_model is None:
        parser.error("--against needs --served-model")
    lines = [
        "# JSON decoding",
        "",
        "Repeat with `python -m benchmarks.json_decoding`; the script's head says what is measured.",
        "",
    ]
    if arguments.repeats:
        lines += on_a_step_loop(arguments.model, arguments.repeats)
    if arguments.against:
        lines += over_http(arguments)
    written = "\n".join(lines).rstrip() + "\n"
    print(written)
    if arguments.write:
        arguments.write.write_text(written)


if __name__ == "__main__":
    main()
