"""Fair shares of a worker among tenants: virtual token counters (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024).

A tenant's counter grows by the tokens that the worker computes or receives for it, divided by the tenant's weight. A
prompt counts when it is admitted, without cached tokens; output counts `OUTPUT_COST` times as much, when it is
generated. Tokens that are computed again after a preemption do not count again. The tenant with the smallest counter is
next.

A tenant that begins to wait is lifted to the smallest counter of the waiting tenants, so no tenant saves up service for
the time in which it had no requests. It keeps a lead of at most `IDLE_CREDIT`, so the next request of a light tenant is
ahead of those of busy tenants until it has used the lead up. So two tenants that wait all the time differ by at most
`IDLE_CREDIT`, plus what one admission and the output of the running sequences count.

While one tenant is here, nothing is counted per step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.sequence import Sequence

OUTPUT_COST = 2.0
"""Tokens of a prompt that an output token counts as, as in the paper."""

IDLE_CREDIT = 4096.0
"""The lead in tokens, divided by the weight, that a tenant keeps from a time without waiting requests."""

RECLAIM_LAG = 512.0
"""Tokens, divided by its weight, by which a tenant must be behind another one to take slots or blocks back from it. So
tenants that are served about equally do not preempt each other in turns."""

PREFILL_SHORT_STEP = 512
"""Prompt tokens of a step that is short enough beside a light tenant, if the worker computes prompts alone."""

DECODE_SHORT_STEP = 96
"""Decodes and prompt tokens of a tenant in a step that is short enough for decodes of a light tenant in it. With the
40 ms of a step and 0.16 ms of a token that `benchmarks/fair_http.py` simulates, 96 make a step 1.4 times as long."""

RECENT_TURNS = 1024
"""Admissions after its latest one for which a tenant that left counts as one that may come back at any time."""

RETURN_STEPS = 16
"""Steps for which a worker that also decodes keeps steps short for a tenant that left: clients that send one request
after another are back after one or two. Not longer, because prompts in short steps take twice the time."""

MAX_IDLE_TENANTS = 1024


@dataclass(slots=True, eq=False)
class TenantShare:
    """What one tenant was served. `num_admitted` numbers its admissions; `last_turn`: when the latest one was;
    `left_at`: the step in which its last sequence left."""

    weight: float
    counter: float = 0.0
    num_sequences: int = 0
    num_admitted: int = 0
    last_turn: int = 0
    left_at: int = 0
    is_held_up: bool = False  # it waits, and its handoffs hold all that they may


class FairShares:
    """The shares of one scheduler's tenants. `running`: the scheduler's running sequences, only read."""

    def __init__(self, running: Mapping[SequenceKey, Sequence], idle_credit: float = IDLE_CREDIT) -> None:
        self.idle_credit = idle_credit
        self.reclaim_lag = RECLAIM_LAG
        self.prefill_short_step, self.decode_short_step = PREFILL_SHORT_STEP, DECODE_SHORT_STEP
        self._running = running
        self._present: dict[str, TenantShare] = {}  # tenants with sequences in the scheduler
        self._idle: dict[str, TenantShare] = {}  # the others, the latest to leave at the end
        self._waiting: dict[str, TenantShare] = {}
        self._last_counter = 0.0  # counter of the tenant that left last
        self._turn = 0
        self._num_steps = 0

    @property
    def is_contested(self) -> bool:
        """Returns whether several tenants have sequences here."""
        return len(self._present) > 1

    @property
    def num_waiting_tenants(self) -> int:
        return len(self._waiting)

    def waits_alone(self, tenant: str) -> bool:
        """Returns whether no sequence of another tenant waits."""
        return not self._waiting or (len(self._waiting) == 1 and tenant in self._waiting)

    def is_waiting(self, tenant: str) -> bool:
        """Returns whether a sequence of the tenant waits."""
        return tenant in self._waiting

    @property
    def has_recent_tenant(self) -> bool:
        """Returns whether a tenant that is not here was here lately."""
        latest = next(reversed(self._idle.values()), None)
        return latest is not None and self._turn - latest.last_turn <= RECENT_TURNS

    def may_return_to(self, tenant: str) -> bool:
        """Returns whether a tenant that was served less than `tenant` left within the latest `RETURN_STEPS` steps."""
        latest = next(reversed(self._idle.values()), None)
        if latest is None or self._num_steps - latest.left_at > RETURN_STEPS:
            return False
        return latest.counter < self._present[tenant].counter

    def of(self, tenant: str) -> TenantShare:
        """The share of a tenant with a sequence here."""
        return self._present[tenant]

    def counter(self, tenant: str) -> float:
        return self._present[tenant].counter

    # -- tenants come and go ------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """A sequence joined the scheduler. Its latest weight is the tenant's."""
        sequence.num_charged = sequence.num_output
        share = self._present.get(sequence.tenant)
        if share is None:
            if len(self._present) == 1:
                self.settle()  # nothing was counted while one tenant was here
            share = self._idle.pop(sequence.tenant, None) or TenantShare(sequence.weight)
            self._present[sequence.tenant] = share
        share.weight = sequence.weight
        share.num_sequences += 1

    def leave(self, sequence: Sequence) -> None:
        """A sequence left the scheduler."""
        share = self._present[sequence.tenant]
        self._charge_output(sequence, share)
        share.num_sequences -= 1
        if not share.num_sequences:
            del self._present[sequence.tenant]
            self._idle[sequence.tenant] = share
            share.left_at = self._num_steps
            if len(self._idle) > MAX_IDLE_TENANTS:
                del self._idle[next(iter(self._idle))]

    def begins_to_wait(self, tenant: str) -> TenantShare:
        """The first sequence of a tenant waits."""
        share = self._present[tenant]
        self._lift(share)
        self._waiting[tenant] = share
        return share

    def hold_up(self, tenant: str) -> None:
        """A waiting tenant cannot be served, whatever its counter is."""
        self._present[tenant].is_held_up = True

    def catch_up(self, tenant: str) -> None:
        """A waiting tenant can be served. If it was held up, it is as one that begins to wait."""
        share = self._present[tenant]
        if share.is_held_up:
            self._lift(share)

    def _lift(self, share: TenantShare) -> None:
        others = [each.counter for each in self._waiting.values() if each is not share]
        floor = min(others) if others else self._last_counter
        share.counter = max(share.counter, floor - self.idle_credit / share.weight)
        share.is_held_up = False

    def stops_waiting(self, tenant: str) -> None:
        """Called when the last waiting sequence of a tenant has left."""
        self._last_counter = self._waiting.pop(tenant).counter

    # -- service ------------------------------------------------------------------------------------------------------

    def admitted(self, sequence: Sequence, num_cached: int, *, is_reserved: bool = False) -> None:
        """A sequence was admitted, of which `num_cached` tokens were cached. If it was preempted before, its prompt has
        been counted. `is_reserved`: as a part of its sample group, which counts as one admission."""
        share = self._present[sequence.tenant]
        self._turn += 1
        share.num_admitted += not is_reserved
        share.last_turn = self._turn
        if not sequence.num_preemptions:
            share.counter += max(0, sequence.num_tokens - num_cached) / share.weight

    def settle(self) -> None:
        """Counts the output of running sequences. O(running)."""
        present = self._present
        for sequence in self._running.values():
            self._charge_output(sequence, present[sequence.tenant])

    def refresh(self) -> None:
        """A new step."""
        self._num_steps += 1
        if len(self._present) > 1:
            self.settle()

    @staticmethod
    def _charge_output(sequence: Sequence, share: TenantShare) -> None:
        num_new = sequence.num_output - sequence.num_charged
        if num_new > 0:
            share.counter += OUTPUT_COST * num_new / share.weight
            sequence.num_charged += num_new

    # -- decisions ----------------------------------------------------------------------------------------------------

    def served_more(self, tenant: str) -> list[str]:
        """Returns the tenants here that `tenant` is behind by more than `reclaim_lag`, the most served first."""
        share = self._present[tenant]
        least = share.counter + self.reclaim_lag / share.weight
        more = [(each.counter, each.last_turn, other) for other, each in self._present.items() if each.counter > least]
        return [other for _, _, other in sorted(more, reverse=True)]

    def heavier_after(self, tenant: str, num_tokens: int) -> set[str]:
        """Returns the tenants here with more sequences than `tenant`, by weight, that it will be behind by more than
        `reclaim_lag` after `num_tokens` more. None of two tenants that ask for about the same is among them."""
        share = self._present[tenant]
        least = share.counter + (num_tokens + self.reclaim_lag) / share.weight
        most = share.num_sequences / share.weight
        return {
            other
            for other, each in self._present.items()
            if each.counter > least and each.num_sequences / each.weight > most
        }

    def heaviest(self, num_sequences: int) -> str | None:
        """Returns the tenant with most sequences, by weight, if there are several tenants and it has more than
        `num_sequences`."""
        if not self.is_contested:
            return None
        tenant, share = max(self._present.items(), key=lambda item: item[1].num_sequences / item[1].weight)
        return tenant if share.num_sequences > num_sequences else None

    def lighter_than(self, tenant: str) -> list[str]:
        """Returns the tenants here that are behind `tenant` by more than `reclaim_lag`."""
        counter = self._present[tenant].counter
        lag = self.reclaim_lag
        return [other for other, each in self._present.items() if each.counter + lag / each.weight < counter]

    def is_behind(self, tenant: str, num_tokens: int) -> bool:
        """Returns whether a tenant here was served more than `tenant` will be after `num_tokens` more."""
        share = self._present[tenant]
        counter = share.counter + num_tokens / share.weight
        return any(each.counter > counter for each in self._present.values())

    def has_light_tenant_beside(self, tenant: str) -> bool:
        """Returns whether a tenant here was served less than `tenant`, and has no sequence waiting."""
        counter, waiting = self._present[tenant].counter, self._waiting
        return any(each.counter < counter and other not in waiting for other, each in self._present.items())

    def part(self, tenant: str) -> float:
        """Returns the tenant's share of the worker among the tenants here, from 0 to 1."""
        return self._present[tenant].weight / self.total_weight

    @property
    def total_weight(self) -> float:
        """The sum over the tenants here."""
        return sum(share.weight for share in self._present.values())

    def most_served(self, tenants: Collection[str]) -> str:
        """The tenant with the largest counter; of equal ones the latest admitted."""
        present = self._present
        return max(tenants, key=lambda tenant: (present[tenant].counter, present[tenant].last_turn))
