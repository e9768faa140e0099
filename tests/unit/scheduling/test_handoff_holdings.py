"""How much handoffs of a tenant hold, on prefill and on decode, counted against a slow recount of all blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.plan import StepPlan
from kvrelay.scheduling.queue.handoff_holdings import KEPT_PART
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from tests.thoroughness import examples
from tests.unit.scheduling.bench import BLOCK_SIZE, Bench

pytestmark = pytest.mark.unit


class PrefillWorker:
    """Computes prompts. Their blocks stay held until `commit`, as if decode had no room before."""

    def __init__(self, num_blocks: int = 64, *, cache: bool = False, order: str = "fcfs") -> None:
        settings = SchedulerSettings(queue_order=order)  # type: ignore[arg-type]
        self.bench = Bench(num_blocks, token_budget=64, max_running=16, cache=cache, settings=settings, eos=99)
        self.scheduler, self.pool = self.bench.scheduler, self.bench.pool
        self.held: dict[Sequence, list[int]] = {}  # computed prompts

    def add(self, tenant: str, num_tokens: int, token: int = 0, weight: float = 1.0) -> Sequence:
        self.bench.tenant, self.bench.weight = tenant, weight
        token = token or len(self.bench.sequences) % 90 + 1
        return self.bench.add([token] * num_tokens, 2, prefill_only=True)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for output in self.scheduler.commit(plan, self.bench.forward(plan)):
            if output.prefilled:
                sequence = output.sequence
                self.held[sequence] = sequence.table.ids.tolist()
                self.pool.hold(self.held[sequence], BlockState.IN_FLIGHT)
                self.scheduler.hand_over(sequence.key)
        self.check()
        return plan

    def run(self) -> None:
        while self.step().rows:
            pass

    def commit(self, sequence: Sequence) -> None:
        """Decode has the KV of the sequence."""
        self.pool.release(self.held.pop(sequence), BlockState.IN_FLIGHT)
        self.scheduler.handoff_ended(sequence.key)
        self.check()

    def num_held(self, tenant: str) -> int:
        running = {each: each.table.ids.tolist() for each in self.scheduler.running.values()}
        tables = {**running, **self.held}
        return len({block for each, blocks in tables.items() if each.tenant == tenant for block in blocks})

    def num_handoffs(self, tenant: str) -> int:
        return sum(each.tenant == tenant for each in [*self.scheduler.running.values(), *self.held])

    def check(self) -> None:
        self.scheduler.holdings.check_integrity()
        self.scheduler.waiting.check_integrity()
        self.pool.check_integrity()
        for tenant in {each.tenant for each in self.bench.sequences}:
            assert self.scheduler.holdings.num_blocks(tenant) == self.num_held(tenant)


def visit(worker: PrefillWorker) -> None:
    """A light tenant was here."""
    light = worker.add("light", 4)
    worker.run()
    worker.commit(light)


def test_computed_prompts_of_a_flood_leave_room_for_the_next_prompts_of_a_tenant_that_was_here() -> None:
    worker = PrefillWorker()
    visit(worker)
    flood = [worker.add("flood", 28) for _ in range(12)]
    worker.run()
    assert worker.pool.num_available >= worker.pool.num_blocks * KEPT_PART
    assert worker.num_held("flood") > worker.pool.num_blocks // 2, "others need nothing now"
    for _ in range(3):
        light = worker.add("light", 4)
        assert [row.sequence for row in worker.step().rows] == [light]
    while worker.held:
        worker.commit(next(iter(worker.held)))
        worker.step()
    assert all(each.num_output == 1 for each in flood)


def test_while_another_tenant_waits_a_flood_gets_no_more_than_its_share() -> None:
    worker = PrefillWorker()
    visit(worker)
    for _ in range(20):
        worker.add("flood", 28)
    worker.run()
    for _ in range(20):
        worker.add("light", 28)
    worker.run()
    for _ in range(6):
        of_flood = [each for each in worker.held if each.tenant == "flood"]
        worker.commit(of_flood[0])
        worker.step()
    share = worker.pool.num_blocks // 2
    assert worker.num_held("flood") <= share and worker.num_held("light") <= share
    assert worker.num_handoffs("flood") == worker.num_handoffs("light") == share // blocks_for(28, BLOCK_SIZE)


def test_a_tenant_alone_may_fill_the_pool() -> None:
    worker = PrefillWorker()
    for _ in range(12):
        worker.add("flood", 32)
    worker.run()
    assert worker.pool.num_available == 0


def test_a_prompt_of_any_size_is_admitted_if_its_tenant_holds_nothing() -> None:
    worker = PrefillWorker()
    visit(worker)
    whole = worker.add("flood", 64 * BLOCK_SIZE)
    worker.run()
    assert whole.num_output == 1


def test_a_prefix_that_handoffs_share_counts_once() -> None:
    worker = PrefillWorker(cache=True)
    visit(worker)
    for _ in range(8):
        worker.add("flood", 40 * BLOCK_SIZE + 1, token=7)
        worker.run()
    assert worker.num_handoffs("flood") == 8, "40 blocks in common and one of each"


def test_a_tenant_that_was_held_up_is_not_owed_what_it_could_not_use() -> None:
    """Else it would be ahead of the other tenant for as long as it was held up."""
    worker = PrefillWorker()
    worker.scheduler.shares.idle_credit = 0.0
    visit(worker)
    for _ in range(20):
        worker.add("flood", 28)
    worker.run()
    for _ in range(30):
        light = worker.add("light", 28)
        worker.run()
        worker.commit(light)
    of_flood = [each for each in worker.held if each.tenant == "flood"]
    for each in of_flood:
        worker.commit(each)
    for _ in range(8):
        worker.add("light", 28)
    admitted = [each.tenant for _ in range(4) for each in worker.step().admitted]
    assert abs(admitted.count("light") - admitted.count("flood")) <= 2


def test_grants_of_a_flood_leave_slots_and_blocks_for_another_tenants_handoff() -> None:
    """On decode: KV that is being received cannot be preempted."""
    bench = Bench(num_blocks=200, max_running=16, cache=False)
    bench.tenant = "light"
    first = bench.handoff([1] * 8, 2)
    assert list(bench.scheduler.reserve()) == [first]
    bench.arrive(first)
    bench.run()
    bench.tenant = "flood"
    for number in range(20):
        bench.handoff([number + 2] * 8, 2)
    granted = list(bench.scheduler.reserve())
    assert len(granted) == 14, "seven eighths of 16"
    bench.tenant = "light"
    light = [bench.handoff([90 + number] * 8, 2) for number in range(2)]
    assert list(bench.scheduler.reserve()) == light
    for each in [*granted, *light]:
        bench.arrive(each)
    for _ in range(100):
        for each in bench.scheduler.reserve():
            bench.arrive(each)
        if not bench.scheduler.has_work:
            break
        for each in bench.step()[0].reservations:
            bench.arrive(each)
    assert not bench.scheduler.has_work
    bench.scheduler.holdings.check_integrity()
    assert bench.scheduler.holdings.is_empty


event = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 120), st.integers(1, 3)),
    st.tuples(st.sampled_from(["step", "commit", "cancel"]), st.integers(0, 50), st.just(0), st.just(0)),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(event, min_size=5, max_size=60),
    st.booleans(),
    st.sampled_from(["fcfs", "lpm", "priority"]),
    st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3),
)
def test_no_tenant_is_given_more_than_its_share_while_another_waits_and_all_prompts_end(
    events: list[tuple[str, int, int, int]], cache: bool, order: str, weights: tuple[float, ...]
) -> None:
    worker = PrefillWorker(cache=cache, order=order)
    for name, number, num_tokens, token in events:
        if name == "add":
            worker.add(f"t{number}", num_tokens, token, weights[number])
        elif name == "commit" and worker.held:
            worker.commit(list(worker.held)[number % len(worker.held)])
        elif name == "cancel" and worker.bench.sequences:
            sequence = worker.bench.sequences[number % len(worker.bench.sequences)]
            if sequence in worker.held:
                worker.commit(sequence)
            worker.scheduler.abort(sequence.key)
        elif name == "step":
            step_and_check(worker, weights)
    for _ in range(1000):
        if not worker.step().rows:
            if not worker.held:
                break
            worker.commit(next(iter(worker.held)))
    assert not worker.scheduler.has_work, "prompts wait although nothing is held"
    assert worker.pool.num_available == worker.pool.num_blocks and worker.scheduler.holdings.is_empty


def step_and_check(worker: PrefillWorker, weights: tuple[float, ...]) -> None:
    present = {each.tenant for each in [*worker.scheduler.waiting, *worker.scheduler.running.values()]}
    admitted: Counter[str] = Counter(each.tenant for each in worker.step().admitted)
    waiting = {each.tenant for each in worker.scheduler.waiting}
    total = sum(weights[int(tenant[1:])] for tenant in present)
    for tenant in admitted:
        if waiting - {tenant} and worker.num_handoffs(tenant) > 1:
            share = int(worker.pool.num_blocks * weights[int(tenant[1:])] / total)
            assert worker.num_held(tenant) <= share
