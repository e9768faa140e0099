"""The policy `cost`: where a request is expected to be served soonest, with a view to the requests after it.

Prefill: the prompts ahead and the uncached part, in seconds by the worker's own measured speeds, which is what the
request itself feels; and two prices for what others lose by it:

- What another worker holds and this one computes again delays everybody behind it, the more the longer the queues are:
  it costs `BASE_WEIGHT` times its time less once, and up to `MOST_WEIGHT` times as the fleet's mean queue grows against
  it. A prefix that others ask for is worth having twice: computing it again is shared among them, who will ask at the
  same rate again, so it costs less by the square of their number, and a hot prefix spreads before a queue has grown.
- What is computed pushes something else out of that worker's cache, and brings its next turns there: it costs up to
  `BALANCE_WEIGHT` times its time, more on a worker that has had more to compute of late than the mean and less than
  nothing on one that has had less, in proportion to what cached tokens have been good for: where prompts share nothing,
  nothing. So caches of equal size forget at equal ages, together like one large cache, and sessions spread.

As every decision is counted at once, a worker that holds a prefix is chosen until the wait for it is longer than the
price of computing it elsewhere; then it is computed elsewhere, which is how it replicates. Workers between which the
request itself feels no more than `TIE_SHARE` are one choice: the one that has had the least to compute of late takes
it, then they take turns, so that routers that see the same fleet at the same moment do not all run to the same worker.

Decode: what the computation does not hide of the transfer (blocks that it holds need none), and the first tokens in its
batch with the handoffs on their way; workers without room for the prompt come last.

A prompt whose uncached part fits one step of a decode worker stays there, without a handoff, where that is expected
sooner, counting also what it takes from the streams there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvrelay_router.routing.candidates import Candidate, ExpectedLatency
from kvrelay_router.routing.estimates import Estimates

T = TypeVar("T")

TIE_SHARE = 0.05
TIE_S = 1e-4
BASE_WEIGHT = 8.0
QUEUE_WEIGHT = 2.0  # for each time that the mean queue is as long as the longest uncached part
MOST_WEIGHT = 16.0
BALANCE_WEIGHT = 3.0
MOST_IMBALANCE = 0.5


def in_turn(candidates: Sequence[T], ordinal: int) -> list[T]:
    """The candidates, beginning with another one at each decision: `min` takes the first of equals."""
    turn = ordinal % len(candidates)
    return [*candidates[turn:], *candidates[:turn]]


def pick_prefill(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """The worker that has the prompt computed soonest, at the least price for others."""
    waits = [estimates.alone(candidate) for candidate in candidates]
    own = [wait.ttft_s for wait in waits]
    totals = [own_s + price_s for own_s, price_s in zip(own, prices_s(candidates, waits, estimates), strict=True)]
    best_s = min(totals)
    worst_tie_s = best_s + own[totals.index(best_s)] * TIE_SHARE + TIE_S
    ties = [place for place, total_s in enumerate(totals) if total_s <= worst_tie_s]
    chosen = min(in_turn(ties, estimates.demand.ordinal), key=lambda place: candidates[place].recent_tokens)
    worker = candidates[chosen]
    others = [(total_s, candidates[place].worker_id) for place, total_s in enumerate(totals) if place != chosen]
    cached, total = estimates.cached_tokens(worker), estimates.demand.num_prompt_tokens
    reason = (
        f"{worker.worker_id} in {own[chosen]:.4f} s (queue {waits[chosen].queue_s:.4f}, "
        f"{cached} of {total} tokens cached)"
    )
    if not others:
        return worker, reason
    next_s, next_name = min(others)
    return worker, f"{reason}; with its price {totals[chosen]:.4f}, next is {next_name} with {next_s:.4f}"


def prices_s(candidates: Sequence[Candidate], waits: Sequence[ExpectedLatency], estimates: Estimates) -> list[float]:
    """Seconds that placing the request on each costs others; see the module's text. `waits`: its own, there."""
    cached = [estimates.cached_tokens(candidate) for candidate in candidates]
    most_cached = max(cached)
    longest_s = max([wait.compute_s for wait in waits])
    mean_queue_s = sum([wait.queue_s for wait in waits]) / len(candidates)
    weight = min(MOST_WEIGHT, BASE_WEIGHT + QUEUE_WEIGHT * mean_queue_s / max(longest_s, 1e-9))
    mean_recent = sum([candidate.recent_tokens for candidate in candidates]) / len(candidates)
    reuse, shared_by = estimates.demand.reuse, (1 + estimates.demand.popularity) ** 2
    prices = []
    for candidate, num_cached, wait in zip(candidates, cached, waits, strict=True):
        # Both by this worker's speed: what is left of the difference between two workers is what one of them holds.
        compute_s = wait.compute_s
        fresh_s = compute_s if num_cached == most_cached else estimates.compute_s(candidate, most_cached)
        again_s = max(0.0, compute_s - fresh_s) / shared_by
        imbalance = (candidate.recent_tokens - mean_recent) / (mean_recent + 1.0)
        imbalance = max(-MOST_IMBALANCE, min(MOST_IMBALANCE, imbalance))
        balance_s = imbalance * reuse * (fresh_s + again_s)
        prices.append((weight - 1) * again_s + BALANCE_WEIGHT * balance_s)
    return prices


