"""Drives a scheduler as the step loop does with overlap: step N+1 is planned while N is in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import StepResult
from tests.unit.scheduling.bench import Bench, check_writes

Forward = Callable[[StepPlan], StepResult]


class OverlappedBench(Bench):
    """`step` lands one step: the one behind it is planned before, and starts before it is committed."""

    in_flight: StepPlan | None = None
    following: StepPlan | None = None
    num_planned_ahead = 0

    def plan(self) -> list[StepPlan]:
        """Plans what can be planned; returns the new plans with or without rows."""
        new: list[StepPlan] = []
        if self.in_flight is None:
            plan = self.scheduler.schedule()
            new.append(plan)
            self.in_flight = plan if plan.has_work else None
        if self.in_flight is not None and self.following is None:
            before = self.scheduler.num_preemptions
            self.following = self.scheduler.schedule_ahead()
            assert self.scheduler.num_preemptions == before, "planning ahead preempted"
            if self.following is not None:
                assert self.following.rows and self.following.host_copies is None
                self.num_planned_ahead += 1
                new.append(self.following)
        self.check_pool()
        return new

    def land(self) -> list[SequenceOutput]:
        """The step in flight ends well."""
        landed = self.in_flight
        assert landed is not None
        result = self.forward(landed)
        self.in_flight, self.following = self.following, None
        outputs = self.scheduler.commit(landed, result)
        self.take_prefilled(outputs)
        self.check_pool()
        return outputs

    def fail(self, keys: Collection[SequenceKey] | None = None) -> list[Sequence]:
        """The step in flight fails."""
        failed_plan, self.in_flight = self.in_flight, None
        assert failed_plan is not None
        if self.following is not None:
            self.scheduler.cancel_plan(self.following)
            self.following = None
        failed = self.scheduler.fail_step(failed_plan, keys)
        self.check_pool()
        return failed

    def step(self) -> tuple[StepPlan, list[SequenceOutput]]:
        plans = self.plan()
        if self.in_flight is None:
            return plans[0], []
        landed = self.in_flight
        self.check_rows(landed)
        return landed, self.land()

    def check_rows(self, plan: StepPlan) -> None:
        """Rows go on where the committed tokens end, whatever was planned before."""
        self.check_budget(plan)
        check_writes(self.scheduler, plan)
        for row in plan.rows:
            if row.sequence.key in self.scheduler.running:
                assert row.position == row.sequence.num_computed
            assert row.sequence.table.capacity_tokens >= row.position + row.num_tokens, "no room for its K/V"
            assert self.pool.num_holds(int(row.sequence.table.ids[row.position // row.sequence.table.block_size])) > 0
