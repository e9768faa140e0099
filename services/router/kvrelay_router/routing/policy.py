"""Places a request: a pure function of the request, the fleet and the cached prefixes.

This file decides which workers are eligible, in the same way for all policies: prefill and decode must have the same
fingerprint, workers on which an attempt failed are avoided, and workers are preferred that round as those before them
in the request. The policy `cost` (`cost.py`) chooses among the eligible workers, or one of these, which are for
comparison and for special fleets:

- `random` uses the request's id as its seed.
- `round_robin` takes turns.
- `least_loaded` takes the prefill worker with the fewest queued prompt tokens, and the decode worker with the fewest
  sequences, then with the most free blocks.
- `prefix_only` takes the worker with the longest cached prefix, however long its queue is. Equal workers take turns.
- `sticky` sends requests of one session, user or prompt beginning to one worker by rendezvous hashing (Thaler and
  Ravishankar, 1998): if a worker joins or leaves, only its own share moves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Literal, get_args

import msgspec

from kvrelay.excerpts import quoted
from kvrelay_router.routing.cost import better_alone, in_turn, pick_decode, pick_prefill
from kvrelay_router.routing.estimates import (
    CachedBlocks,
    Candidate,
    CandidateWorkers,
    Decision,
    Demand,
    Estimates,
    ExpectedLatency,
    NoPlacement,
    TypicalSpeeds,
)

PolicyName = Literal["cost", "least_loaded", "round_robin", "random", "prefix_only", "sticky"]
Picker = Callable[[Sequence[Candidate], Estimates], tuple[Candidate, str]]
NOTHING_CACHED: CachedBlocks = {}


def decide(
    policy: PolicyName,
    demand: Demand,
    candidates: CandidateWorkers,
    cached_blocks: CachedBlocks = NOTHING_CACHED,
    arriving_blocks: CachedBlocks = NOTHING_CACHED,
) -> Decision | NoPlacement:
    """Places a request. `arriving_blocks`: those of handoffs that are on their way.

    A request of one token goes to prefill alone. A short prompt goes to decode alone, and so does any prompt if no
    prefill worker has a decode worker's fingerprint, or after a handoff that did not come about. All others go to a
    prefill and a decode worker.
    """
    estimates = Estimates(demand, TypicalSpeeds.of(candidates), cached_blocks, arriving_blocks)
    if not demand.needs_decode and candidates.prefill:
        prefill, reason = _pick_prefill(policy, candidates.prefill, estimates)
        reasons = ("at most one token is to come: prefill alone", f"prefill: {reason}")
        return _decision(policy, prefill, None, reasons, estimates.alone(prefill), estimates)
    if not candidates.decode:
        missing = "no decode worker is ready" if candidates.prefill else "no worker is ready"
        return NoPlacement(missing)
    threshold = demand.local_prefill_tokens
    if demand.needs_decode and threshold is not None and demand.num_prompt_tokens <= threshold:
        short = f"the prompt's {demand.num_prompt_tokens} tokens are at most local_prefill_tokens: decode alone"
        return _decode_alone(policy, candidates.decode, estimates, short)
    prefills = _with_fingerprint(candidates.prefill, {decode.fingerprint for decode in candidates.decode})
    if not prefills:
        missing = "no prefill worker goes with a decode worker" if candidates.prefill else "no prefill worker is ready"
        alone = _decode_alone(policy, candidates.decode, estimates, f"{missing}: decode alone")
        return msgspec.structs.replace(alone, is_fallback=True)
    if not demand.hands_over:
        return _decode_alone(policy, candidates.decode, estimates, "no handoff of the request came about: decode alone")
    return _both(policy, prefills, candidates.decode, estimates)


def decide_decode(
    policy: PolicyName,
    demand: Demand,
    candidates: CandidateWorkers,
    fingerprint: str,
    cached_blocks: CachedBlocks = NOTHING_CACHED,
    arriving_blocks: CachedBlocks = NOTHING_CACHED,
) -> Candidate | None:
    """Returns another decode worker for a handoff. The unreachable one must not be among the candidates.
    `demand.numerics` are those of the prefill worker."""
    fitting = _with_fingerprint(candidates.decode, {fingerprint})
    if not fitting:
        return None
    estimates = Estimates(demand, TypicalSpeeds.of(candidates), cached_blocks, arriving_blocks)
    return _pick_decode(policy, fitting, None, estimates)[0]


def _both(
    policy: PolicyName, prefills: Sequence[Candidate], decodes: Sequence[Candidate], estimates: Estimates
) -> Decision:
    prefill, prefill_reason = _pick_prefill(policy, prefills, estimates)
    fitting = _with_fingerprint(decodes, {prefill.fingerprint})
    decode, decode_reason = _pick_decode(policy, fitting, prefill, estimates)
    expected = estimates.handed_over(prefill, decode)
    if policy == "cost" and estimates.demand.local_prefill_tokens is None:
        eligible, _ = _eligible(decodes, estimates.demand, estimates.demand.numerics)
        if (alone := better_alone(expected, decode, eligible, estimates)) is not None:
            worker, reason = alone
            return _decision(policy, None, worker, (f"decode alone: {reason}",), estimates.alone(worker), estimates)
    reasons = (f"prefill: {prefill_reason}", f"decode: {decode_reason}")
    return _decision(policy, prefill, decode, reasons, expected, estimates)


def _decode_alone(policy: PolicyName, decodes: Sequence[Candidate], estimates: Estimates, why: str) -> Decision:
    decode, reason = _pick_decode(policy, decodes, None, estimates)
    return _decision(policy, None, decode, (why, f"decode: {reason}"), estimates.alone(decode), estimates)


def _decision(
    policy: PolicyName,
    prefill: Candidate | None,
    decode: Candidate | None,
    reasons: tuple[str, ...],
    expected: ExpectedLatency,
    estimates: Estimates,
) -> Decision:
    computes = prefill or decode
    return Decision(
        prefill,
        decode,
        policy,
        reasons,
        expected=expected,
        num_cached_tokens=estimates.cached_tokens(computes) if computes is not None else 0,
        num_cached_blocks=estimates.held_blocks(decode, prefill) if decode is not None else 0,
    )


def _pick_prefill(policy: PolicyName, workers: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    workers, preference = _eligible(workers, estimates.demand, estimates.demand.numerics)
    chosen, reason = pick_prefill(workers, estimates) if policy == "cost" else _PICKERS[policy](workers, estimates)
    return chosen, f"{reason}{preference}"


def _pick_decode(
    policy: PolicyName, workers: Sequence[Candidate], prefill: Candidate | None, estimates: Estimates
) -> tuple[Candidate, str]:
    demand, every = estimates.demand, workers
    workers, preference = _eligible(every, demand, demand.numerics if prefill is None else prefill.numerics)
    if not demand.numerics and not any(estimates.has_room(each, prefill) for each in workers):
        # Else the last workers of an old version, while a fleet is replaced, would get all requests.
        workers, preference = _eligible(every, demand, "")
    if policy == "cost":
        chosen, reason = pick_decode(workers, prefill, estimates)
    else:
        chosen, reason = _PICKERS[policy](workers, estimates)
    return chosen, f"{reason}{preference}"


def _with_fingerprint(candidates: Iterable[Candidate], fingerprints: set[str]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.fingerprint in fingerprints]


def _eligible(candidates: Sequence[Candidate], demand: Demand, numerics: str) -> tuple[Sequence[Candidate], str]:
    """Returns the workers that are not avoided, and of these the ones with the wanted numerics; all, if there are none.
    Also returns the end of a reason, which is empty if numerics left out no worker."""
    if demand.avoid:
        candidates = [each for each in candidates if each.worker_id not in demand.avoid] or candidates
    alike = [each for each in candidates if each.numerics == numerics] if numerics else []
    if not alike or len(alike) == len(candidates):
        return candidates, ""
    return alike, f"; of {len(candidates)} workers, {len(alike)} with numerics {numerics} are preferred"


def _least_loaded(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    turns = in_turn(candidates, estimates.demand.ordinal)
    if candidates[0].role == "prefill":
        chosen = min(turns, key=lambda candidate: candidate.queued_tokens)
        return chosen, f"{chosen.worker_id} has the fewest prompt tokens ahead, {chosen.queued_tokens}"
    chosen = min(turns, key=lambda candidate: (candidate.num_sequences, -candidate.num_free_blocks))
    return chosen, (
        f"{chosen.worker_id} has the fewest sequences, {chosen.num_sequences}, and {chosen.num_free_blocks} free blocks"
    )


def _round_robin(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    turn = estimates.demand.ordinal % len(candidates)
    return candidates[turn], f"{candidates[turn].worker_id} is next, number {turn + 1} of {len(candidates)}"


def _random(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    demand = estimates.demand
    seed = f"{demand.request_id}/{demand.ordinal}/{candidates[0].role}"
    draw = random.Random(seed).randrange(len(candidates))
    return candidates[draw], f"{candidates[draw].worker_id} was chosen at random out of {len(candidates)}"


def _prefix_only(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    turns = in_turn(candidates, estimates.demand.ordinal)
    chosen = max(turns, key=lambda worker: estimates.held_blocks(worker, worker))
    num_held = estimates.held_blocks(chosen, chosen)
    return chosen, f"{chosen.worker_id} holds {num_held} blocks of the prompt, the most of all"


def _sticky(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    affinity = estimates.demand.affinity or estimates.demand.request_id
    chosen = max(candidates, key=lambda candidate: _weight(affinity, candidate.worker_id))
    return chosen, f"{chosen.worker_id} has the highest hash with {quoted(affinity)}"


def _weight(affinity: str, worker_id: str) -> bytes:
    digest = blake2b(digest_size=8)
    for part in (affinity, worker_id):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


_PICKERS: dict[PolicyName, Picker] = {
    "least_loaded": _least_loaded,
    "round_robin": _round_robin,
    "random": _random,
    "prefix_only": _prefix_only,
    "sticky": _sticky,
}
assert {*_PICKERS, "cost"} == set(get_args(PolicyName))
