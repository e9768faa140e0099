"""Each workload with every part on, with each part off, and as raw API calls: programs per second and latency."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.order import turns
from benchmarks.programs.calls import KeptCalls, RawCalls, best_possible_hits, tokenized
from benchmarks.programs.cpu_time import cpu_s
from kvrelay_programs import State
from kvrelay_programs.workloads import Workload
from tests.fakes.stack import Stack

SERVERS: Mapping[str, tuple[str, ...]] = {
    "all on": ("--queue-order", "lpm"),
    "no cache": ("--queue-order", "lpm", "--no-prefix-cache"),
    "table": ("--queue-order", "lpm", "--prefix-lookup", "table"),
    "fcfs": ("--queue-order", "fcfs"),
    "random": ("--queue-order", "random"),
    "no jump-forward": ("--queue-order", "lpm", "--no-jump-forward"),
    "decode may prefill": ("--queue-order", "lpm"),
    "decode prefills": ("--queue-order", "lpm"),
}
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "decode may prefill": {"KVRELAY_LOCAL_PREFILL_TOKENS": ""},
    "decode prefills": {"KVRELAY_LOCAL_PREFILL_TOKENS": "1000000"},
}
"""Variables of `SERVERS` that have some. Of "decode may prefill": the default, by which a decode worker computes
prompts that it is expected to compute sooner, as it has more of them cached. Of "decode prefills": it computes all
prompts that need output. On the other servers, all prompts are handed over."""
CONSTRAINED = frozenset(("self-consistency", "react", "generative-agents", "json"))
FEWER_PROGRAMS = {"multi-turn-long": 4}
ALL_ON, RAW, RAW_NO_CACHE = "all on", "raw calls", "raw calls, no cache"


@dataclass(frozen=True, slots=True)
class Variant:
    """What runs: on one of `SERVERS`, as programs or as raw calls in turn."""

    name: str
    server: str
    is_raw: bool = False
    has_hint: bool = True
    is_parallel: bool = True
    has_prefetch: bool = False


VARIANTS = (
    Variant(ALL_ON, "all on"),
    Variant("traced prefix computed first", "all on", has_prefetch=True),
    Variant("no cache", "no cache"),
    Variant("queue in order of arrival (fcfs)", "fcfs"),
    Variant("queue in random order", "random"),
    Variant("no fork hint", "all on", has_hint=False),
    Variant("no parallel calls", "all on", is_parallel=False),
    Variant("no jump-forward", "no jump-forward"),
    Variant("prompts on decode if that is faster", "decode may prefill"),
    Variant("prompts on decode", "decode prefills"),
    Variant(RAW, "all on", is_raw=True, has_hint=False, is_parallel=False),
    Variant(RAW_NO_CACHE, "no cache", is_raw=True, has_hint=False, is_parallel=False),
)
ALONE = (ALL_ON, "no fork hint", "no parallel calls", RAW, RAW_NO_CACHE)
"""Variants whose latency is measured for one program at a time; queue orders do not matter to it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a variant. Times in seconds. `num_hits` prompt tokens were found in a cache, of `num_best` that could
    be; `cpu_s` is the CPU time of server and client."""

    num_programs: int
    seconds: float
    cpu_s: float
    latency_s: float
    calls: int
    num_prompt: int
    num_hits: int
    num_best: int
    texts: Sequence[str]

    @property
    def programs_per_s(self) -> float:
        return self.num_programs / self.seconds


@dataclass(frozen=True, slots=True)
class Sizes:
    num_programs: int = 16
    concurrency: int = 16
    num_alone: int = 3
    rounds: int = 2
    num_blocks: int = 3000
    seed: int = 0


@contextmanager
def running(names: Sequence[str], model: Path | None, place: Path, flags: Sequence[str]) -> Iterator[dict[str, Stack]]:
    """A stack for each of these `SERVERS`, all at the same time; those that nobody asks idle."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                Stack(
                    model,
                    place / name.replace(" ", "-"),
                    *SERVERS[name],
                    *flags,
                    environ=ENVIRONMENTS.get(name, {}),
                )
            )
            for name in names
        }


