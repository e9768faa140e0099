"""Fair shares of a worker among tenants: the order of the waiting queue between tenants, and a limit of running slots.

A sequence's `origin.owner` is its tenant.

Order: virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant's counter
grows by the tokens that the worker computes or receives for it, divided by the tenant's weight. A prompt counts when it
is admitted, without cached tokens; output counts `OUTPUT_COST` times as much, when it is generated. Tokens that are
computed again after a preemption do not count again. The waiting tenant with the smallest counter is next,
running prompts are computed in the same order, and the running tenant with the largest one loses blocks first.

A tenant that begins to wait is lifted to the smallest counter of the waiting tenants, so no tenant saves up service for
the time in which it had no requests. It keeps a lead of at most `IDLE_CREDIT`, so the next request of a light tenant is
ahead of those of busy tenants until it has used the lead up. So two tenants that wait all the time differ by at most
`IDLE_CREDIT`, plus what one admission and the output of the running sequences count.

Limit: while several tenants wait, none takes more running slots than `max_running` times its weight over the weights
of the waiting tenants, unless it was served `IDLE_CREDIT` less than the next one.

While one tenant is here, nothing is counted per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.sequence import Sequence

OUTPUT_COST = 2.0
"""Tokens of a prompt that an output token counts as, as in the paper."""

IDLE_CREDIT = 4096.0
"""The lead in tokens, divided by the weight, that a tenant keeps from a time without waiting requests."""

MAX_IDLE_TENANTS = 1024


@dataclass(slots=True, eq=False)
class FairShare:
    """What one tenant was served. `num_slots`: running slots that its sequences here take, or will take.
    `num_waiting_slots`: those of waiting sequences without reserved capacity. `num_admitted` numbers its admissions;
    `last_turn`: when the latest one was."""

    weight: float
    counter: float = 0.0
    num_sequences: int = 0
    num_slots: int = 0
    num_waiting_slots: int = 0
    num_admitted: int = 0
    last_turn: int = 0


class FairShares:
    """The shares of one scheduler's tenants. `running`: the scheduler's running sequences, only read."""

    def __init__(
        self, running: Mapping[SequenceKey, Sequence], max_running: int, idle_credit: float = IDLE_CREDIT
    ) -> None:
        self.idle_credit = idle_credit
        self._running = running
        self._max_running = max_running
        self._present: dict[str, FairShare] = {}  # tenants with sequences in the scheduler
        self._idle: dict[str, FairShare] = {}  # the others, the latest to leave at the end
        self._waiting: dict[str, FairShare] = {}
        self._num_counted: dict[SequenceKey, int] = {}  # output tokens of the sequences here
        self._last_counter = 0.0  # counter of the tenant that left last
        self._turn = 0

    @property
    def num_waiting_owners(self) -> int:
        return len(self._waiting)

    @property
    def is_contested(self) -> bool:
        """Returns whether several tenants have sequences here."""
        return len(self._present) > 1

    def counter(self, sequence: Sequence) -> float:
        """Returns the counter of the sequence's tenant."""
        return self._present[sequence.origin.owner].counter

    # -- tenants come and go ------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """A sequence joined the scheduler. Its latest weight is the tenant's."""
        share = self._present.get(sequence.origin.owner)
        if share is None:
            if len(self._present) == 1:
                self.settle()  # nothing was counted while one tenant was here
            share = self._idle.pop(sequence.origin.owner, None) or FairShare(sequence.origin.weight)
            self._present[sequence.origin.owner] = share
        share.weight = sequence.origin.weight
        share.num_sequences += 1
        share.num_slots += sequence.num_slots
        self._num_counted[sequence.key] = 0

    def leave(self, sequence: Sequence) -> None:
        """A sequence left the scheduler."""
        share = self._present[sequence.origin.owner]
        self._count_output(sequence, share)
        del self._num_counted[sequence.key]
        share.num_sequences -= 1
        share.num_slots -= sequence.num_slots
        if not share.num_sequences:
            del self._present[sequence.origin.owner]
            self._idle[sequence.origin.owner] = share
            if len(self._idle) > MAX_IDLE_TENANTS:
                del self._idle[next(iter(self._idle))]

    def begins_to_wait(self, tenant: str) -> FairShare:
        """The first sequence of a tenant waits."""
        share = self._present[tenant]
        others = [each.counter for each in self._waiting.values()]
        floor = min(others) if others else self._last_counter
        share.counter = max(share.counter, floor - self.idle_credit / share.weight)
        self._waiting[tenant] = share
        return share

    def stops_waiting(self, tenant: str) -> None:
        """Called when the last waiting sequence of a tenant has left."""
        self._last_counter = self._waiting.pop(tenant).counter

    # -- service ------------------------------------------------------------------------------------------------------

    def admitted(self, sequence: Sequence, num_cached: int, *, is_reserved: bool = False) -> None:
        """A sequence was admitted, of which `num_cached` tokens were cached. If it was preempted before, its prompt has
        been counted. `is_reserved`: as a part of its sample group, which counts as one admission."""
        share = self._present[sequence.origin.owner]
        self._turn += 1
        share.num_admitted += not is_reserved
        share.last_turn = self._turn
        if not sequence.num_preemptions:
            share.counter += max(0, sequence.num_tokens - num_cached) / share.weight

    def refresh(self) -> None:
        """A new step."""
        if len(self._present) > 1:
            self.settle()

    def settle(self) -> None:
        """Counts the output of running sequences. O(running)."""
        for key, sequence in self._running.items():
            if key in self._num_counted:  # of forks, only the leader has an entry
                self._count_output(sequence, self._present[sequence.origin.owner])

    def _count_output(self, sequence: Sequence, share: FairShare) -> None:
        num_new = sequence.num_output - self._num_counted[sequence.key]
        if num_new > 0:
            share.counter += OUTPUT_COST * num_new * sequence.num_slots / share.weight
            self._num_counted[sequence.key] = sequence.num_output

    def may_take(self, share: FairShare, num_slots: int, turn_of: FairShare) -> bool:
        """Returns whether a waiting tenant may take so many more running slots, any number if it holds none. `turn_of`:
        the tenant that is next, which can be passed because it holds its share."""
        if share is not turn_of and share.counter - turn_of.counter >= self.idle_credit:
            return False
        num_held = share.num_slots - share.num_waiting_slots
        if len(self._waiting) < 2 or num_held <= 0:
            return True
        total_weight = sum(each.weight for each in self._waiting.values())
        return num_held + num_slots <= ceil(self._max_running * share.weight / total_weight)

    def check_integrity(self) -> None:
        """Recounts the slots of waiting and running sequences. Raises AssertionError."""
        assert self._waiting.keys() <= self._present.keys() and not self._present.keys() & self._idle.keys()
        for tenant, share in [*self._present.items(), *self._idle.items()]:
            assert 0 <= share.num_waiting_slots <= share.num_slots, tenant
            assert (tenant in self._present) == bool(share.num_sequences)
            assert tenant in self._waiting or not share.num_waiting_slots
        assert len(self._num_counted) == sum(share.num_sequences for share in self._present.values())
