"""Fair shares: what a light client gets beside a client that floods the fleet.

Virtual time (`kvrelay simulate`): real schedulers, router view, placement and load counting. The flood sends more than
the fleet can serve during the whole run. The light client is measured alone, beside the flood as a tenant of its own,
and beside the same flood as one tenant with it, which is first come first served for both.

Shares decide who is next. A step that runs is not interrupted, nothing is taken back from running sequences, and a step
computes the requests of all tenants together: what remains of the difference to alone is the rest of the step that
runs, the wait for a free slot, and longer decode steps. So each flood is also measured with smaller steps: a smaller
token budget for prompts, fewer running sequences for outputs.

Beside alone, the light client is measured alone on devices of half the speed (steps and transfers take twice as long):
the equal share of two tenants that do not batch together.

- TTFT, end to end and gap in seconds, 90th percentile of the light client's requests; in brackets the ratio to alone.
  The gap is a request's mean time between two tokens, from its first to its last.
- tokens/s of the flood: prompt and output tokens of its requests that finished while it was sending.
- preempted: preemptions on all workers, until the last request has ended.

Usage: python -m benchmarks.fairness [--seconds 60] [--write FILE]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvrelay.device_profiles import Roofline, StepLoad, find_profile
from kvrelay_bench.traces import HASH_TOKENS, TracedRequest
from kvrelay_simulator.fleet import FleetSettings, SimulatedFleet
from kvrelay_simulator.workers import Request, WorkerSettings

PROFILE = "llama3-8b-h100"
DEFAULTS = WorkerSettings()


@dataclass(frozen=True, slots=True)
class Client:
    """Poisson arrivals of `rate` requests a second; prompts in pieces of 512 tokens, which share nothing."""

    rate: float
    num_pieces: int
    num_output: int

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s of {self.num_pieces * HASH_TOKENS:,} + {self.num_output:,} tokens"


@dataclass(frozen=True, slots=True)
class FairnessCase:
    """`num_prefill` and `num_decode` workers; without prefill workers decode computes the prompts."""

    name: str
    num_prefill: int
    num_decode: int
    light: Client
    flood: Client
    settings: WorkerSettings = DEFAULTS


LIGHT, LONG_PROMPTS, LONG_OUTPUTS = Client(1.0, 2, 64), Client(20.0, 16, 32), Client(60.0, 1, 512)
FEWER_LONG_OUTPUTS = Client(10.0, 1, 512)
SMALL_POOL = WorkerSettings(kv_tokens=32_768, prefill_token_budget=512)
SHORT_CHUNKS = WorkerSettings(prefill_token_budget=512)
FEW_RUNNING = WorkerSettings(max_running=32)
SHORT_STEPS = WorkerSettings(max_running=32, prefill_token_budget=512)
CASES = (
    FairnessCase("long prompts", 1, 1, LIGHT, LONG_PROMPTS),
    FairnessCase("long prompts, steps of 512 tokens", 1, 1, LIGHT, LONG_PROMPTS, SHORT_CHUNKS),
    FairnessCase("long prompts, four workers, steps of 512 tokens", 2, 2, LIGHT, Client(40.0, 16, 32), SHORT_CHUNKS),
    FairnessCase("long outputs", 1, 1, LIGHT, LONG_OUTPUTS),
    FairnessCase("long outputs, 32 running", 1, 1, LIGHT, LONG_OUTPUTS, FEW_RUNNING),
    FairnessCase("long outputs, 32 running, steps of 512 tokens", 1, 1, LIGHT, FEWER_LONG_OUTPUTS, SHORT_STEPS),
    FairnessCase("long outputs, KV of 32,768 tokens", 1, 1, LIGHT, FEWER_LONG_OUTPUTS, SMALL_POOL),
    FairnessCase("long outputs that fill the prefill worker's KV too", 1, 1, LIGHT, Client(20.0, 1, 512), SMALL_POOL),
    FairnessCase("decode computes prompts", 0, 1, LIGHT, Client(20.0, 8, 64)),
    FairnessCase(
        "decode computes prompts, steps of 128 tokens",
        0,
        1,
        LIGHT,
        Client(20.0, 8, 64),
        WorkerSettings(decode_token_budget=128, max_running=32),
    ),
)


class HalfSpeed(Roofline):
    """A profile of half the speed."""

    @property
    def transfer_bytes_s(self) -> float:
        return super().transfer_bytes_s / 2

    def step_s(self, load: StepLoad) -> float:
        return 2 * super().step_s(load)


@dataclass(frozen=True, slots=True)
class Figures:
    """The light client's 90th percentiles in seconds, and the tokens a second of the flood."""

    ttft_s: float
    whole_s: float
    gap_s: float
    flood_tokens_s: float
    num_preemptions: int


