"""Who is admitted next: orders, shared prefixes, what looking costs, and room for the tokens of those that run."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockState
from kvrelay.scheduling.fair_shares import FairShares
from kvrelay.scheduling.memory.new_token_ratio import RELAX_STEPS, RETRACTION_HORIZON, NewTokenRatio
from kvrelay.scheduling.memory.prefixes_in_progress import PrefixesInProgress
from kvrelay.scheduling.queue.queue_orders import ORDERS, depth_first
from kvrelay.scheduling.queue.waiting_queue import PROBES_A_STEP, WaitingQueue
from kvrelay.scheduling.scheduler_settings import QueueOrderName, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from tests.thoroughness import examples
from tests.unit.scheduling.bench import BLOCK_SIZE, SCHEDULERS, Bench, make_sequence

PATIENT = 10_000
UNCUT = 4096  # a token budget that no prompt here exceeds


def bench_with(order: QueueOrderName, **sizes: int) -> Bench:
    values = {"num_blocks": 64, "token_budget": UNCUT, "max_running": 1} | sizes
    return Bench(**values, settings=SchedulerSettings(queue_order=order, queue_starvation_bound=PATIENT))  # type: ignore[arg-type]


def admissions(bench: Bench) -> list[Sequence]:
    return [sequence for plan in bench.run() for sequence in plan.admitted]


def prompt_of_blocks(*blocks: int) -> list[int]:
    """A prompt whose full blocks are all reusable: one more token follows them."""
    return [token for block in blocks for token in [block] * BLOCK_SIZE] + [1]


def test_fcfs_is_first_come_first_served() -> None:
    bench = bench_with("fcfs")
    sequences = [bench.add([n] * 3, 2) for n in range(5)]
    assert admissions(bench) == sequences


def test_priority_admits_the_smaller_number_first_and_equals_by_arrival() -> None:
    bench = bench_with("priority")
    first, urgent, second, later = (bench.add([n] * 3, 2, priority) for n, priority in enumerate((0, -5, 0, 7)))
    assert admissions(bench) == [urgent, first, second, later]


def test_sjf_admits_the_shortest_job_first_and_counts_what_is_cached() -> None:
    bench = bench_with("sjf")
    bench.add(prompt_of_blocks(1, 2, 3, 4), 1)
    bench.run()
    long, cached, short, medium = (
        bench.add(prompt, max_tokens)
        for prompt, max_tokens in (([9] * 8, 9), (prompt_of_blocks(1, 2, 3, 4), 3), ([7], 2), ([8], 6))
    )
    assert admissions(bench) == [short, cached, medium, long]


def test_random_order_is_the_same_for_the_same_keys() -> None:
    runs = []
    for _ in range(2):
        bench = bench_with("random")
        for n in range(20):
            bench.add([n] * 3, 2)
        runs.append([s.key for s in admissions(bench)])
    assert runs[0] == runs[1] != sorted(runs[0], key=lambda key: int(key[0][1:]))


def test_lpm_notices_what_was_evicted_since_a_sequence_joined() -> None:
    bench = bench_with("lpm", num_blocks=12)
    bench.add(prompt_of_blocks(1, 2, 3), 1)
    bench.add(prompt_of_blocks(4), 1)
    bench.run()
    stale, cached = bench.add(prompt_of_blocks(1, 2, 3, 9), 1), bench.add(prompt_of_blocks(4, 9), 1)
    bench.blocks.cache.remove(stale.block_hashes(1))
    assert admissions(bench) == [cached, stale]


chains = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=12)


@settings(max_examples=examples(150), deadline=None)
@given(chains, st.sampled_from(["lpm", "dfs_weight"]), st.integers(0, 2**31))
def test_offline_longest_prefix_and_depth_first_reach_the_best_possible_hit_rate(
    wanted: list[tuple[int, ...]], order: QueueOrderName, seed: int
) -> None:
    """With a pool of the longest request (Zheng et al., SGLang, theorem 3.1): each block is computed once."""
    random.Random(seed).shuffle(wanted)
    longest = max(len(chain) for chain in wanted) + 1
    bench = bench_with(order, num_blocks=longest)
    for chain in wanted:
        bench.add(prompt_of_blocks(*(block + 1 for block in chain)), 1)
    computed = sum(plan.num_prefill_tokens for plan in bench.run())
    distinct = {chain[: depth + 1] for chain in wanted for depth in range(len(chain))}
    assert computed == len(distinct) * BLOCK_SIZE + len(wanted)


@given(chains)
def test_lpm_visits_the_tree_of_prompts_depth_first(wanted: list[tuple[int, ...]]) -> None:
    bench = bench_with("lpm", num_blocks=256)
    for chain in wanted:
        bench.add(prompt_of_blocks(*(block + 1 for block in chain)), 1)
    check_depth_first([tuple(s.tokens.view(0, s.num_tokens - 1).tolist()) for s in admissions(bench)])


def check_depth_first(visited: Seq[tuple[int, ...]]) -> None:
    """Once a branch at the root is left, nothing of it comes any more; and so on below."""
    for depth in range(BLOCK_SIZE, max(map(len, visited)) + 1, BLOCK_SIZE):
        prefixes = [chain[:depth] for chain in visited if len(chain) >= depth]
        seen: list[tuple[int, ...]] = []
        for prefix in prefixes:
            if not seen or seen[-1] != prefix:
                assert prefix not in seen, "a branch was left and entered again"
                seen.append(prefix)


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12))
def test_depth_first_order_visits_every_branch_once_and_the_heaviest_first(wanted: list[list[int]]) -> None:
    hashed: list[list[BlockHash]] = [[bytes(chain[: depth + 1]) for depth in range(len(chain))] for chain in wanted]
    order = depth_first(hashed)
    assert sorted(order) == list(range(len(wanted)))
    for depth in range(1, 6):
        prefixes = [hashed[index][depth - 1] for index in order if len(hashed[index]) >= depth]
        runs = [p for n, p in enumerate(prefixes) if n == 0 or prefixes[n - 1] != p]
        assert len(set(runs)) == len(runs)
    roots = [chain[0] if chain else None for chain in (hashed[index] for index in order)]
    weights = [roots.count(root) for root in roots]
    assert weights == sorted(weights, reverse=True)


# -- the same uncached prefix -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_requests_waiting_for_the_same_prefix_compute_it_once(scheduler: str) -> None:
    bench = Bench(128, 16, 8, scheduler=scheduler)
    for number in range(6):
        bench.add(prompt_of_blocks(1, 2, 3, 4, 5, 10 + number), 3)
    computed = sum(plan.num_prefill_tokens for plan in bench.run())
    assert computed == 5 * BLOCK_SIZE + 6 * (BLOCK_SIZE + 1)


def test_a_parked_sequence_lets_others_pass_and_goes_on_when_the_prefix_is_published() -> None:
    bench = Bench(128, 9, 8)
    first, twin = (bench.add(prompt_of_blocks(1, 2, 3), 20) for _ in range(2))
    other = bench.add([7, 8], 2)
    plan, _ = bench.step()
    assert plan.admitted == [first]
    plan, _ = bench.step()
    assert plan.admitted == [other]
    assert plan.held_back.startswith("its prefix is being computed or sent")
    plan, _ = bench.step()
    assert plan.admitted == [twin]
    assert twin.num_cached_tokens == 3 * BLOCK_SIZE
    assert not bench.scheduler.lifecycle.in_progress  # both go on, and promise nothing any more


def test_all_that_waited_for_a_prefix_may_be_admitted_in_one_step() -> None:
    bench = Bench(512, 128, 100, scheduler="faster_transformer")
    for number in range(100):
        bench.add(prompt_of_blocks(1, 2, 10 + number), 2)
    assert [len(plan.admitted) for plan in bench.run() if plan.admitted] == [1, 99]


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_a_parked_sequence_computes_the_prefix_itself_when_the_other_gives_up(how: str) -> None:
    bench = Bench(128, 8, 8)
    first, twin = (bench.add(prompt_of_blocks(1, 2, 3), 2) for _ in range(2))
    plan = bench.scheduler.schedule()
    assert plan.admitted == [first]
    if how == "fail":
        bench.scheduler.fail_step(plan)
    else:
        bench.scheduler.commit(plan, bench.forward(plan))
        bench.scheduler.abort(first.key)
    plan, _ = bench.step()
    assert plan.admitted == [twin]


def test_without_a_cache_nobody_waits_for_a_prefix() -> None:
    bench = Bench(128, UNCUT, 8, cache=False)
    twins = [bench.add(prompt_of_blocks(1, 2, 3), 2) for _ in range(2)]
    assert bench.step()[0].admitted == twins


# -- what looking costs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fcfs", "lpm", "sjf", "dfs_weight"])
def test_a_step_in_which_nothing_changed_looks_at_one_prefix(
    order: QueueOrderName, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(16, 64, 8, settings=SchedulerSettings(queue_order=order, queue_starvation_bound=PATIENT))
    bench.add([1] * 40, 20)
    bench.step()
    for number in range(500):
        bench.add(prompt_of_blocks(*(number % 5 + 2,) * 12), 2)
    bench.step()
    looks = count_looks(bench, monkeypatch)
    for _ in range(5):
        bench.step()
    assert sum(looks) <= 5 * 2  # the head's: whether it is the head still, and whether it fits


def test_a_burst_of_twins_is_looked_at_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(512, 64, 64, settings=SchedulerSettings(queue_order="lpm", queue_starvation_bound=PATIENT))
    for _ in range(600):
        bench.add(prompt_of_blocks(*range(20)), 2)
    looks = count_looks(bench, monkeypatch)
    while bench.scheduler.has_work:
        before = sum(looks)
        plan, _ = bench.step()
        assert sum(looks) - before <= PROBES_A_STEP + 3 * len(plan.admitted) + 3
        assert plan.rows


def count_looks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    looks: list[int] = []
    look = bench.blocks.first_missing

    def counted(sequence: Sequence) -> tuple[int, BlockHash | None]:
        looks.append(1)
        return look(sequence)

    monkeypatch.setattr(bench.blocks, "first_missing", counted)
    return looks


# -- promised blocks, and the queue of those who wait for them -------------------------------------------------------


A, B, C = (bytes([n]) * 16 for n in range(3))


def test_a_promise_ends_when_it_is_kept_or_given_up() -> None:
    promised = PrefixesInProgress()
    promised.promise(("x", 1, 0), [A, B, C])
    promised.kept(("x", 1, 0), 1)
    assert [A in promised, B in promised, C in promised] == [False, True, True]
    assert promised.withdraw(("x", 1, 0)) == [B, C]
    assert not promised
    assert promised.withdraw(("x", 1, 0)) == ()


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
def test_a_queue_that_waits_for_one_block_is_all_there_in_the_step_in_which_it_comes(order: QueueOrderName) -> None:
    """More than a step may look at: those are looked at whose turn it is."""
    bench = Bench(64)
    promised = PrefixesInProgress()
    shares = FairShares({}, 8)
    queue = WaitingQueue(ORDERS[order], bench.blocks, promised, 1 << 20, shares)
    waiting = [make_sequence([1] * 9, 1, f"r{n}") for n in range(3 * PROBES_A_STEP)]
    promised.promise(("other", 1, 0), waiting[0].block_hashes(1))
    for sequence in waiting:
        shares.enter(sequence)
        queue.add(sequence)
    for _ in range(4):
        queue.refresh()
        assert queue.head() is None
        queue.check_integrity()
    queue.prefixes_changed(promised.withdraw(("other", 1, 0)))
    queue.refresh()
    admitted: list[Sequence] = []
    while (head := queue.head()) is not None:
        queue.admitted(head)
        admitted.append(head)
    assert len(waiting) == len(admitted) == len({s.key for s in admitted})
    assert not queue


# -- room that admission leaves for the tokens of those that run -----------------------------------------------------


def careful_bench(ratio: float, num_blocks: int = 12) -> Bench:
    return Bench(num_blocks, 64, 8, cache=False, settings=SchedulerSettings(new_token_ratio=ratio))


@pytest.mark.parametrize(("ratio", "num_admitted"), [(0.0, 6), (0.5, 3), (1.0, 2)])
def test_the_more_careful_the_ratio_the_fewer_are_admitted(ratio: float, num_admitted: int) -> None:
    """Prompts of 2 blocks with 16 tokens to draw: expected to take 0, 2 or 4 blocks more each, out of 12."""
    bench = careful_bench(ratio)
    for number in range(6):
        bench.add([number] * 7, 16)
    assert len(bench.step()[0].admitted) == num_admitted


def running(num_output: int, max_tokens: int) -> Sequence:
    sequence = make_sequence([1] * 4, max_tokens, "x")
    for _ in range(num_output):
        sequence.tokens.append(1)
    return sequence


def test_the_ratio_relaxes_step_by_step_to_its_floor() -> None:
    ratio = NewTokenRatio(0.7)
    values = []
    for _ in range(RELAX_STEPS + 10):
        ratio.relax()
        values.append(ratio.value)
    assert values == sorted(values, reverse=True)
    assert values[RELAX_STEPS // 2] == pytest.approx((0.7 + ratio.floor) / 2, rel=0.02)
    assert values[-1] == ratio.floor == pytest.approx(0.098)


def test_a_retraction_makes_the_estimate_what_was_really_drawn_and_never_less_careful() -> None:
    ratio = NewTokenRatio(0.5)
    for _ in range(RELAX_STEPS + 10):
        ratio.relax()
    ratio.retracted([running(60, 100), running(20, 100)])
    assert ratio.value == (80 + 2 * RETRACTION_HORIZON) / 200
    ratio.retracted([running(0, 1000)])
    assert ratio.value == 0.6
    ratio.retracted([running(99, 100)])
    assert ratio.value == 1.0
    ratio.idle()
    assert ratio.value == 0.5


def test_a_ratio_of_zero_stays_off() -> None:
    ratio = NewTokenRatio(0.0)
    ratio.retracted([running(60, 100)])
    assert ratio.value == 0.0


def test_a_refusal_stands_until_blocks_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = careful_bench(0.0, num_blocks=6)
    bench.add([1] * (3 * BLOCK_SIZE), 8)
    bench.add([2] * (4 * BLOCK_SIZE), 2)
    attempts: list[Sequence] = []
    admit = bench.blocks.admit

    def counted(sequence: Sequence, state: BlockState, *, num_next: int | None = None, headroom: int = 0) -> bool:
        attempts.append(sequence)
        return admit(sequence, state, num_next=num_next, headroom=headroom)

    monkeypatch.setattr(bench.blocks, "admit", counted)
    plans = bench.run()
    assert len(attempts) == 3  # the first; the second in vain; the second again when the first has ended
    assert sum(plan.held_back == "no blocks" for plan in plans) > 3
