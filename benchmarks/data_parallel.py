"""The prefill delayer in a group with data-parallel attention: throughput and latencies with it on and off.

The group is simulated: the product's step loop, scheduler and delayer run in virtual time on simulated devices. A step
takes as long as the slowest rank's would alone, by the profile. Nothing else costs time, neither the exchange nor the
router. Requests arrive by a Poisson process, in bursts or singly, and go to a rank at random or to the one with the
fewest open tokens. Prompts and outputs are log-normal. The requests are the same in all variants.

Usage: python -m benchmarks.data_parallel [--profile llama3-8b-h100] [--requests 400] [--rates 8 14 40] [--write FILE]
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.simulated_runs import publish
from kvrelay.device_profiles import Profile, find_profile
from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.ranks.lockstep_group import LocalGroup, LocalRank
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.policies.scheduler_registry import make_scheduler
from kvrelay.scheduling.queue.prefill_delay import DelayerSettings, PrefillDelayer
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.simulated.model_facts import read_facts
from kvrelay.simulated.simulated_runner import SimulatedRunner
from kvrelay.worker.launchers import LockstepTimedLauncher
from kvrelay.worker.lockstep_loop import LockstepLoop
from kvrelay.worker.step_loop import StepCallbacks
from tests.fakes.sequences import new_sequence
from tests.fakes.virtual_time import VirtualTimeLoop

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
SIZE, BLOCK_SIZE, MAX_RUNNING, TOKEN_BUDGET = 4, 16, 128, 2048
NOBODY = PeerRef("router", "1", "tcp://nowhere")


@dataclass(frozen=True)
class Arrival:
    at_s: float
    rank: int | None  # None: the one with the fewest open tokens
    num_prompt: int
    num_output: int


@dataclass(frozen=True)
class Variant:
    """`max_delay_passes` 0: no delayer."""

    name: str
    max_delay_passes: int = 0


VARIANTS = (
    Variant("off"),
    Variant("on", 30),
    Variant("on, at most 10 passes", 10),
    Variant("on, at most 100 passes", 100),
)


@dataclass
class Request:
    arrival: Arrival
    tokens_at_s: list[float] = field(default_factory=list)


class Rank:
    """A worker without sockets: a scheduler and its loop on a simulated device."""

    def __init__(self, group: LocalRank, profile: Profile, variant: Variant) -> None:
        num_blocks = profile.kv_tokens // BLOCK_SIZE
        runner = SimulatedRunner(profile, read_facts(str(DEMO)), name="m", block_size=BLOCK_SIZE, num_blocks=num_blocks)
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        cache: Cache = PrefixCache(pool)
        limits = SchedulerLimits(TOKEN_BUDGET, MAX_RUNNING, num_blocks * BLOCK_SIZE, frozenset())
        self.scheduler = make_scheduler("sarathi", limits, pool, cache, SchedulerSettings())
        launcher = partial(LockstepTimedLauncher, group=group)
        self.loop = LockstepLoop(runner, self.scheduler, group=group, make_launcher=launcher)
        if variant.max_delay_passes:
            settings = DelayerSettings(MAX_RUNNING, variant.max_delay_passes, 1.0)
            clock = asyncio.get_running_loop().time
            self.loop.delayer = self.scheduler.admission.prefill_gate = PrefillDelayer(settings, clock)
        group.join(NOBODY, lambda peer, body: None, self.loop.woken)
        self.requests: dict[str, Request] = {}
        self.num_open_tokens = 0
        self.num_finished = 0

    def add(self, name: str, request: Request) -> None:
        self.requests[name] = request
        self.num_open_tokens += request.arrival.num_prompt
        rng = np.random.default_rng(int(name[1:]))
        tokens = rng.integers(10, 2000, request.arrival.num_prompt).tolist()
        sampling = Sampling(temperature=0.0, max_tokens=request.arrival.num_output, ignore_eos=True)
        self.loop.add(new_sequence((name, 1, 0), tokens, sampling, BLOCK_SIZE))

    def committed(self, outputs: list[SequenceOutput]) -> None:
        now = asyncio.get_running_loop().time()
        for output in outputs:
            request = self.requests[output.sequence.key[0]]
            request.tokens_at_s += [now] * len(output.token_ids)
            if output.finish is not None:
                self.num_finished += 1
                self.num_open_tokens -= request.arrival.num_prompt

    def failed(self, sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise AssertionError(cause)

    def callbacks(self) -> StepCallbacks:
        return StepCallbacks(lambda plan: None, self.committed, self.failed)


async def run(arrivals: Seq[Arrival], profile: Profile, variant: Variant) -> tuple[list[Request], list[Rank]]:
    loop, group = asyncio.get_running_loop(), LocalGroup(SIZE)
    ranks = [Rank(each, profile, variant) for each in group.ranks]
    running = [asyncio.create_task(rank.loop.run(rank.callbacks())) for rank in ranks]
    requests = [Request(arrival) for arrival in arrivals]
    for number, request in enumerate(requests):
        await asyncio.sleep(max(0.0, request.arrival.at_s - loop.time()))
        given = request.arrival.rank
        least = min(range(SIZE), key=lambda each: (ranks[each].num_open_tokens, len(ranks[each].scheduler.running)))
        ranks[least if given is None else given].add(f"r{number}", request)
    while sum(rank.num_finished for rank in ranks) < len(requests):
        await asyncio.sleep(0.1)
    for rank in ranks:
        rank.loop.stop()
    await asyncio.gather(*running, return_exceptions=True)
    return requests, ranks


def arrivals_of(number: int, rate: float, *, balanced: bool, burst: int, seed: int = 1) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    at_s = 0.0
    arrivals = []
    for index in range(number):
        if index % burst == 0:
            at_s += float(rng.exponential(burst / rate))
            rank = int(rng.integers(SIZE))
        prompt = int(np.clip(rng.lognormal(np.log(1500), 0.8), 64, 8000))
        output = int(np.clip(rng.lognormal(np.log(200), 0.6), 8, 1000))
        arrivals.append(Arrival(at_s, None if balanced else rank, prompt, output))
    return arrivals


def row(requests: Seq[Request], ranks: Seq[Rank], variant: Variant) -> str:
    ends = max(each.tokens_at_s[-1] for each in requests)
    begins = requests[0].arrival.at_s
    tokens = sum(len(each.tokens_at_s) for each in requests) / (ends - begins)
    first = [each.tokens_at_s[0] - each.arrival.at_s for each in requests]
    gaps = np.concatenate([np.diff(each.tokens_at_s) for each in requests])
    whole = [each.tokens_at_s[-1] - each.arrival.at_s for each in requests]
    per_token = [np.diff(each.tokens_at_s).mean() for each in requests]
    delayer = ranks[0].loop.delayer
    counts = delayer.totals.outcomes if delayer is not None else {}
    total = sum(counts.values()) or 1
    delayed = sum(count for (_, reason), count in counts.items() if reason == "delay") / total
    cells = [
        f"{tokens:.0f}",
        *(f"{np.percentile(first, q):.2f}" for q in (50, 99)),
        *(f"{1e3 * np.percentile(per_token, q):.1f}" for q in (50, 99)),
        f"{1e3 * np.percentile(gaps, 99):.0f}",
        *(f"{np.percentile(whole, q):.1f}" for q in (50, 99)),
        f"{delayed:.2f}" if delayer is not None else "",
    ]
    return f"| {variant.name} | {' | '.join(cells)} |"


HEAD = (
    "| Delayer | Output tokens/s | TTFT p50 (s) | p99 | TPOT p50 (ms) | p99 | Gap p99 (ms) | Latency p50 (s) | p99 | "
    "Passes delayed |\n|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="llama3-8b-h100")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 14.0, 40.0])
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    profile = find_profile(given.profile)
    parts = []
    for rate in given.rates:
        for balanced, burst in ((False, 1), (False, 4), (True, 1)):
            where = "to the least loaded rank" if balanced else "to a rank at random"
            how = "singly" if burst == 1 else f"in bursts of {burst}"
            parts.append(f"\n## {rate:g} requests/s, {how}, {where}\n\n{HEAD}")
            arrivals = arrivals_of(given.requests, rate, balanced=balanced, burst=burst)
            for variant in VARIANTS:
                with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                    found = runner.run(run(arrivals, profile, variant))
                parts.append(row(*found, variant))
                print(parts[-1], flush=True)
    publish("\n".join(parts) + "\n", given.write)


if __name__ == "__main__":
    main()
