"""Places a request: a pure function of the request, the fleet and the cached prefixes.

This file decides which workers are eligible, in the same way for all policies: prefill and decode must have the same
fingerprint, and workers on which an attempt failed are avoided. The policies in `cost.py` and `baselines.py` choose
among the eligible workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from kvrelay_router.routing import baselines
from kvrelay_router.routing.candidates import (
    Candidate,
    CandidateWorkers,
    Decision,
    Demand,
    ExpectedLatency,
    NoPlacement,
)
from kvrelay_router.routing.cost import better_alone, pick_decode, pick_prefill
from kvrelay_router.routing.estimates import Estimates, TypicalSpeeds

PolicyName = Literal["cost", "least_loaded", "round_robin", "random", "prefix_only", "sticky"]
Picker = Callable[[Sequence[Candidate], Estimates], tuple[Candidate, str]]
NOTHING_CACHED: Mapping[str, int] = {}


def decide(
    policy: PolicyName,
    demand: Demand,
    candidates: CandidateWorkers,
    cached_blocks: Mapping[str, int] = NOTHING_CACHED,
) -> Decision | NoPlacement:
    """Places a request. `cached_blocks`: leading blocks of its prompt that each worker holds, see `PrefixView`.

    A request of one token goes to prefill alone. A short prompt goes to decode alone, and so does any prompt if no
    prefill worker has a decode worker's fingerprint. All others go to a prefill and a decode worker.
    """
    estimates = Estimates(demand, TypicalSpeeds.of(candidates), cached_blocks)
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
    return _both(policy, prefills, candidates.decode, estimates)


def decide_decode(
    policy: PolicyName,
    demand: Demand,
    candidates: CandidateWorkers,
    fingerprint: str,
    cached_blocks: Mapping[str, int] = NOTHING_CACHED,
) -> Candidate | None:
    """Returns another decode worker for a handoff. The unreachable one must not be among the candidates."""
    fitting = _with_fingerprint(candidates.decode, {fingerprint})
    if not fitting:
        return None
    estimates = Estimates(demand, TypicalSpeeds.of(candidates), cached_blocks)
    return _pick_decode(policy, fitting, None, estimates)[0]


def _both(
    policy: PolicyName, prefills: Sequence[Candidate], decodes: Sequence[Candidate], estimates: Estimates
) -> Decision:
    prefill, prefill_reason = _pick_prefill(policy, prefills, estimates)
    fitting = _with_fingerprint(decodes, {prefill.fingerprint})
    decode, decode_reason = _pick_decode(policy, fitting, prefill, estimates)
    expected = estimates.handed_over(prefill, decode)
    if policy == "cost" and estimates.demand.local_prefill_tokens is None:
        unavoided = _unavoided(decodes, estimates.demand.avoid)
        if (alone := better_alone(expected, decode, unavoided, estimates)) is not None:
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
        num_cached_blocks=estimates.held_blocks(decode) if decode is not None else 0,
    )


def _pick_prefill(policy: PolicyName, workers: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    workers = _unavoided(workers, estimates.demand.avoid)
    return pick_prefill(workers, estimates) if policy == "cost" else _PICKERS[policy](workers, estimates)


def _pick_decode(
    policy: PolicyName, workers: Sequence[Candidate], prefill: Candidate | None, estimates: Estimates
) -> tuple[Candidate, str]:
    workers = _unavoided(workers, estimates.demand.avoid)
    return pick_decode(workers, prefill, estimates) if policy == "cost" else _PICKERS[policy](workers, estimates)


def _with_fingerprint(candidates: Iterable[Candidate], fingerprints: set[str]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.fingerprint in fingerprints]


def _unavoided(candidates: Sequence[Candidate], avoid: frozenset[str]) -> Sequence[Candidate]:
    if not avoid:
        return candidates
    return [candidate for candidate in candidates if candidate.worker_id not in avoid] or candidates


_PICKERS: dict[PolicyName, Picker] = {
    "least_loaded": baselines.least_loaded,
    "round_robin": baselines.round_robin,
    "random": baselines.random,
    "prefix_only": baselines.prefix_only,
    "sticky": baselines.sticky,
}
assert {*_PICKERS, "cost"} == set(get_args(PolicyName))
