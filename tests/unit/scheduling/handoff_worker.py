"""A decode worker in rounds: handoffs are admitted, arrive some rounds later, and run; each round is held against a
slow recount of everything that admission promises."""

from __future__ import annotations

from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.messages import PeerRef
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import RemoteKV, Sequence, SequenceState
from tests.unit.scheduling.bench import BLOCK_SIZE, Bench, make_sequence

TRANSFER_ROUNDS = 2
SENDERS = [PeerRef(name, "1", f"tcp://{name}") for name in ("p", "q")]


class HandoffWorker:
    def __init__(
        self,
        num_blocks: int = 16,
        max_running: int = 8,
        settings: SchedulerSettings | None = None,
        *,
        cache: bool = False,
        scheduler: str = "sarathi",
    ) -> None:
        self.bench = Bench(num_blocks, max_running=max_running, settings=settings, cache=cache, scheduler=scheduler)
        self.scheduler = self.bench.scheduler
        self.open: list[Sequence] = []  # in the order of their arrival
        self.lands_at: dict[Sequence, int] = {}
        self.quarantined: dict[Sequence, int] = {}  # until this round
        self.admitted: list[Sequence] = []  # handoffs and local prompts, for the first time, in this order
        self.reserved_for: dict[str, int] = {}  # samples of a group that are still to be admitted
        self.num_sent_blocks = 0
        self.round = 0

    # -- what comes and goes ------------------------------------------------------------------------------------------

    def local(self, num_tokens: int, group: str = "", max_tokens: int = 3, token: int = 1) -> Sequence:
        sequence = self.bench.add([token] * num_tokens, max_tokens, group=group)
        self.open.append(sequence)
        return sequence

    def handoff(
        self,
        num_tokens: int,
        group: str = "",
        num_to_come: int = 0,
        max_tokens: int = 3,
        *,
        token: int = 2,
        sender: int = 0,
    ) -> Sequence:
        sequence = make_sequence([token] * num_tokens, max_tokens, f"h{len(self.bench.sequences)}")
        sequence.origin.sample_group = group
        sequence.remote = RemoteKV(SENDERS[sender], num_to_come)
        self.bench.sequences.append(sequence)
        self.open.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, which: int, quarantine_rounds: int = 0) -> None:
        """Ends a sequence in any state. If it is being received it is quarantined for some rounds, or released."""
        if not self.open:
            return
        sequence = self.open[which % len(self.open)]
        if sequence in self.quarantined:
            return
        if sequence in self.lands_at:
            del self.lands_at[sequence]
            if quarantine_rounds:
                self.scheduler.drop_handoff(sequence)
                self.quarantined[sequence] = self.round + quarantine_rounds
                return
            self.scheduler.release(sequence, 0)
        else:
            self.scheduler.abort(sequence.key)
        self.open.remove(sequence)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def reserve(self) -> list[Sequence]:
        reserved = list(self.scheduler.reserve())
        self.begin_transfers(reserved)
        self.check_that_the_next_handoff_does_not_fit()
        assert not self.scheduler.reserve(), "a second look admitted more"
        return reserved

    def begin_transfers(self, reserved: list[Sequence]) -> None:
        for sequence in reserved:
            assert sequence.state is SequenceState.WAITING_FOR_REMOTE_KV
            assert sequence.table.num_blocks == blocks_for(sequence.num_tokens, BLOCK_SIZE)
            self.lands_at[sequence] = self.round + TRANSFER_ROUNDS
            self.num_sent_blocks += sequence.table.num_blocks - sequence.num_published
            self.note_admitted(sequence)
        self.check()

    def note_admitted(self, sequence: Sequence) -> None:
        """Under fcfs no sequence passes an earlier one that only lacks room."""
        if sequence.num_preemptions:
            return
        self.admitted.append(sequence)
        if self.scheduler.settings.queue_order != "fcfs" or self.bench.blocks.shares_prefixes:
            return
        if self.scheduler.lifecycle.remote.receiving and any(
            each.origin.sample_group == sequence.origin.sample_group != "" for each in self.open
        ):
            return  # its group may have been admitted before
        if self.scheduler.blocks.capacity.num_slots > len(self.lands_at) or sequence.origin.sample_group:
            return
        for other in self.open[: self.open.index(sequence)]:
            waits = other.state is SequenceState.WAITING and not other.num_preemptions and not other.origin.sample_group
            assert not waits, f"{sequence.key} passed {other.key}"

    def run_round(self) -> bool:
        """Returns whether any sequence made progress, or will without an admission."""
        self.round += 1
        reserved = self.reserve()
        landed = [sequence for sequence, at in self.lands_at.items() if at <= self.round]
        for sequence in landed:
            del self.lands_at[sequence]
            self.bench.arrive(sequence)
        safe = [sequence for sequence, until in self.quarantined.items() if until <= self.round]
        for sequence in safe:
            del self.quarantined[sequence]
            self.scheduler.release(sequence, 0)
            self.open.remove(sequence)
        plan, outputs = self.bench.step()
        for sequence in plan.admitted:
            self.note_admitted(sequence)
        self.begin_transfers(list(plan.reservations))
        for output in outputs:
            if output.finish is not None:
                self.open.remove(output.sequence)
        moved = reserved or plan.reservations or landed or safe or plan.has_work or plan.preempted
        return bool(moved or self.lands_at or self.quarantined)

    def run(self, max_rounds: int = 1500) -> None:
        for _ in range(max_rounds):
            if not self.open:
                break
            assert self.run_round(), "requests wait, and nothing moves"
        assert not self.open
        while self.scheduler.has_work:
            self.bench.step()
        assert self.bench.pool.num_available == self.bench.pool.num_blocks
        assert not self.scheduler.lifecycle.in_progress
        self.scheduler.schedule()  # a pass drops the capacity of groups that are gone
        assert self.scheduler.lifecycle.num_slots == self.scheduler.lifecycle.num_headroom_blocks == 0

    @property
    def somebody_moves(self) -> bool:
        if self.scheduler.reserve():
            return True
        plan = self.scheduler.schedule()
        return bool(plan.rows or plan.reservations)

    def check_that_the_next_handoff_does_not_fit(self) -> None:
        """Adds up the tables under fcfs, if no blocks are shared and no samples are expected."""
        scheduler = self.scheduler
        if scheduler.settings.queue_order != "fcfs" or self.bench.blocks.shares_prefixes:
            return
        waiting = [each for each in self.open if each.state in (SequenceState.WAITING, SequenceState.ON_HOST)]
        if any(each.num_preemptions for each in waiting) or any(each.origin.sample_group for each in self.open):
            return
        following = next(iter(waiting), None)
        if following is None or following.remote is None:
            return
        holders = [*scheduler.running.values(), *self.lands_at, *self.quarantined]
        num_free = self.bench.pool.num_blocks - sum(each.table.num_blocks for each in holders)
        num_open = len(scheduler.running) + len(self.lands_at)
        num_wanted = blocks_for(following.num_tokens, BLOCK_SIZE)
        if num_open:
            num_wanted += len(scheduler.running) + 1
        assert num_wanted > num_free or num_open == scheduler.limits.max_running, f"{following.key} fits and waits"

    # -- the recount --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        scheduler, pool = self.scheduler, self.bench.pool
        scheduler.waiting.check_integrity()
        pool.check_integrity()
        receiving = [s for s in self.open if s.state is SequenceState.WAITING_FOR_REMOTE_KV]
        assert set(receiving) == set(self.lands_at) == set(scheduler.lifecycle.remote.receiving.values())
        assert scheduler.lifecycle.num_slots >= len(scheduler.running) + len(receiving)
        assert scheduler.lifecycle.num_slots <= scheduler.limits.max_running
        for state, sequences in ((BlockState.RESERVED, receiving), (BlockState.QUARANTINED, list(self.quarantined))):
            expected = {block for sequence in sequences for block in sequence.table.ids.tolist()}
            assert expected == {block for block in range(pool.num_blocks) if pool.num_holds(block, state)}
        waiting = [s for s in self.open if s.state is SequenceState.WAITING and s.remote is not None]
        assert set(waiting) == {s for s in scheduler.waiting if s.remote is not None}
        for sequence in self.open:
            if sequence.state is SequenceState.WAITING:
                assert not sequence.table.num_blocks
