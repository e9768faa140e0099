"""Every scheduler on the same trace: time to first token, per output token, worst gap, throughput, waste.

A simulation (one worker of `kvrelay_simulator` that does both phases): the real schedulers, pool and cache, and steps
of a linear cost (so much a step, a token, and a pair of a token and what it attends to: roughly a model of 8 billion
parameters on one data-centre GPU).
It shows what the policies do, not what a machine does.

The synthetic trace: Poisson arrivals; prompts are log-normal (median 400 tokens, one in 20 about 6,000), half of them
begin with one of 8 shared prefixes of 256 tokens; outputs are log-normal (median 120). A trace file is one of
those that `kvrelay simulate` reads. What cannot fit `--max-model-len` is cut.

- TTFT: from arrival to the first token. TPOT: a request's mean gap between tokens. Worst gap: a request's longest.
- Throughput: prompt and output tokens over the time from the first arrival to the last token.
- Hit rate: prompt tokens that were not computed, less those that a preemption had computed again.
- Waste: token slots that are allocated and hold nothing, in the mean over time, as a share of the allocated.

Usage: python -m benchmarks.schedulers [--rates 6 14] [--requests 600] [--trace FILE] [--queue-order fcfs]
    [--write benchmarks/results/schedulers.md]
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from kvrelay.kv.cache import Cache
from kvrelay.kv.hashing import hash_blocks, root_hash
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.policies.scheduler_registry import BUILT_IN
from kvrelay.scheduling.scheduler_settings import Chunking, QueueOrderName
from kvrelay.simulated.profiles import MeasuredProfile
from kvrelay_simulator.clock import VirtualClock
from kvrelay_simulator.traces import Tokens, read_trace
from kvrelay_simulator.workers import FINGERPRINT, SimulatedDecode, WorkerSettings
from kvrelay_simulator.workers import Request as Sent

BLOCK_SIZE = 16
COST = MeasuredProfile(
    name="benchmark",
    fixed_s=6e-3,
    token_s=4e-5,
    pair_s=4e-9,
    kv_bytes_per_token=1,
    kv_tokens=1,
    transfer_bytes_s=1.0,
)
CASES: list[tuple[str, Chunking]] = [("sarathi", "fixed"), ("sarathi", "dynamic")]
CASES += [(name, "fixed") for name in BUILT_IN if name != "sarathi"]


@dataclass(slots=True)
class Request:
    """One request and when its tokens came; times in seconds."""

    arrival_s: float
    prompt: Tokens
    num_output: int
    token_times_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """One run. `wasted` and `allocated`: token slots times seconds."""

    requests: list[Request]
    seconds: float = 0.0
    num_preemptions: int = 0
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    wasted: float = 0.0
    allocated: float = 0.0


def synthetic_trace(num_requests: int, rate: float, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, 50_000, (8, 256))
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests))
    requests = []
    for arrival_s in arrivals:
        median = 6000 if rng.random() < 0.05 else 400
        length = int(np.clip(rng.lognormal(np.log(median), 0.6), 16, 16_000))
        tokens = rng.integers(0, 50_000, length)
        if rng.random() < 0.5:
            tokens = np.concatenate([prefixes[rng.integers(8)], tokens])
        num_output = int(np.clip(rng.lognormal(np.log(120), 0.7), 2, 1000))
        requests.append(Request(float(arrival_s), tokens.astype(np.int32), num_output))
    return requests


def traced(path: Path, num_requests: int) -> list[Request]:
    """The first requests of a trace file. Raises BadTrace."""
    trace = read_trace(path, num_requests)
    return [Request(each.arrival_s, each.tokens(), each.num_output_tokens) for each in trace]


def fitted(requests: Iterable[Request], max_model_len: int) -> list[Request]:
    """Requests by arrival, cut to what a sequence may be: the output to half of it at most."""
    cut = []
    for request in sorted(requests, key=lambda each: each.arrival_s):
        num_output = min(request.num_output, max_model_len // 2)
        cut.append(Request(request.arrival_s, request.prompt[: max_model_len - num_output], num_output))
    return cut


class OneWorker(SimulatedDecode):
    """A worker that does both phases; counts what the tables show."""

    def __init__(self, settings: WorkerSettings, requests: list[Request]) -> None:
        super().__init__("worker", COST, settings, VirtualClock())
        self.measured = Measured([Request(r.arrival_s, r.prompt, r.num_output) for r in requests])

    def run(self, max_tokens: int) -> Measured:
        """Until the last token. `max_tokens`: what every request allows; 0: what it draws."""
        measured, size = self.measured, self.settings.block_size
        sent = []
        for number, each in enumerate(measured.requests):
            allowed = min(max_tokens, self.settings.max_model_len - len(each.prompt))
            hashes = hash_blocks(root_hash(model=FINGERPRINT), each.prompt, size)
            sent.append(Sent(number, each.arrival_s, each.prompt, hashes, each.num_output, max_tokens=allowed))
            self.clock.at(each.arrival_s, partial(self.accept, sent[-1]))
        while self.clock.step():
            pass
        assert not self.requests, "work waits and nothing runs"
        measured.seconds = self.clock.now_s - measured.requests[0].arrival_s
        measured.num_preemptions = self.scheduler.num_preemptions
        measured.num_cached = sum(request.num_cached_tokens for request in sent)
        return measured

    def began(self, plan: StepPlan, step_s: float) -> None:
        super().began(plan, step_s)
        use = self.scheduler.blocks.slot_use(self.scheduler.running.values())
        self.measured.num_computed += plan.num_prefill_tokens
        self.measured.wasted += use.wasted * step_s
        self.measured.allocated += use.allocated * step_s

    def committed(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if output.token_ids:
                self.measured.requests[int(output.sequence.key[0])].token_times_s.append(self.clock.now_s)
        super().committed(outputs)


def simulate(
    requests: list[Request],
    arguments: argparse.Namespace,
    scheduler: str,
    chunking: Chunking = "fixed",
    make_cache: Callable[[BlockPool], Cache] = PrefixCache,
) -> Measured:
    """The requests on one worker. `arguments`: as `main` parses them."""
    settings = WorkerSettings(
        block_size=BLOCK_SIZE,
        decode_token_budget=arguments.token_budget,
        max_running=arguments.max_running,
        max_model_len=arguments.max_model_len,
        scheduler=scheduler,
        queue_order=arguments.queue_order,
        chunking=chunking,
        new_token_ratio=arguments.new_token_ratio,
        kv_tokens=arguments.num_blocks * BLOCK_SIZE,
        make_cache=make_cache,
    )
    return OneWorker(settings, requests).run(arguments.max_tokens)


def figures(measured: Measured) -> list[str]:
    """A row of the table."""
    ttft = [r.token_times_s[0] - r.arrival_s for r in measured.requests]
    gaps = [np.diff(r.token_times_s) for r in measured.requests if len(r.token_times_s) > 1]
    tpot = [float(g.mean()) for g in gaps]
    worst = [float(g.max()) for g in gaps]
    num_tokens = sum(len(r.prompt) + len(r.token_times_s) for r in measured.requests)
    num_prompt = sum(len(r.prompt) for r in measured.requests)
    return [
        f"{np.median(ttft):.2f}",
        f"{np.percentile(ttft, 99):.2f}",
        f"{1e3 * np.median(tpot):.0f}",
        f"{1e3 * np.percentile(tpot, 99):.0f}",
        f"{1e3 * np.median(worst):.0f}",
        f"{1e3 * np.percentile(worst, 99):.0f}",
        f"{num_tokens / measured.seconds:,.0f}",
        f"{measured.wasted / measured.allocated:.1%}",
        f"{1 - measured.num_computed / num_prompt:.1%}",
        f"{measured.num_preemptions}",
    ]


HEAD = """# Schedulers on one trace

