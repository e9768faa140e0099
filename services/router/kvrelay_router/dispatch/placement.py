"""Applies the routing policy to the fleet as it is now, and keeps an eye on fallbacks."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from kvrelay.protocol.messages import PeerRef
from kvrelay_router.fleet_view import FleetView
from kvrelay_router.routing.candidates import Decision, Demand, NoPlacement
from kvrelay_router.routing.policy import PolicyName, decide, decide_decode

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Fallbacks:
    """Requests that decode computes alone although prefill should have: without this, nobody would notice."""

    num_requests: int = 0
    is_active: bool = False
    reason: str = ""


class Placement:
    """Places attempts. Synchronous: nothing else happens between the choice and the load that it adds."""

    def __init__(self, view: FleetView, policy: PolicyName, local_prefill_tokens: int) -> None:
        self.fallbacks = Fallbacks()
        self._view = view
        self._policy = policy
        self._local_prefill_tokens = local_prefill_tokens
        self._ordinal = 0

    def is_possible(self) -> bool:
        """Whether a request of many tokens could be placed."""
        return bool(self._view.candidates(time.monotonic()).decode)

    def place(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        needs_decode: bool,
        avoid: frozenset[str] = frozenset(),
    ) -> Decision | NoPlacement:
        """Chooses workers for a new attempt."""
        demand = Demand(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            needs_decode=needs_decode,
            ordinal=self._next_ordinal(),
            avoid=avoid,
            local_prefill_tokens=self._local_prefill_tokens,
        )
        decision = decide(self._policy, demand, self._view.candidates(time.monotonic()))
        if isinstance(decision, Decision):
            self._note_fallback(decision)
        return decision

    def place_decode(self, request_id: str, fingerprint: str, excluded: frozenset[str]) -> PeerRef | None:
        """Chooses another decode worker for a handoff that is under way."""
        demand = Demand(request_id=request_id, num_prompt_tokens=0, needs_decode=True, ordinal=self._next_ordinal())
        candidates = self._view.candidates(time.monotonic())
        chosen = decide_decode(self._policy, demand, candidates, fingerprint, excluded)
        return chosen.peer if chosen is not None else None

    def _next_ordinal(self) -> int:
        self._ordinal += 1
        return self._ordinal - 1

    def _note_fallback(self, decision: Decision) -> None:
        if decision.is_fallback:
            self.fallbacks.num_requests += 1
            if not self.fallbacks.is_active:
                self.fallbacks.reason = decision.reasons[0]
                log.warning("nothing is disaggregated at the moment: %s", decision.reasons[0])
            self.fallbacks.is_active = True
        elif self.fallbacks.is_active and decision.prefill is not None:
            log.info("prefill workers take part again, after %d requests without", self.fallbacks.num_requests)
            self.fallbacks.is_active = False