def requests_of(client: Client, tenant: str, seconds: float, pieces: Iterator[int], seed: int) -> list[TracedRequest]:
    gaps = np.random.default_rng(seed).exponential(1 / client.rate, int(2 * client.rate * seconds) + 16)
    arrivals = [at for at in np.cumsum(gaps).tolist() if at < seconds]
    return [
        TracedRequest(
            at,
            client.num_pieces * HASH_TOKENS,
            client.num_output,
            tuple(next(pieces) for _ in range(client.num_pieces)),
            tenant=tenant,
        )
        for at in arrivals
    ]


def measure(
    case: FairnessCase, seconds: float, *, flooded: bool, shared: bool = False, halved: bool = False
) -> Figures:
    """`shared`: both clients are one tenant. `halved`: on devices of half the speed."""
    pieces = itertools.count()
    light = requests_of(case.light, "light", seconds, pieces, seed=1)
    flood = requests_of(case.flood, "flood", seconds, pieces, seed=2) if flooded else []
    trace = sorted([*light, *flood], key=lambda request: request.arrival_s)
    profile = find_profile(PROFILE)
    assert isinstance(profile, Roofline)
    if halved:
        profile = HalfSpeed(profile.model, profile.device, profile.stage_size, profile.num_stages)
    settings = FleetSettings(profile, case.num_prefill, case.num_decode, workers=case.settings)
    is_light = [request.tenant == "light" for request in trace]
    fleet = SimulatedFleet(settings)
    done = fleet.run([replace(request, tenant="") for request in trace] if shared else trace)
    fleet.check_integrity()
    of_light = [request for request, light in zip(done, is_light, strict=True) if light]
    of_flood = [request for request, light in zip(done, is_light, strict=True) if not light]
    return Figures(
        p90([_at(request.first_token_s) - request.arrival_s for request in of_light]),
        p90([_at(request.finished_s) - request.arrival_s for request in of_light]),
        p90([(_at(each.finished_s) - _at(each.first_token_s)) / (each.num_output - 1) for each in of_light]),
        sum(_num_tokens(request) for request in of_flood if _at(request.finished_s) < seconds) / seconds,
        sum(worker.scheduler.num_preemptions for worker in fleet.workers.values()),
    )


def p90(values: Sequence[float]) -> float:
    return float(np.percentile(values, 90))


def _at(moment_s: float | None) -> float:
    assert moment_s is not None, "every request ends"
    return moment_s


def _num_tokens(request: Request) -> int:
    return len(request.tokens) + request.num_output


def report(cases: Sequence[FairnessCase], seconds: float) -> str:
    lines = [
        "# Fair shares beside a flood",
        "",
        f"Simulated: profile `{PROFILE}`, {seconds:g} s of virtual time, so nothing depends on the machine. Repeat "
        "with `python -m benchmarks.fairness`; the script's head says what is measured. *Shares*: the two clients are "
        "two tenants. *One tenant*: the same load without shares.",
    ]
    for case in cases:
        alone, half = (measure(case, seconds, flooded=False, halved=halved) for halved in (False, True))
        shares, one = (measure(case, seconds, flooded=True, shared=shared) for shared in (False, True))
        lines += ["", f"## {case.name}: {case.num_prefill} prefill, {case.num_decode} decode", ""]
        lines += [f"Light: {case.light}. Flood: {case.flood}.", ""]
        lines.append("| | TTFT p90 | gap p90 | end to end p90 | flood, tokens/s | preempted |")
        lines.append("|---|---:|---:|---:|---:|---:|")
        for name, found in (("alone", alone), ("alone, half speed", half), ("shares", shares), ("one tenant", one)):
            ttft = f"{found.ttft_s:.3f} ({found.ttft_s / alone.ttft_s:.2f})"
            whole = f"{found.whole_s:.3f} ({found.whole_s / alone.whole_s:.2f})"
            gap = f"{found.gap_s:.4f} ({found.gap_s / alone.gap_s:.2f})"
            lines.append(
                f"| {name} | {ttft} | {gap} | {whole} | {found.flood_tokens_s:,.0f} | {found.num_preemptions:,} |"
            )
        print("\n".join(lines[-10:]), flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.fairness", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--write", type=Path, help="a Markdown file for the tables")
    arguments = parser.parse_args()
    text = report(CASES, arguments.seconds)
    if arguments.write is not None:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
