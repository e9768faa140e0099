"""Simple policies, for comparison and for special fleets.

- `random` uses the request's id as its seed.
- `round_robin` takes turns.
- `least_loaded` takes the prefill worker with the fewest queued prompt tokens, and the decode worker with the fewest
  sequences, then with the most free blocks.
- `prefix_only` takes the worker with the longest cached prefix, however long its queue is. Equal workers take turns.
- `sticky` sends requests of one session, user or prompt beginning to one worker by rendezvous hashing (Thaler and
  Ravishankar, 1998): if a worker joins or leaves, only its own share moves.
"""

from __future__ import annotations

import random as random_numbers
from collections.abc import Sequence
from hashlib import blake2b

from kvrelay_router.routing.candidates import Candidate
from kvrelay_router.routing.cost import in_turn
from kvrelay_router.routing.estimates import Estimates

AFFINITY_SHOWN = 64
"""Reasons show this many characters of an affinity: clients choose it, and reasons are sent in headers."""


def least_loaded(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """Fewest queued prompt tokens for prefill, fewest sequences for decode."""
    turns = in_turn(candidates, estimates.demand.ordinal)
    if candidates[0].role == "prefill":
        chosen = min(turns, key=lambda candidate: candidate.queued_tokens)
        return chosen, f"{chosen.worker_id} has the fewest prompt tokens ahead, {chosen.queued_tokens}"
    chosen = min(turns, key=lambda candidate: (candidate.num_sequences, -candidate.num_free_blocks))
    return chosen, (
        f"{chosen.worker_id} has the fewest sequences, {chosen.num_sequences}, and {chosen.num_free_blocks} free blocks"
    )


def round_robin(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    turn = estimates.demand.ordinal % len(candidates)
    return candidates[turn], f"{candidates[turn].worker_id} is next, number {turn + 1} of {len(candidates)}"


def random(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    demand = estimates.demand
    seed = f"{demand.request_id}/{demand.ordinal}/{candidates[0].role}"
    draw = random_numbers.Random(seed).randrange(len(candidates))
    return candidates[draw], f"{candidates[draw].worker_id} was chosen at random out of {len(candidates)}"


def prefix_only(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """Longest cached prefix."""
    turns = in_turn(candidates, estimates.demand.ordinal)
    chosen = max(turns, key=estimates.cached_tokens)
    return chosen, f"{chosen.worker_id} holds {estimates.cached_tokens(chosen)} tokens of the prompt, the most of all"


def sticky(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """Highest hash of affinity and worker."""
    affinity = estimates.demand.affinity or estimates.demand.request_id
    chosen = max(candidates, key=lambda candidate: _weight(affinity, candidate.worker_id))
    return chosen, f"{chosen.worker_id} has the highest hash with {affinity[:AFFINITY_SHOWN]!r}"


def _weight(affinity: str, worker_id: str) -> bytes:
    digest = blake2b(digest_size=8)
    for part in (affinity, worker_id):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()
