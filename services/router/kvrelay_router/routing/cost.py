"""The policy `cost`: where a request is expected to be served soonest, with a view to the requests after it.

Prefill: prompts ahead + uncached part, in seconds by the worker's own measured speeds. The uncached part weighs more
than once, for two reasons that the request itself does not feel:

- Work that a cache would have saved delays everybody behind it, the more the longer the queues are: it counts
  `BASE_WEIGHT` times, and up to `MOST_WEIGHT` times as the fleet's mean queue grows against it.
- What is computed pushes something else out of that worker's cache, the sooner the faster that cache has been turning
  over: more on a worker that has had more to compute of late than the mean, less on one that has had less. So caches
  of equal size forget at equal ages, together like one large cache.

As every decision is counted at once, a worker that holds a prefix is chosen until the wait for it is longer than the
weighted time of computing it elsewhere; then it is computed elsewhere, which is how it replicates. A prefix that others
ask for at the same time is worth having twice: computing it again is shared among them, so it counts that much less,
and a hot prefix spreads before a queue has grown. Workers that are
equal within `TIE_SHARE` are one choice: the one with the least queued work takes it, then they take turns, so that
routers that see the same fleet at the same moment do not all run to the same worker. The weights are those with which
benchmarks/routing.py does well over loads from a third of the saturation to nearly all of it.

Decode: what the computation does not hide of the transfer (blocks that it holds need none), and the first tokens in its
batch with the handoffs on their way; workers without room for the prompt come last.

A prompt whose uncached part fits one step of a decode worker stays there, without a handoff, where that is expected
sooner, counting also what it takes from the streams there.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay_router.routing.candidates import Candidate, Expected
from kvrelay_router.routing.estimates import Estimates

TIE_SHARE = 0.05
TIE_S = 1e-4
BASE_WEIGHT = 8.0
QUEUE_WEIGHT = 2.0  # for each time that the mean queue is as long as the longest uncached part
MOST_WEIGHT = 16.0


def in_turn(candidates: Sequence[Candidate], ordinal: int) -> list[Candidate]:
    """The candidates, beginning with another one at each decision: `min` takes the first of equals."""
    turn = ordinal % len(candidates)
    return [*candidates[turn:], *candidates[:turn]]


def pick_prefill(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """The worker that has the prompt computed soonest."""
    times = weighted_times(candidates, estimates)
    best_s = min(times.values())
    ties = [c for c in candidates if times[c.worker_id] <= best_s * (1 + TIE_SHARE) + TIE_S]
    chosen = min(in_turn(ties, estimates.demand.ordinal), key=lambda c: (c.queued_tokens, c.recent_tokens))
    others = [(time_s, name) for name, time_s in times.items() if name != chosen.worker_id]
    next_s, next_name = min(others, default=(0.0, ""))
    cached, total = estimates.cached_tokens(chosen), estimates.demand.num_prompt_tokens
    reason = (
        f"{chosen.worker_id} in {estimates.queue_s(chosen) + estimates.compute_s(chosen):.4f} s "
        f"(queue {estimates.queue_s(chosen):.4f}, {cached} of {total} tokens cached)"
    )
    if not next_name:
        return chosen, reason
    return chosen, f"{reason}; weighted {times[chosen.worker_id]:.4f}, next is {next_name} with {next_s:.4f}"


def weighted_times(candidates: Sequence[Candidate], estimates: Estimates) -> dict[str, float]:
    """Seconds by worker: its queue, and what it would have to compute with its weight; see the module's text."""
    queues = [estimates.queue_s(candidate) for candidate in candidates]
    computes = [estimates.compute_s(candidate) for candidate in candidates]
    mean_queue_s = sum(queues) / len(queues)
    weight = min(MOST_WEIGHT, BASE_WEIGHT + QUEUE_WEIGHT * mean_queue_s / max(max(computes), 1e-9))
    mean_recent = sum(candidate.recent_tokens for candidate in candidates) / len(candidates)
    least_s = min(computes)
    times = {}
    for candidate, queue_s, compute_s in zip(candidates, queues, computes, strict=True):
        pool_tokens = max(1, candidate.num_blocks * candidate.block_size)
        turnover = max(-0.5, min(1.0, (candidate.recent_tokens - mean_recent) / pool_tokens))
        again_s = (compute_s - least_s) / (1 + estimates.demand.heat)
        times[candidate.worker_id] = queue_s + weight * (1 + turnover) * (least_s + again_s)
    return times


def pick_decode(
    candidates: Sequence[Candidate], prefill: Candidate | None, estimates: Estimates
) -> tuple[Candidate, str]:
    """The worker on which the sequence is expected to go on soonest."""

    def key(candidate: Candidate) -> tuple[bool, float, int]:
        return not estimates.has_room(candidate), _decode_s(candidate, prefill, estimates), -candidate.num_free_blocks

    chosen = min(in_turn(candidates, estimates.demand.ordinal), key=key)
    reason = (
        f"{chosen.worker_id} with {chosen.num_sequences} sequences ({chosen.num_pending} to come), "
        f"{chosen.num_free_blocks} free blocks, holds {estimates.held_blocks(chosen)} of the prompt's"
    )
    return chosen, reason if estimates.has_room(chosen) else f"{reason}; nobody has room now"


def better_alone(
    handed_over: Expected, decode: Candidate, decodes: Sequence[Candidate], estimates: Estimates
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
    if not fitting:
        return None

    def total_s(candidate: Candidate) -> float:
        return estimates.alone(candidate).ttft_s + estimates.stall_s(candidate) + estimates.decode_s(candidate)

    chosen = min(in_turn(fitting, estimates.demand.ordinal), key=total_s)
    with_handoff_s = handed_over.ttft_s + estimates.decode_s(decode)
    if total_s(chosen) >= with_handoff_s:
        return None
    alone = estimates.alone(chosen)
    return chosen, (
        f"{num_tokens - estimates.cached_tokens(chosen)} uncached tokens take {chosen.worker_id} {alone.ttft_s:.4f} s "
        f"alone (and its streams {estimates.stall_s(chosen):.4f}), with a handoff {handed_over.ttft_s:.4f} s"
    )


def _decode_s(candidate: Candidate, prefill: Candidate | None, estimates: Estimates) -> float:
    if prefill is None:
        return estimates.alone(candidate).ttft_s + estimates.stall_s(candidate) + estimates.decode_s(candidate)
    return estimates.handed_over(prefill, candidate).transfer_s + estimates.decode_s(candidate)