Simulated: the clock is a cost model's, so nothing depends on the machine ({machine}, CPython {python}).
Repeat with `python -m benchmarks.schedulers`; the script's head says what is measured. {blocks} blocks of {size}
tokens, token budget {budget}, at most {running} running, queue order {order}, max_tokens {max_tokens}, new-token
ratio {ratio:g}. TTFT in seconds, TPOT and worst gap in milliseconds.
"""

COLUMNS = ["scheduler", "chunks", "TTFT, median", "p99", "TPOT, median", "p99", "worst gap, median", "p99"]
COLUMNS += ["tokens/s", "waste", "hit rate", "preemptions"]


def table(title: str, requests: list[Request], arguments: argparse.Namespace) -> str:
    """All schedulers on the same requests."""
    num_prompt = np.mean([len(request.prompt) for request in requests])
    num_output = np.mean([request.num_output for request in requests])
    lines = [
        f"## {title}",
        "",
        f"{len(requests)} requests, in the mean of {num_prompt:.0f} prompt and {num_output:.0f} output tokens.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|" + "---:|" * (len(COLUMNS) - 2),
    ]
    for name, chunking in CASES:
        measured = simulate(requests, arguments, name, chunking)
        lines.append(f"| {name} | {chunking} | {' | '.join(figures(measured))} |")
    return "\n".join(lines) + "\n"


def report(arguments: argparse.Namespace) -> str:
    head = HEAD.format(
        machine=f"{platform.machine()} with {os.cpu_count()} cores",
        python=platform.python_version(),
        blocks=arguments.num_blocks,
        size=BLOCK_SIZE,
        budget=arguments.token_budget,
        running=arguments.max_running,
        order=arguments.queue_order,
        ratio=arguments.new_token_ratio,
        max_tokens=arguments.max_tokens or "what a request draws",
    )
    if arguments.trace:
        traces = {f"Trace {arguments.trace.name}": traced(arguments.trace, arguments.requests)}
    else:
        traces = {
            f"Synthetic, {rate:g} requests a second": synthetic_trace(arguments.requests, rate, arguments.seed)
            for rate in arguments.rates
        }
    tables = [table(title, fitted(each, arguments.max_model_len), arguments) for title, each in traces.items()]
    return "\n".join([head, *tables])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rates", type=float, nargs="+", default=[6.0, 14.0], help="synthetic requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--queue-order", choices=get_args(QueueOrderName), default="fcfs")
    parser.add_argument("--new-token-ratio", type=float, default=0.0)
    parser.add_argument("--token-budget", type=int, default=512)
    parser.add_argument("--max-running", type=int, default=128)
    parser.add_argument("--num-blocks", type=int, default=6000)
    parser.add_argument("--max-model-len", type=int, default=16_384)
    parser.add_argument("--max-tokens", type=int, default=1024, help="what every request allows; 0: what it draws")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    text = report(arguments)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
