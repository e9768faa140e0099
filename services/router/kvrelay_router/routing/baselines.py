"""The other policies: for comparison, and for fleets whose operators want them.

`random` draws by the request's id. `round_robin` takes turns. `least_loaded` takes the prefill worker with the fewest
prompt tokens ahead, and the decode worker with the fewest sequences (then the most free blocks). `prefix_only` takes
who holds most of the prompt, however long the queue there is; equals take turns. `sticky` sends what belongs together
(a session, a user, a prompt's beginning) to the same worker, by the highest of the hashes of the two (rendezvous
hashing, Thaler and Ravishankar, 1998): when a worker comes or goes, only its own share moves.
"""

from __future__ import annotations

import random as random_numbers
from collections.abc import Sequence
from hashlib import blake2b

from kvrelay_router.routing.candidates import Candidate
from kvrelay_router.routing.cost import in_turn
from kvrelay_router.routing.estimates import Estimates

AFFINITY_SHOWN = 64
"""Of an affinity, in a reason: clients choose it, and reasons go into headers."""


def least_loaded(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """Fewest tokens, or fewest sequences."""
    turns = in_turn(candidates, estimates.demand.ordinal)
    if candidates[0].role == "prefill":
        chosen = min(turns, key=lambda candidate: candidate.queued_tokens)
        return chosen, f"{chosen.worker_id} has the fewest prompt tokens ahead, {chosen.queued_tokens}"
    chosen = min(turns, key=lambda candidate: (candidate.num_sequences, -candidate.num_free_blocks))
    return chosen, (
        f"{chosen.worker_id} has the fewest sequences, {chosen.num_sequences}, and {chosen.num_free_blocks} free blocks"
    )


def round_robin(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """One after the other."""
    turn = estimates.demand.ordinal % len(candidates)
    return candidates[turn], f"{candidates[turn].worker_id} is next, number {turn + 1} of {len(candidates)}"


def random(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """Any."""
    demand = estimates.demand
    seed = f"{demand.request_id}/{demand.ordinal}/{candidates[0].role}"
    draw = random_numbers.Random(seed).randrange(len(candidates))
    return candidates[draw], f"{candidates[draw].worker_id} was drawn out of {len(candidates)}"


def prefix_only(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """Most of the prompt."""
    turns = in_turn(candidates, estimates.demand.ordinal)
    chosen = max(turns, key=estimates.cached_tokens)
    return chosen, f"{chosen.worker_id} holds {estimates.cached_tokens(chosen)} tokens of the prompt, nobody more"


def sticky(candidates: Sequence[Candidate], estimates: Estimates) -> tuple[Candidate, str]:
    """Always the same for the same affinity, while it is there."""
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
