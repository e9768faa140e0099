"""What sets the schedulers apart in their step plans, how sequences end under all of them, and schedulers by name."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import get_args

import pytest

from kvrelay import scheduler_names as scheduler_names_module
from kvrelay.config.loader import ConfigError, load_config
from kvrelay.config.worker import WorkerConfig
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.scheduler_names import BUILT_IN_SCHEDULERS, ENTRY_POINT_GROUP, UnknownScheduler, scheduler_names
from kvrelay.scheduling import policies as registry
from kvrelay.scheduling.memory.block_manager import OnDemandBlocks
from kvrelay.scheduling.plan import PlanBuilder, PlannedRow, SequenceOutput, StepPlan
from kvrelay.scheduling.policies import SarathiPolicy
from kvrelay.scheduling.scheduler import Scheduler, make_scheduler
from kvrelay.scheduling.scheduler_settings import Chunking, Retraction, SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import RemoteKV, Sequence, SequenceState
from kvrelay.scheduling.step_cost import StepCost, pairs
from kvrelay.worker.startup import scheduler_settings
from tests.unit.scheduling.bench import EOS, SCHEDULERS, SENDER, Bench, make_sequence


def long_prompt_among_decodes(scheduler: str) -> tuple[list[Sequence], list[StepPlan]]:
    """Three sequences decode, then a long prompt arrives; the plans until its first token."""
    bench = Bench(num_blocks=128, token_budget=16, max_running=8, scheduler=scheduler, cache=False)
    decoding = [bench.add([number] * 4, 60) for number in (1, 2, 3)]
    bench.step()
    bench.step()
    late = bench.add([4] * 150, 5)
    plans = []
    while not late.num_output:
        plans.append(bench.step()[0])
    return decoding, plans


LONG_PROMPT_AMONG_DECODES = {
    "sarathi": [(13, 3)] * 11 + [(7, 3)],  # no decode waits
    "vllm": [(150, 0)],  # decodes wait for the whole prompt
    "simple_chunking": [(16, 0), (0, 3)] * 9 + [(6, 0)],
    "orca": [(150, 3)],
}


@pytest.mark.parametrize(("scheduler", "shapes"), LONG_PROMPT_AMONG_DECODES.items())
def test_tokens_of_a_long_prompt_and_of_decodes_in_each_step(scheduler: str, shapes: list[tuple[int, int]]) -> None:
    _, plans = long_prompt_among_decodes(scheduler)
    assert [(plan.num_prefill_tokens, plan.num_decode_tokens) for plan in plans] == shapes


def test_under_faster_transformer_an_arrival_waits_for_the_batch_to_end() -> None:
    decoding, plans = long_prompt_among_decodes("faster_transformer")
    assert all(sequence.state is SequenceState.FINISHED for sequence in decoding)
    assert all(plan.held_back == "a batch is running" for plan in plans[:-1])
    assert plans[-1].num_prefill_tokens == 150


def test_a_batch_of_faster_transformer_computes_all_its_prompts_before_it_decodes() -> None:
    bench = Bench(num_blocks=128, token_budget=16, max_running=8, scheduler="faster_transformer", cache=False)
    for number in range(4):
        bench.add([number] * 10, 3)
    shapes = [(plan.num_prefill_tokens, plan.num_decode_tokens) for plan in bench.run()]
    assert shapes == [(10, 0)] * 4 + [(0, 4)] * 2


def test_a_batch_of_faster_transformer_is_as_large_as_max_running() -> None:
    bench = Bench(num_blocks=512, token_budget=128, max_running=100, scheduler="faster_transformer")
    for number in range(110):
        bench.add([number] * 5, 3)
    assert len(bench.step()[0].admitted) == 100


def test_vllm_fills_a_step_with_prompts_that_fit_the_budget() -> None:
    bench = Bench(num_blocks=128, token_budget=16, max_running=8, scheduler="vllm", cache=False)
    for length in (6, 9, 3, 40, 2):
        bench.add([length] * length, 1)
    assert [plan.num_prefill_tokens for plan in bench.run()] == [15, 3, 40, 2]


@pytest.mark.parametrize(("scheduler", "num_blocks"), [("vllm", 2), ("sarathi", 5), ("orca", 8)])
def test_how_much_is_allocated_at_admission(scheduler: str, num_blocks: int) -> None:
    """A prompt of 18 tokens and 13 of output, blocks of 4: on demand, the prompt, or all of it (but its last token)."""
    bench = Bench(num_blocks=64, token_budget=8, max_running=4, scheduler=scheduler)
    sequence = bench.add([1] * (18 if scheduler != "vllm" else 7), 13)
    bench.scheduler.schedule()
    assert sequence.table.num_blocks == num_blocks


def test_reservation_wastes_most_and_allocation_on_demand_less_than_a_block() -> None:
    wasted = {}
    for scheduler in SCHEDULERS:
        bench = Bench(num_blocks=64, token_budget=16, max_running=4, scheduler=scheduler, cache=False)
        bench.add([1] * 10, 40)
        bench.step()
        wasted[scheduler] = bench.blocks.slot_use(bench.scheduler.running.values()).wasted
    assert wasted["orca"] == wasted["faster_transformer"] == 52 - 10  # 49 tokens are ever computed: 13 blocks
    assert wasted["vllm"] == wasted["sarathi"] == wasted["simple_chunking"] == 2


@pytest.mark.parametrize("scheduler", ["orca", "faster_transformer"])
def test_reserved_sequences_are_never_preempted(scheduler: str) -> None:
    bench = Bench(num_blocks=8, token_budget=32, max_running=4, scheduler=scheduler, cache=False)
    for number in range(6):
        bench.add([number] * 5, 12)
    bench.run()
    assert bench.scheduler.num_preemptions == 0


@pytest.mark.parametrize("scheduler", ["orca", "faster_transformer"])
def test_an_adopted_sequence_gets_its_reservation_if_there_is_room(scheduler: str) -> None:
    bench = Bench(num_blocks=9, token_budget=32, max_running=4, scheduler=scheduler, cache=False)
    first = bench.adopt([1] * 8, 12)
    assert first is not None
    assert first.table.num_blocks == 5
    second = bench.adopt([2] * 8, 12)
    assert second is not None
    assert second.table.num_blocks == 2  # the other 3 are not there; it goes on as blocks come
    bench.run()
    assert first.num_output == second.num_output == 12


@pytest.mark.parametrize("scheduler", ["orca", "faster_transformer"])
def test_an_adopted_sequence_takes_no_blocks_that_are_reserved_for_others(scheduler: str) -> None:
    """Of 11 blocks its prompt has 2 and its output wants 3, but 6 are reserved for the samples of the other."""
    bench = Bench(num_blocks=11, token_budget=32, max_running=8, scheduler=scheduler, cache=False)
    handoff = bench.handoff([2] * 8, 12)
    assert list(bench.scheduler.reserve()) == [handoff]
    first = bench.handoff([1] * 8, 2, ("samples", 0, 3), RemoteKV(SENDER, num_to_come=2))
    assert list(bench.scheduler.reserve()) == [first]
    assert bench.scheduler.lifecycle.num_reserved_blocks == 6
    bench.arrive(handoff)
    assert handoff.table.num_blocks == 2
    assert bench.pool.num_available == 7


@pytest.mark.parametrize(("retraction", "victim"), [("latest", 1), ("least_progress", 0)])
def test_who_is_preempted_when_blocks_run_out(retraction: Retraction, victim: int) -> None:
    """Two decode; the earlier one has drawn less, as the later one was adopted in the middle of its output."""
    settings = SchedulerSettings(retraction=retraction)
    bench = Bench(num_blocks=6, token_budget=16, max_running=4, cache=False, settings=settings)
    pair = [bench.add([1] * 8, 16)]
    bench.step()
    adopted = bench.adopt([2] * 8, 16)
    assert adopted is not None
    adopted.num_prompt = 3  # five of its tokens are output
    pair.append(adopted)
    preempted: list[Sequence] = []
    while not preempted:
        preempted += bench.step()[0].preempted
    assert preempted == [pair[victim]]


def test_a_chunk_shrinks_to_the_blocks_there_are_before_anybody_is_preempted() -> None:
    bench = Bench(num_blocks=8, token_budget=12, max_running=4, cache=False, blocks=OnDemandBlocks)
    bench.add([1] * 7, 30)
    bench.add([2] * 25, 2)
    plans = [bench.step()[0] for _ in range(3)]
    assert [plan.num_prefill_tokens for plan in plans] == [12, 11, 4]  # one of the eight blocks is left
    assert not any(plan.preempted for plan in plans)


def test_a_preempted_sequence_gives_back_its_part_of_the_budget() -> None:
    sequence = make_sequence([1], 5, "x")
    builder = PlanBuilder(8)
    builder.add_decode(PlannedRow(sequence, 1, 1, is_prefill=False, sample=True))
    builder.preempt(sequence)
    assert (builder.budget_left, builder.rows, builder.preempted) == (8, (), [sequence])


def test_dynamic_chunks_shrink_as_the_prompt_grows() -> None:
    sizes = {}
    for chunking in get_args(Chunking):
        settings = SchedulerSettings(chunking=chunking)
        bench = Bench(num_blocks=8192, token_budget=1024, max_running=4, settings=settings)
        bench.add([1] * 20000, 1)
        sizes[chunking] = [plan.num_prefill_tokens for plan in bench.run()]
    assert set(sizes["fixed"][:-1]) == {1024}
    dynamic = sizes["dynamic"]
    assert dynamic[0] == 1024
    assert dynamic == sorted(dynamic, reverse=True)
    assert dynamic[-2] < 1024 / 2
    assert sum(dynamic) == 20000


@pytest.mark.parametrize("scheduler", ["sarathi", "simple_chunking"])
def test_dynamic_chunks_follow_the_time_that_steps_really_take(scheduler: str) -> None:
    """On a machine where attention costs nothing chunks stop shrinking; where it costs much they shrink more."""
    sizes = {}
    for name, pair_s in (("free", 0.0), ("dear", 1e-7)):
        machine = StepCost(1e-4, 1e-5, pair_s)
        settings = SchedulerSettings(chunking="dynamic")
        bench = Bench(num_blocks=8192, token_budget=512, max_running=4, scheduler=scheduler, settings=settings)
        bench.add([1] * 20000, 1)
        while bench.scheduler.has_work:
            plan = bench.scheduler.schedule()
            (row,) = plan.rows
            if not row.sample:  # the last chunk is what is left
                sizes[name] = row.num_tokens
            took_s = machine.step_s(row.num_tokens, pairs(row.position, row.num_tokens))
            bench.scheduler.commit(plan, replace(bench.forward(plan), forward_s=took_s))
    assert sizes["free"] > 450
    assert sizes["dear"] < 60


# -- how sequences end -----------------------------------------------------------------------------------------------


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    bench = Bench()
    bench.add([1, 2, 3, 1, 2, 3, 1, 2], 1)
    bench.step()
    again = bench.add([1, 2, 3, 1, 2, 3, 1, 2], 1)
    plan, outputs = bench.step()
    assert [(row.position, row.num_tokens) for row in plan.rows] == [(4, 4)]
    assert again.num_cached_tokens == 4
    assert outputs[0].finish is FinishReason.LENGTH


def test_scoring_a_prompt_draws_nothing_and_reuses_nothing() -> None:
    bench = Bench()
    bench.add([1] * 9, 0)
    plan, outputs = bench.step()
    assert not plan.rows[0].sample
    assert (outputs[0].token_ids, outputs[0].finish) == ((), FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("token_id", "sampling", "reason"),
    [
        (EOS, Sampling(max_tokens=9), FinishReason.STOP_TOKEN),
        (EOS, Sampling(max_tokens=9, ignore_eos=True), None),
        (5, Sampling(max_tokens=9, stop_token_ids=(5,)), FinishReason.STOP_TOKEN),
        (5, Sampling(max_tokens=1), FinishReason.LENGTH),
        (5, Sampling(max_tokens=9), None),
    ],
)
def test_why_a_sequence_ends(token_id: int, sampling: Sampling, reason: FinishReason | None) -> None:
    bench = Bench()
    sequence = make_sequence([1, 2], 1, "r")
    sequence.sampling = sampling
    bench.scheduler.add(sequence)
    plan = bench.scheduler.schedule()
    (output,) = bench.scheduler.commit(plan, bench.forward(plan, token_id))
    assert output.finish is reason


@pytest.mark.parametrize(("token_budget", "max_running"), [(0, 1), (4, 0), (4, 5)])
def test_limits_that_make_no_sense_are_refused(token_budget: int, max_running: int) -> None:
    with pytest.raises(ValueError, match="max_running"):
        SchedulerLimits(token_budget, max_running, 64, frozenset())


# -- a resumed prompt ends with output of an earlier attempt, so its last token looks like a decode -------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("prefill_only", [False, True])
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 18, 33])
def test_a_resumed_prompt_is_told_once_as_prefilled_wherever_its_last_chunk_begins(
    scheduler: str, prefill_only: bool, num_tokens: int
) -> None:
    bench = Bench(num_blocks=16, token_budget=16, scheduler=scheduler)
    sequence = make_sequence(list(range(1, num_tokens + 1)), max_tokens=9, name="resumed")
    sequence.num_prompt = num_tokens - 3
    sequence.prefill_only = prefill_only
    bench.scheduler.add(sequence)
    outputs: list[SequenceOutput] = []
    while not outputs:
        plan = bench.scheduler.schedule()
        assert plan.rows
        outputs = bench.scheduler.commit(plan, bench.forward(plan))
    (output,) = outputs
    assert output.prefilled
    assert output.index == 3
    assert sequence.block_state is (BlockState.COMPUTING if prefill_only else BlockState.RUNNING)
    if not prefill_only:
        plan = bench.scheduler.schedule()
        (output,) = bench.scheduler.commit(plan, bench.forward(plan))
        assert not output.prefilled
        assert output.index == 4


# -- schedulers by name, and what the configuration says about names that make no sense ------------------------------


OWN = EntryPoint("own", f"{__name__}:OwnPolicy", ENTRY_POINT_GROUP)


class OwnPolicy(SarathiPolicy):
    """As another package would offer it."""


def make(name: str) -> Scheduler:
    pool, limits = BlockPool(8, 16), SchedulerLimits(8, 4, 64, frozenset())
    return make_scheduler(name, limits, pool, PrefixCache(pool), SchedulerSettings())


def offer(monkeypatch: pytest.MonkeyPatch, *offers: EntryPoint) -> None:
    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "kvrelay.schedulers"
        return [entry_point for entry_point in offers if name in (None, entry_point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(scheduler_names_module, "entry_points", entry_points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: OwnPolicy)


def config(*flags: str) -> WorkerConfig:
    return load_config(WorkerConfig, ["--model", "m", *flags], environ={}, role="decode")


def test_every_built_in_name_makes_its_scheduler() -> None:
    names = {name: type(make(name).policy).__name__ for name in registry.BUILT_IN}
    assert names == {
        "sarathi": "SarathiPolicy",
        "vllm": "VllmPolicy",
        "simple_chunking": "SimpleChunkingPolicy",
        "orca": "OrcaPolicy",
        "faster_transformer": "FasterTransformerPolicy",
    }
    assert tuple(registry.BUILT_IN) == BUILT_IN_SCHEDULERS


def test_an_entry_point_offers_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, OWN)
    assert scheduler_names()[-1] == "own"
    assert isinstance(make("own").policy, OwnPolicy)
    assert make("own").policy is not make("own").policy, "a policy may have state"
    assert config("--scheduler", "own").scheduler == "own"


def test_a_built_in_name_cannot_be_taken_over_and_an_own_one_not_be_offered_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, EntryPoint("sarathi", "x:y", ENTRY_POINT_GROUP), OWN, OWN)
    assert type(make("sarathi").policy) is SarathiPolicy
    with pytest.raises(UnknownScheduler, match="offered more than once"):
        make("own")


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UnknownScheduler, match="must be one of sarathi, vllm, simple_chunking, orca"):
        make("fifo")


def test_the_configuration_reaches_the_policy() -> None:
    flags = (
        "--queue-order",
        "lpm",
        "--chunking",
        "dynamic",
        "--new-token-ratio",
        "0.4",
        "--retraction",
        "least_progress",
    )
    expected = SchedulerSettings(
        "lpm", chunking="dynamic", retraction="least_progress", new_token_ratio=0.4, jump_forward=True
    )
    assert scheduler_settings(config(*flags)) == expected
    assert scheduler_settings(config()) == SchedulerSettings(jump_forward=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--scheduler", "fifo"), r"--scheduler = 'fifo': must be one of sarathi, .*faster_transformer"),
        (("--queue-order", "lifo"), r"--queue-order = 'lifo': must be one of fcfs, lpm, dfs_weight, priority, sjf"),
        (("--chunking", "odd"), r"--chunking = 'odd': must be one of fixed, dynamic"),
        (("--new-token-ratio", "1.5"), r"--new-token-ratio = '1.5': must be a number, 0 to 1"),
        (("--scheduler", "orca", "--chunking", "dynamic"), "chunking = dynamic needs a scheduler that cuts prompts"),
    ],
)
def test_values_that_make_no_sense_are_refused_at_the_door(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*flags)
