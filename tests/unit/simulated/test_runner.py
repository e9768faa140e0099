"""Simulated devices: each token follows from the K/V that the pool holds, each step takes what the profile says."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.config import WorkerConfig
from kvrelay.device_profiles import MeasuredProfile
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.policies import BUILT_IN as SCHEDULERS
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.simulated.simulated_model import ModelFacts, Vocabulary, continuation, read_facts, salt_of
from kvrelay.simulated.simulated_runner import SimulatedRunner, make_simulated_runner
from kvrelay.step.batch import WorkerBatch, WorkerRow
from kvrelay.worker.launchers import PipelinedTimedLauncher, TimedLauncher
from kvrelay.worker.rank_loops import PipelinedStepLoop
from kvrelay.worker.step_loop import StepCallbacks, StepLoop
from tests.fakes.sequences import new_sequence
from tests.fakes.virtual_time import VirtualTimeLoop
from tests.thoroughness import examples

DEMO_MODEL = Path(__file__).parents[3] / "models" / "demo"
VOCABULARY = Vocabulary(50, np.arange(3, 50), (2,))  # so small that texts end and stop now and then
FACTS = ModelFacts(VOCABULARY, 4096, b"")
PROFILE = MeasuredProfile(
    name="plain", fixed_s=0.01, token_s=1e-3, pair_s=1e-5, kv_bytes_per_token=100, kv_tokens=640, transfer_bytes_s=1e6
)


def runner_of(
    num_blocks: int = 40, block_size: int = 8, num_host_slots: int = 0, pipeline_depth: int = 1
) -> SimulatedRunner:
    profile = msgspec.structs.replace(PROFILE, pipeline_depth=pipeline_depth)
    return SimulatedRunner(
        profile, FACTS, name="test", block_size=block_size, num_blocks=num_blocks, num_host_slots=num_host_slots
    )


@dataclass
class Served:
    output: dict[int, list[int]] = field(default_factory=dict)
    results: dict[int, SequenceOutput] = field(default_factory=dict)
    at_s: dict[int, list[float]] = field(default_factory=dict)
    num_preemptions: int = 0
    num_prefill_tokens: int = 0
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


def serve(
    runner: SimulatedRunner,
    jobs: Items[tuple[Items[int], Sampling]],
    *,
    scheduler: str = "sarathi",
    token_budget: int = 24,
    overlap: bool = True,
    are_samples: bool = False,
    pipeline_depth: int = 1,
    **policy: object,
) -> Served:
    """All jobs through a step loop, in virtual time; `are_samples`: of one request; `pipeline_depth`: of the runner."""
    spec, served = runner.spec, Served()
    limits = SchedulerLimits(token_budget, 8, spec.max_model_len, frozenset(spec.eos_token_ids))
    pool = BlockPool(spec.num_blocks, spec.block_size)
    stages = {"num_host_slots": spec.num_host_slots, "pipeline_depth": pipeline_depth}
    chosen = SchedulerSettings(**stages, **policy)  # type: ignore[arg-type]
    built = make_scheduler(scheduler, limits, pool, PrefixCache(pool), chosen)
    is_pipeline = pipeline_depth > 1 and overlap
    timed = partial(PipelinedTimedLauncher, pipeline_depth=pipeline_depth) if pipeline_depth > 1 else TimedLauncher
    loop = (PipelinedStepLoop if is_pipeline else StepLoop)(runner, built, overlap=overlap, make_launcher=timed)
    if isinstance(loop, PipelinedStepLoop):
        loop.max_in_flight = chosen.max_uncommitted

    def committed(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            number = output.sequence.key[2] if are_samples else int(output.sequence.key[0])
            served.scores.setdefault(number, []).extend(output.prompt_logprobs)
            if output.token_ids:
                served.output[number] += output.token_ids
                served.at_s[number].append(asyncio.get_running_loop().time())
            if output.finish is not None:
                served.results[number] = output
                if len(served.results) == len(jobs):
                    loop.stop()

    def failed(sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise AssertionError(cause)

    async def run() -> None:
        for number, (prompt, sampling) in enumerate(jobs):
            served.output[number], served.at_s[number] = [], []
            key = ("all", 1, number) if are_samples else (str(number), 1, 0)
            group = key[0] if are_samples else ""
            loop.add(new_sequence(key, prompt, sampling, spec.block_size, sample_group=group))
        await loop.run(StepCallbacks(lambda plan: None, committed, failed))

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as virtual:
        virtual.run(run())
    pool.check_integrity()
    assert not built.has_work and pool.num_available == pool.num_blocks
    served.num_preemptions = built.num_preemptions
    served.num_prefill_tokens = loop.totals.num_prefill_tokens
    return served


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 60),
    min_tokens=st.integers(0, 30),
    stop_token_ids=st.lists(st.integers(3, 12), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    jobs=st.lists(st.tuples(st.lists(st.integers(3, 5), min_size=1, max_size=90), samplings), min_size=1, max_size=9),
    block_size=st.sampled_from([8, 16]),
    scheduler=st.sampled_from(list(SCHEDULERS)),
    num_host_slots=st.sampled_from([0, 20]),
    overlap=st.booleans(),
    pipeline_depth=st.integers(1, 4),
)
def test_outputs_are_the_continuations_whatever_the_batches_preemptions_and_shared_prefixes(
    jobs: list[tuple[list[int], Sampling]],
    block_size: int,
    scheduler: str,
    num_host_slots: int,
    overlap: bool,
    pipeline_depth: int,
) -> None:
    runner = runner_of(160 // block_size, block_size, num_host_slots, pipeline_depth)
    preemption = "swap" if num_host_slots else "auto"
    how: dict[str, Any] = {"scheduler": scheduler, "overlap": overlap, "pipeline_depth": pipeline_depth}
    served = serve(runner, jobs, **how, preemption=preemption)
    for number, (prompt, sampling) in enumerate(jobs):
        assert served.output[number] == continuation(prompt, sampling, VOCABULARY, runner.spec.max_model_len)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 8, 9, 45])
def test_every_sample_has_the_scores_of_the_prompt(num_prompt: int, overlap: bool) -> None:
    prompt = list(range(3, 3 + num_prompt))
    sampling = Sampling(seed=1, max_tokens=5, prompt_logprobs=2, ignore_eos=True)
    alone = serve(runner_of(), [(prompt, sampling)], overlap=overlap)
    served = serve(runner_of(), [(prompt, sampling)] * 4, overlap=overlap, are_samples=True)
    assert len(alone.scores[0]) == num_prompt - 1
    assert all(served.scores[number] == alone.scores[0] for number in range(4))
    for number, output in served.output.items():
        assert output == continuation(prompt, sampling, VOCABULARY, 320, number)


def test_a_crowded_pool_preempts_and_nothing_changes() -> None:
    """The case above meets preemptions at random; this one must."""
    jobs = [([3 + n] * 20, Sampling(temperature=0, max_tokens=60, ignore_eos=True)) for n in range(6)]
    for num_host_slots in (0, 30):
        runner = runner_of(24, num_host_slots=num_host_slots)
        served = serve(runner, jobs, preemption="swap" if num_host_slots else "recompute")
        assert served.num_preemptions > 0
        assert [served.output[n] for n in range(6)] == [continuation(*job, VOCABULARY, 192) for job in jobs]


def test_a_step_takes_what_the_profile_says() -> None:
    sampling = Sampling(temperature=0, max_tokens=5, ignore_eos=True)
    served = serve(runner_of(), [(list(range(3, 33)), sampling)], token_budget=24)
    first_s = (0.01 + 24e-3 + 1e-5 * 24 * 12) + (0.01 + 6e-3 + 1e-5 * 6 * (24 + 3))
    decodes = [0.01 + 1e-3 + 1e-5 * position for position in range(30, 34)]
    assert served.at_s[0] == pytest.approx([first_s + sum(decodes[:n]) for n in range(5)])


def test_stages_compute_the_chunks_of_a_prompt_at_the_same_time() -> None:
    """4 chunks of 24 tokens: each stage has an equal part of a step, and the first stage is never idle."""
    sampling = Sampling(temperature=0, max_tokens=1, ignore_eos=True)
    jobs = [(list(range(3, 3 + 96)), sampling)]
    chunks = [0.01 + 24e-3 + 1e-5 * (24 * start + 24 * 12) for start in (0, 24, 48, 72)]
    for pipeline_depth in (1, 2, 4):
        served = serve(runner_of(pipeline_depth=pipeline_depth), jobs, pipeline_depth=pipeline_depth)
        # Later chunks take longer, so each stage begins the last one when it has computed those before.
        expected = (sum(chunks) + (pipeline_depth - 1) * chunks[-1]) / pipeline_depth
        assert served.at_s[0] == pytest.approx([expected], rel=0.02)
        alone = serve(runner_of(pipeline_depth=pipeline_depth), jobs, pipeline_depth=pipeline_depth, overlap=False)
        assert alone.at_s[0] == pytest.approx([sum(chunks)], rel=0.02)


def test_stages_decode_groups_of_sequences_in_turns() -> None:
    """Two stages decode each sequence as fast as one device, and have a step for the other group meanwhile."""
    sampling = Sampling(temperature=0, max_tokens=20, ignore_eos=True)
    jobs = [([3 + number] * 8, sampling) for number in range(4)]
    served = serve(runner_of(pipeline_depth=2), jobs, pipeline_depth=2)
    for number in range(4):
        gaps = np.diff(served.at_s[number][2:])
        assert gaps.max() < 1.3 * (0.01 + 2e-3 + 2e-5 * 28)
    ends = sorted({round(at, 6) for each in served.at_s.values() for at in each[2:]})
    assert len(ends) >= 2 * 17, "all sequences got their tokens at the same time"


def test_a_late_timer_does_not_make_the_device_slower() -> None:
    batch = WorkerBatch(1, [row_of(list(range(3, 20)), np.arange(3))])

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        runner = runner_of()
        runner.add_sequence(KEY, GREEDY, [], 0)
        launcher = TimedLauncher(runner, None)
        first = await launcher.launch(batch, ahead=False)
        step_s = (await first.land()).forward_s
        assert loop.time() == pytest.approx(step_s)
        loop.advance(step_s / 2)
        await (await launcher.launch(batch, ahead=True)).land()
        assert loop.time() == pytest.approx(2 * step_s)
        loop.advance(step_s / 2)
        await (await launcher.launch(batch, ahead=False)).land()  # nothing waited for the device, so it begins now
        assert loop.time() == pytest.approx(3.5 * step_s)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as virtual:
        virtual.run(run())


# -- wrong K/V --------------------------------------------------------------------------------------------------------

KEY = ("r", 1, 0)
GREEDY = Sampling(temperature=0.0, max_tokens=9, ignore_eos=True)


def row_of(token_ids: list[int], blocks: np.ndarray, position: int = 0) -> WorkerRow:
    return WorkerRow(KEY, np.asarray(token_ids, np.int32), position, blocks.astype(np.int32), True, position == 0)


def draws_after(damage: str | None, num_prompt: int) -> list[int]:
    """The first tokens of many prompts, each after its last token was fed on its own, upon K/V that was damaged."""
    drawn: list[int] = []
    for seed in range(20):
        prompt = random.Random(seed).choices(range(3, 50), k=num_prompt)
        runner, table = runner_of(), np.random.default_rng(seed).permutation(40)[: -(-num_prompt // 8)]
        runner.add_sequence(KEY, GREEDY, prompt, num_prompt)
        runner.execute(WorkerBatch(1, [row_of(prompt[:-1], table)]))
        pool = runner.pool_bytes
        match damage:
            case "zeroed":
                pool[table[1]] = 0
            case "swapped":
                pool[[table[0], table[2]]] = pool[[table[2], table[0]]]
            case "another prompt's":
                other = runner_of()
                other.add_sequence(KEY, GREEDY, prompt, num_prompt)
                other.execute(WorkerBatch(1, [row_of([3, *prompt[:-2]], table)]))
                pool[table[1]] = other.pool_bytes[table[1]]
            case "a bit":
                pool[table[1]][-8] ^= 4
            case "the tail's":
                pool[table[-1]] = 0
        (result,) = runner.execute(WorkerBatch(2, [row_of(prompt[-1:], table, num_prompt - 1)])).rows
        drawn += result.token_ids
    return drawn


@pytest.mark.parametrize("damage", ["zeroed", "swapped", "another prompt's", "a bit", "the tail's"])
def test_a_wrong_block_gives_wrong_tokens(damage: str) -> None:
    right, wrong = draws_after(None, 30), draws_after(damage, 30)
    assert right == [
        continuation(random.Random(seed).choices(range(3, 50), k=30), GREEDY, VOCABULARY, 320)[0] for seed in range(20)
    ]
    # One token in 47 is the right one by chance.
    assert sum(a != b for a, b in zip(right, wrong, strict=True)) > 15


# -- what comes with tokens -------------------------------------------------------------------------------------------


def test_seed_and_sequence_index_count_when_tokens_are_drawn_and_not_when_they_are_greedy() -> None:
    def text(sampling: Sampling, sequence: int = 0) -> tuple[int, ...]:
        return tuple(continuation([5, 6, 7], sampling, VOCABULARY, 100, sequence))

    drawn = {text(Sampling(temperature=0.7, seed=s, max_tokens=20, ignore_eos=True), n) for s in (1, 2) for n in (0, 1)}
    assert len(drawn) == 4
    assert len({text(Sampling(temperature=0, seed=s, max_tokens=20), n) for s in (1, 2) for n in (0, 1)}) == 1


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 63), st.integers(0, 127))
def test_every_bit_of_a_seed_changes_what_is_drawn(seed: int, bit: int, sequence: int) -> None:
    other = (seed ^ (1 << bit)) % 2**64
    signed = other - 2**64 if other >= 2**63 else other
    salts = {salt_of(Sampling(temperature=1, seed=each), sequence) for each in (seed, signed)}
    assert len(salts) == 2 and max(salts) < 2**64


def test_logprobs_are_those_of_a_distribution() -> None:
    runner, sampling = runner_of(), Sampling(max_tokens=3, logprobs=4, prompt_logprobs=2, temperature=0)
    prompt = list(range(3, 20))
    runner.add_sequence(KEY, sampling, prompt, len(prompt))
    (result,) = runner.execute(WorkerBatch(1, [row_of(prompt, np.arange(3))])).rows
    (entry,) = result.logprobs
    assert (entry.token_id,) == tuple(result.token_ids) == (entry.top_ids[0],)
    assert len(set(entry.top_ids)) == len(entry.top_logprobs) == 4
    assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)
    assert sum(map(math.exp, entry.top_logprobs)) < 1
    assert [each.token_id for each in result.prompt_logprobs] == prompt[1:]
    assert all(len(each.top_ids) == 2 and each.logprob < 0 for each in result.prompt_logprobs)


# -- the model and the configuration ----------------------------------------------------------------------------------


def test_the_vocabulary_has_no_special_token_and_the_ends_that_the_model_names() -> None:
    facts = read_facts(str(DEMO_MODEL))
    assert (facts.vocabulary.size, facts.vocabulary.eos_ids, facts.max_model_len) == (2048, (2, 0), 8192)
    assert facts.vocabulary.regular.tolist() == list(range(3, 2048))


def config_of(**values: object) -> WorkerConfig:
    given = {"model": str(DEMO_MODEL), "served_model_name": "m", "role": "decode", "backend": "simulated"} | values
    return WorkerConfig.model_validate(given)


def test_the_pool_holds_what_the_profile_says_or_what_is_asked_for() -> None:
    spec = make_simulated_runner(config_of()).spec
    assert spec.block_bytes == 16 * 131072  # of Llama 3 8B
    assert spec.num_blocks == int((0.9 * 80e9 - 2 * 8.03e9) // 131072) // 16
    assert spec.num_host_slots == spec.num_blocks // 4
    assert spec.max_model_len == 8192
    assert make_simulated_runner(config_of(num_blocks=100, max_model_len=1600)).spec.num_blocks == 100
    assert make_simulated_runner(config_of(num_blocks=10**5, max_model_len=10**6)).spec.max_model_len == 10**6
    assert make_simulated_runner(config_of(kv_memory_bytes=64 << 20)).spec.num_blocks == 32
    assert make_simulated_runner(config_of(role="prefill")).spec.num_host_slots == 0


def test_devices_of_one_model_exchange_kv_and_those_of_different_models_do_not() -> None:
    def fingerprint(**values: object) -> str:
        return make_simulated_runner(config_of(**values)).spec.fingerprint

    assert fingerprint(profile="llama3-8b-h100") == fingerprint(profile="llama3-8b-a100")
    assert fingerprint(profile="llama3-8b-h100") != fingerprint(profile="llama3-70b-h100-tp4")
    assert fingerprint() != fingerprint(block_size=32)
    assert fingerprint(profile="llama3-70b-h100-tp2-pp2") == fingerprint(profile="llama3-70b-h100-tp4")


def test_the_stages_are_those_of_the_profile() -> None:
    assert config_of(profile="llama3-70b-h100-tp2-pp3").pipeline_depth == 3
    assert config_of().pipeline_depth == 1
    config = config_of(profile="llama3-70b-h100-tp2-pp3", backend="auto", pipeline_parallel_size=2)
    assert config.pipeline_depth == 2


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len 2000 does not fit the pool: 100 blocks of 16 tokens"):
        make_simulated_runner(config_of(num_blocks=100, max_model_len=2000))
    with pytest.raises(ValueError, match="no room for a block"):
        make_simulated_runner(config_of(kv_memory_bytes=1 << 20))
    (tmp_path / "config.json").write_text('{"model_type": "otter"}')
    with pytest.raises(ValueError, match=r"not a model's: KeyError: 'vocab_size'"):
        make_simulated_runner(config_of(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"profile": "abacus"}, "must be one of llama3-8b-h100"),
        ({"memory_utilization": 0.5}, "memory_utilization cannot be measured"),
        ({"profile": "llama3-8b-h100-pp2", "data_parallel_size": 2}, "ranks of data_parallel_size have no pipeline"),
        ({"num_workers": 2, "port": 5000}, "port, transfer_port and http_port must be 0"),
        ({"num_workers": 2, "metrics_file": "m.jsonl"}, "metrics_file must have {worker_id} in it"),
        ({"num_workers": 2, "event_log": "e.log"}, "event_log must have {name} in it"),
        ({"num_workers": 2, "backend": "auto"}, "several workers in a process .* need backend = simulated"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(**values)


def test_several_workers_of_a_process_have_names_of_their_own() -> None:
    several = config_of(num_workers=3, worker_id="decode-7").each_worker()
    assert [each.worker_id for each in several] == ["decode-7-0", "decode-7-1", "decode-7-2"]
    assert all(each.num_workers == 1 and each.backend == "simulated" for each in several)
    alone = config_of(worker_id="decode-7")
    assert alone.each_worker() == [alone]