class Bench:
    """Runs variants on running servers. `tokenizer` is that of the model, from `transformers`."""

    def __init__(
        self, stacks: Mapping[str, Stack], tokenizer: Any, sizes: Sizes, variants: Sequence[Variant] = VARIANTS
    ) -> None:
        self._stacks, self._tokenizer, self._sizes, self._variants = stacks, tokenizer, sizes, variants
        self._endpoints: dict[str, KeptCalls] = {}
        self._num_runs = 0

    def measure(self, workload: Workload) -> tuple[dict[str, list[Outcome]], dict[str, list[Outcome]]]:
        """Outcomes of each variant by rounds: in a batch, and with one program at a time."""
        sizes = self._sizes
        variants = [
            each
            for each in self._variants
            if each.server in self._stacks and (each.name != "no jump-forward" or workload.name in CONSTRAINED)
        ]
        for variant in variants:  # connections, grammars, code that runs for the first time
            self._run(workload, variant, workload.draw(1, -1), 1)
        num_programs = FEWER_PROGRAMS.get(workload.name, sizes.num_programs)
        alone = [each for each in variants if each.name in ALONE]
        return (
            self._rounds(workload, variants, num_programs, sizes.concurrency, 0),
            self._rounds(workload, alone, min(sizes.num_alone, num_programs), 1, 1000),
        )

    def _rounds(
        self, workload: Workload, variants: Sequence[Variant], num_programs: int, concurrency: int, offset: int
    ) -> dict[str, list[Outcome]]:
        by_name = {variant.name: variant for variant in variants}
        found: dict[str, list[Outcome]] = {name: [] for name in by_name}
        for number, names in enumerate(turns(list(by_name), self._sizes.rounds, "abba", 0)):
            arguments = workload.draw(num_programs, self._sizes.seed + offset + number)
            for name in names:
                found[name].append(self._run(workload, by_name[name], arguments, concurrency))
        return found

    def _run(
        self, workload: Workload, variant: Variant, arguments: Sequence[Mapping[str, Any]], concurrency: int
    ) -> Outcome:
        endpoint = self._endpoint(variant)
        self._num_runs += 1
        endpoint.salt = f"run {self._num_runs}"
        stack = self._stacks[variant.server]
        cpu_before_s, begin = cpu_s(stack), time.perf_counter()
        states = workload.program.run_batch(
            arguments,
            endpoint=endpoint,
            sampling={"temperature": 0},
            num_threads=concurrency,
            parallel=variant.is_parallel,
            fork_hint=variant.has_hint,
            prefetch=variant.has_prefetch,
            progress=False,
        )
        seconds = time.perf_counter() - begin
        return self._outcome(endpoint, states, seconds, cpu_s(stack) - cpu_before_s)

    def _outcome(self, endpoint: KeptCalls, states: Sequence[State], seconds: float, cpu_s: float) -> Outcome:
        calls = tokenized(endpoint.take_calls(), self._tokenizer)
        return Outcome(
            num_programs=len(states),
            seconds=seconds,
            cpu_s=cpu_s,
            latency_s=median(state.elapsed_s or 0.0 for state in states),
            calls=sum(state.usage.calls for state in states),
            num_prompt=sum(state.usage.prompt_tokens for state in states),
            num_hits=sum(state.usage.cached_tokens for state in states),
            num_best=best_possible_hits(calls),
            texts=[state.text() for state in states],
        )

    def _endpoint(self, variant: Variant) -> KeptCalls:
        kind: Callable[[str, str], KeptCalls] = RawCalls if variant.is_raw else KeptCalls
        key = f"{variant.server}, raw" if variant.is_raw else variant.server
        if key not in self._endpoints:
            stack = self._stacks[variant.server]
            self._endpoints[key] = kind(stack.base_url, stack.model)
        return self._endpoints[key]


HEAD = (
    "| variant | programs/s | over raw without cache | CPU s per program | saved | latency alone, s "
    "| over raw without cache | calls | hit rate | of the best | same text |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
)


def table(batch: Mapping[str, Sequence[Outcome]], alone: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Medians over the rounds; ratios are taken within a round."""
    return [*HEAD, *(_line(name, batch, alone) for name in batch)]


def _line(name: str, batch: Mapping[str, Sequence[Outcome]], alone: Mapping[str, Sequence[Outcome]]) -> str:
    outcomes = batch[name]
    base = batch[RAW_NO_CACHE]
    rate = [each.programs_per_s / other.programs_per_s for each, other in zip(outcomes, base, strict=True)]
    latency = speedup = "-"
    if name in alone:
        latency = f"{median(each.latency_s for each in alone[name]):.3f}"
        faster = [b.latency_s / a.latency_s for a, b in zip(alone[name], alone[RAW_NO_CACHE], strict=True)]
        speedup = f"{median(faster):.2f}"
    each_cpu_s = median(each.cpu_s / each.num_programs for each in outcomes)
    saved = median(other.cpu_s / each.cpu_s for each, other in zip(outcomes, base, strict=True))
    num_prompt, num_hits = (sum(getattr(each, field) for each in outcomes) for field in ("num_prompt", "num_hits"))
    num_best, num_texts = sum(each.num_best for each in outcomes), sum(len(each.texts) for each in outcomes)
    same = sum(
        text == other
        for each, complete in zip(outcomes, batch[ALL_ON], strict=True)
        for text, other in zip(each.texts, complete.texts, strict=True)
    )
    return (
        f"| {name} | {median(each.programs_per_s for each in outcomes):.2f} "
        f"| {median(rate):.2f} ({min(rate):.2f} to {max(rate):.2f}) "
        f"| {each_cpu_s:.2f} | {saved:.2f} | {latency} | {speedup} "
        f"| {outcomes[0].calls} | {num_hits / num_prompt:.3f} | {_share(num_hits, num_best)} "
        f"| {same} of {num_texts} |"
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"
