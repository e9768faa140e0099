"""The policy `cost`: chooses the workers with the lowest expected latency plus the cost for later requests.

Prefill: the latency is the time for the prompts ahead and for the uncached part of the prompt, by the worker's measured
speeds. Two prices are added:

- Computing again a prefix that another worker has cached delays all later requests. The price is `BASE_WEIGHT - 1`
  times the computation, and rises to `MOST_WEIGHT - 1` times as the fleet's mean queue grows. If other requests use the
  same prefix, they profit from a second copy, so the price is divided by the square of their number: a popular prefix
  spreads before a queue has formed.
- Computed blocks evict other blocks, and later requests of the session come to this worker. The price is up to
  `BALANCE_WEIGHT` times the computation on workers that computed more than the mean lately, and negative on workers
  that computed less. It is multiplied by the share of prompt tokens that caches have saved lately. So caches of equal
  size evict blocks of equal age, like one large cache, and sessions spread over the workers.

Each decision is counted at once. A worker that holds a prefix is chosen until waiting for it costs more than computing
the prefix elsewhere; then another worker computes it, and the prefix has a second copy. Workers whose latencies differ
by `TIE_SHARE` at most are equal. Of these, the worker of the session's latest request is chosen: it has the session's
newest output, which the prefix index reports later. Otherwise the one that computed least lately is chosen, and then
they take turns: routers with the same view of the fleet should not all choose the same worker.

Decode: the latency is the part of the transfer that does not overlap with the computation (cached blocks need no
transfer), and the time of the first tokens in the worker's batch, with the handoffs on their way. Workers without room
for the prompt come last.

A prompt is computed on a decode worker, without a handoff, if that is expected to be faster, including
`STREAM_DELAY_WEIGHT` times the delay of all streams there. Decode workers thus compute prompts that arrive faster than
the prefill workers compute them, and short prompts need no handoff. Its chunks share steps with the decodes: the gap
between two tokens stays within a step of the token budget, however long the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvrelay_router.routing.estimates import Candidate, Estimates, ExpectedLatency

T = TypeVar("T")

TIE_SHARE = 0.05
TIE_S = 1e-4
BASE_WEIGHT = 8.0
QUEUE_WEIGHT = 2.0  # per multiple of the longest uncached part in the mean queue
MOST_WEIGHT = 16.0
BALANCE_WEIGHT = 3.0
MOST_IMBALANCE = 0.5
STREAM_DELAY_WEIGHT = 0.25
"""A second by which a running stream ends later, against a second of a prompt's wait. The delay is spread over many
tokens. On two traces at seven loads, simulated, 0.1 to 0.25 gave nearly the TTFT of 0 at nearly the TPOT of 1."""


def in_turn(candidates: Sequence[T], ordinal: int) -> list[T]:
    """Rotates the candidates by one at each decision, because `min` returns the first of equals."""
    turn = ordinal % len(candidates)
    return [*candidates[turn:], *candidates[:turn]]


def pick_prefill(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """Returns the worker with the lowest sum of latency and price, and the reason."""
    waits = [estimates.alone(candidate) for candidate in candidates]
    own = [wait.ttft_s for wait in waits]
    totals = [own_s + price_s for own_s, price_s in zip(own, prices_s(candidates, waits, estimates), strict=True)]
    best_s = min(totals)
    worst_tie_s = best_s + own[totals.index(best_s)] * TIE_SHARE + TIE_S
    ties = [place for place, total_s in enumerate(totals) if total_s <= worst_tie_s]
    of_session = estimates.demand.session_workers

    def preference(place: int) -> tuple[bool, float]:
        return candidates[place].worker_id not in of_session, candidates[place].recent_tokens

    chosen = min(in_turn(ties, estimates.demand.ordinal), key=preference)
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
    """Returns the price of each candidate in seconds. `waits` are the request's own latencies there."""
    cached = [estimates.cached_tokens(candidate) for candidate in candidates]
    most_cached = max(cached)
    longest_s = max([wait.compute_s for wait in waits])
    mean_queue_s = sum([wait.queue_s for wait in waits]) / len(candidates)
    weight = min(MOST_WEIGHT, BASE_WEIGHT + QUEUE_WEIGHT * mean_queue_s / max(longest_s, 1e-9))
    mean_recent = sum([candidate.recent_tokens for candidate in candidates]) / len(candidates)
    reuse, shared_by = estimates.demand.reuse, (1 + estimates.demand.popularity) ** 2
    prices = []
    for candidate, num_cached, wait in zip(candidates, cached, waits, strict=True):
        # Both use this worker's speed, so the difference between two workers comes from their caches alone.
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
    """Returns the worker with the lowest expected latency, and the reason."""
    compute_s = estimates.compute_s(prefill) if prefill is not None else 0.0

    def key(candidate: Candidate) -> tuple[bool, float, int]:
        if prefill is None:
            wait_s = _alone_s(candidate, estimates)
        else:
            wait_s = estimates.transfer_s(prefill, candidate, compute_s) + estimates.decode_s(candidate)
        return not estimates.has_room(candidate, prefill), wait_s, -candidate.num_free_blocks

    chosen = min(in_turn(candidates, estimates.demand.ordinal), key=key)
    for candidate in candidates:
        if candidate.worker_id in estimates.demand.session_workers:
            (is_full, least_s, _), (would_be_full, wait_s, _) = key(chosen), key(candidate)
            if is_full == would_be_full and wait_s <= least_s * (1 + TIE_SHARE) + TIE_S:
                chosen = candidate
    reason = (
        f"{chosen.worker_id} with {chosen.num_sequences} sequences ({chosen.num_pending} to come), "
        f"{chosen.num_free_blocks} free blocks, holds {estimates.held_blocks(chosen, prefill)} of the prompt's"
    )
    return chosen, reason if estimates.has_room(chosen, prefill) else f"{reason}; no worker has room now"


def better_alone(
    handed_over: ExpectedLatency, decode: Candidate, decodes: Sequence[Candidate], estimates: Estimates
) -> tuple[Candidate, str] | None:
    """Returns a decode worker that is faster alone than `handed_over` with `decode`, or None.

    Returns None if no worker has measured its speed. A decode worker that has had no prompts has measured nothing.
    Its speed is then estimated from the other workers, which run the same model.
    """
    if not estimates.typical.is_measured:
        return None
    num_tokens = estimates.demand.num_prompt_tokens
    fitting = [candidate for candidate in decodes if estimates.has_room(candidate, None)]
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
    """The latency without a handoff, plus the weighted delay of the streams there."""
    alone_s = estimates.queue_s(decode) + estimates.compute_s(decode)
    return alone_s + STREAM_DELAY_WEIGHT * estimates.stall_s(decode) + estimates.decode_s(decode)
