"""The policies: pure functions that choose a prefill and a decode worker.

`least_loaded` takes the prefill worker with the fewest prompt tokens ahead, and the decode worker with the fewest
sequences (then the most free blocks); equals take turns. `round_robin` takes turns always, `random` draws by the
request's id. Only workers of one fingerprint are paired.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, get_args

from kvrelay_router.routing.candidates import Candidate, Candidates, Decision, Demand, NoPlacement

PolicyName = Literal["least_loaded", "round_robin", "random"]
Picker = Callable[[Sequence[Candidate], Demand], tuple[Candidate, str]]


def decide(policy: PolicyName, demand: Demand, candidates: Candidates) -> Decision | NoPlacement:
    """Places a request.

    Prefill and decode where both are needed and there; prefill alone for a request of one token; decode alone for a
    short prompt, or where no prefill worker goes with it.
    """
    pick = _PICKERS[policy]
    if not demand.needs_decode and candidates.prefill:
        prefill, reason = pick(_unavoided(candidates.prefill, demand.avoid), demand)
        return Decision(prefill, None, policy, ("at most one token is to come: prefill alone", f"prefill: {reason}"))
    if not candidates.decode:
        missing = "no decode worker is ready" if candidates.prefill else "no worker is ready"
        return NoPlacement(missing)
    if demand.needs_decode and demand.num_prompt_tokens <= demand.local_prefill_tokens:
        short = f"the prompt's {demand.num_prompt_tokens} tokens are at most local_prefill_tokens: decode alone"
        return _decode_alone(policy, demand, candidates.decode, short)
    prefills = _with_fingerprint(candidates.prefill, {decode.fingerprint for decode in candidates.decode})
    if not prefills:
        missing = "no prefill worker goes with a decode worker" if candidates.prefill else "no prefill worker is ready"
        return replace(_decode_alone(policy, demand, candidates.decode, f"{missing}: decode alone"), is_fallback=True)
    prefill, prefill_reason = pick(_unavoided(prefills, demand.avoid), demand)
    decodes = _with_fingerprint(candidates.decode, {prefill.fingerprint})
    decode, decode_reason = pick(_unavoided(decodes, demand.avoid), demand)
    return Decision(prefill, decode, policy, (f"prefill: {prefill_reason}", f"decode: {decode_reason}"))


def decide_decode(
    policy: PolicyName, demand: Demand, candidates: Candidates, fingerprint: str, excluded: frozenset[str]
) -> Candidate | None:
    """Another decode worker for a handoff whose first one is out of reach."""
    fitting = [c for c in _with_fingerprint(candidates.decode, {fingerprint}) if c.worker_id not in excluded]
    if not fitting:
        return None
    return _PICKERS[policy](_unavoided(fitting, demand.avoid), demand)[0]


def _decode_alone(policy: PolicyName, demand: Demand, decodes: Sequence[Candidate], why: str) -> Decision:
    decode, reason = _PICKERS[policy](_unavoided(decodes, demand.avoid), demand)
    return Decision(None, decode, policy, (why, f"decode: {reason}"))


def _with_fingerprint(candidates: Iterable[Candidate], fingerprints: set[str]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.fingerprint in fingerprints]


def _unavoided(candidates: Sequence[Candidate], avoid: frozenset[str]) -> Sequence[Candidate]:
    return [candidate for candidate in candidates if candidate.worker_id not in avoid] or candidates


def _least_loaded(candidates: Sequence[Candidate], demand: Demand) -> tuple[Candidate, str]:
    turn = demand.ordinal % len(candidates)
    in_turn = [*candidates[turn:], *candidates[:turn]]
    if candidates[0].role == "prefill":
        chosen = min(in_turn, key=lambda candidate: candidate.queued_tokens)
        return chosen, f"{chosen.worker_id} has the fewest prompt tokens ahead, {chosen.queued_tokens}"
    chosen = min(in_turn, key=lambda candidate: (candidate.num_sequences, -candidate.num_free_blocks))
    return chosen, (
        f"{chosen.worker_id} has the fewest sequences, {chosen.num_sequences}, and {chosen.num_free_blocks} free blocks"
    )


def _round_robin(candidates: Sequence[Candidate], demand: Demand) -> tuple[Candidate, str]:
    turn = demand.ordinal % len(candidates)
    return candidates[turn], f"{candidates[turn].worker_id} is next, number {turn + 1} of {len(candidates)}"


def _random(candidates: Sequence[Candidate], demand: Demand) -> tuple[Candidate, str]:
    draw = random.Random(f"{demand.request_id}/{demand.ordinal}/{candidates[0].role}").randrange(len(candidates))
    return candidates[draw], f"{candidates[draw].worker_id} was drawn out of {len(candidates)}"


_PICKERS: dict[PolicyName, Picker] = {
    "least_loaded": _least_loaded,
    "round_robin": _round_robin,
    "random": _random,
}
assert set(_PICKERS) == set(get_args(PolicyName))