def pick_decode(
    candidates: Sequence[Candidate], prefill: Candidate | None, estimates: Estimates
) -> tuple[Candidate, str]:
    """The worker on which the sequence is expected to go on soonest."""
    compute_s = estimates.compute_s(prefill) if prefill is not None else 0.0

    def key(candidate: Candidate) -> tuple[bool, float, int]:
        if prefill is None:
            wait_s = _alone_s(candidate, estimates)
        else:
            wait_s = estimates.transfer_s(prefill, candidate, compute_s) + estimates.decode_s(candidate)
        return not estimates.has_room(candidate), wait_s, -candidate.num_free_blocks

    chosen = min(in_turn(candidates, estimates.demand.ordinal), key=key)
    reason = (
        f"{chosen.worker_id} with {chosen.num_sequences} sequences ({chosen.num_pending} to come), "
        f"{chosen.num_free_blocks} free blocks, holds {estimates.held_blocks(chosen)} of the prompt's"
    )
    return chosen, reason if estimates.has_room(chosen) else f"{reason}; nobody has room now"


def better_alone(
    handed_over: ExpectedLatency, decode: Candidate, decodes: Sequence[Candidate], estimates: Estimates
) -> tuple[Candidate, str] | None:
    """The decode worker that does better alone than `handed_over` does with `decode`, if there is one.

    Speeds that nobody has measured decide nothing.
    """
    if all(candidate.step_cost is None for candidate in decodes):
        return None
    num_tokens = estimates.demand.num_prompt_tokens
    fitting = [
        c
        for c in decodes
        if num_tokens - estimates.cached_tokens(c) <= estimates.chunk_room(c) and estimates.has_room(c)
    ]
    chosen, least_s = None, handed_over.ttft_s + estimates.decode_s(decode)
    for candidate in in_turn(fitting, estimates.demand.ordinal) if fitting else ():
        if (alone_s := _alone_s(candidate, estimates)) < least_s:
            chosen, least_s = candidate, alone_s
    if chosen is None:
        return None
    alone = estimates.alone(chosen)
    return chosen, (
        f"{num_tokens - estimates.cached_tokens(chosen)} uncached tokens take {chosen.worker_id} {alone.ttft_s:.4f} s "
        f"alone (and its streams {estimates.stall_s(chosen):.4f}), with a handoff {handed_over.ttft_s:.4f} s"
    )


def _alone_s(decode: Candidate, estimates: Estimates) -> float:
    """Without a handoff, counting what it takes from the streams there."""
    alone_s = estimates.queue_s(decode) + estimates.compute_s(decode)
    return alone_s + estimates.stall_s(decode) + estimates.decode_s(decode)
