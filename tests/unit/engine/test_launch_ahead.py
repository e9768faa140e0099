"""Steps launched before the ones before them have landed: the same tokens, and launches that wait for nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.run.graph_check import Waits
from kvrelay.engine.run.in_flight import StepInFlight
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.engine.sample import random_sampling, sampler
from kvrelay.protocol.sampling import Sampling
from kvrelay.step.batch import BlockCopy, CandidatesWanted, DeviceLost, HostCopies, RowsFailed, WorkerBatch, WorkerRow
from tests.fakes.fake_cuda_graphs import CapturableTorchBackend, FakeRecorder
from tests.fakes.late_copies import LateCopies
from tests.unit.engine.driving import Driven, failing_logits, run, start
from tests.unit.engine.driving_ahead import AheadDriver
from tests.unit.engine.test_graphs import graphs_of

NUM_BLOCKS = 96
LENGTHS = (1, 15, 16, 17, 100, 9, 37)
GREEDY = Sampling(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "free": Sampling(temperature=1.0, seed=3),
    "limited": Sampling(temperature=1.3, top_p=0.95, seed=4, logprobs=2),
    "few": Sampling(temperature=1.0, top_k=40, min_p=0.01, seed=5),
    "biased": Sampling(temperature=0.7, seed=6, min_tokens=8, logit_bias={7: 2.0, 9: -3.0}, logprobs=1),
    "penalised": Sampling(temperature=0.9, seed=7, frequency_penalty=0.6, repetition_penalty=1.2),
    "few allowed": Sampling(
        temperature=1.0, seed=9, allowed_token_ids=(*range(40), 2), bad_words=((5,),), min_tokens=3
    ),
    "scored": Sampling(temperature=0.9, seed=8, prompt_logprobs=2),
}


@pytest.fixture(scope="module")
def models(model_dir: Callable[[str], Path]) -> Callable[[str], CausalModel]:
    made: dict[str, CausalModel] = {}

    def get(name: str) -> CausalModel:
        if name not in made:
            source = open_source(str(model_dir(name)), "float32", max_model_len=256)
            made[name] = load_model(source, 16, CapturableTorchBackend())
        return made[name]

    return get


def runner_over(model: CausalModel, *, captured: bool = False, ahead: bool = True) -> TransformersRunner:
    runner = TransformersRunner(model, NUM_BLOCKS, with_scratch=captured, launches_ahead=ahead)
    if captured:
        runner.try_graphs(graphs_of(FakeRecorder(), (1, 2, 4, 8)))
    return runner


def mixed(runner: TransformersRunner, num_output: int = 24, seed: int = 0) -> list[Driven]:
    """A sequence of each kind of sampling."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 300, length).tolist() for length in (*LENGTHS, 50)]
    sequences = start(runner, prompts, GREEDY, num_output, seed)
    for sequence, sampling in zip(sequences, SAMPLINGS.values(), strict=True):
        runner.drop_sequence(sequence.key)
        sequence.sampling = sampling
        runner.add_sequence(sequence.key, sampling, sequence.prompt, len(sequence.prompt))
    return sequences


def expected(model: CausalModel, num_output: int = 24, seed: int = 0) -> list[Driven]:
    """One step after the other."""
    runner = runner_over(model, ahead=False)
    sequences = mixed(runner, num_output, seed)
    run(runner, sequences, seed)
    return sequences


@pytest.fixture
def reruns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    run_again = StepInFlight._run_again

    def noted(step: StepInFlight) -> None:
        steps.append(step.batch.step)
        run_again(step)

    monkeypatch.setattr(StepInFlight, "_run_again", noted)
    return steps


@pytest.mark.everyday(4)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("num_best", [1000, 4])
def test_tokens_and_logprobs_are_those_of_one_step_after_the_other(
    captured: bool,
    seed: int,
    num_best: int,
    models: Callable[[str], CausalModel],
    monkeypatch: pytest.MonkeyPatch,
    reruns: list[int],
) -> None:
    """Copies to the host have nothing in them before they are waited for. With few tokens to look at first, draws often
    turn out wrong when they land."""
    alone = expected(models("qwen3"), seed=seed)
    monkeypatch.setattr(random_sampling, "_BEST", (num_best, 1000))
    monkeypatch.setattr(sampler, "_WORTH_IT", 1.0)
    LateCopies(monkeypatch)
    runner = runner_over(models("qwen3"), captured=captured)
    sequences = mixed(runner, seed=seed)
    driver = AheadDriver(runner, sequences, seed).run()
    assert driver.num_launched_ahead > 10
    assert bool(reruns) is (num_best == 4)
    for got, wanted in zip(sequences, alone, strict=True):
        assert got.output == wanted.output
        assert [each and each.top_ids for each in got.logprobs] == [each and each.top_ids for each in wanted.logprobs]
        for mine, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [each.token_id for each in got.prompt_logprobs] == [each.token_id for each in wanted.prompt_logprobs]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_other_models_give_the_same(architecture: str, models: Callable[[str], CausalModel]) -> None:
    sequences = mixed(runner := runner_over(models(architecture), captured=True))
    AheadDriver(runner, sequences).run()
    assert [each.output for each in sequences] == [each.output for each in expected(models(architecture))]


def decoding(runner: TransformersRunner, sampling: Sampling = GREEDY) -> tuple[list[Driven], WorkerBatch]:
    """Three sequences whose prompts are computed, and the step that follows."""
    sequences = start(runner, [[1, 2, 3], [4, 5], [6] * 20], sampling, num_output=9)
    return sequences, WorkerBatch(1, [each.row(20) for each in sequences])


def behind(sequences: list[Driven], batch: WorkerBatch, ahead: int = 1) -> WorkerBatch:
    """The step after a step that all of them drew in."""
    rows = [
        WorkerRow(each.key, np.zeros(1, np.int32), len(each.prompt) + ahead - 1, each.blocks, True, False, True)
        for each in sequences
    ]
    return WorkerBatch(batch.step + ahead, rows)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["greedy", "free", "limited", "few", "biased"])
def test_a_launch_behind_another_step_waits_for_nothing(
    captured: bool, name: str, models: Callable[[str], CausalModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither decoding rows, nor a prompt beside them; nor a landing for more than its own copies."""
    runner = runner_over(models("qwen3"), captured=captured)
    sequences, first = decoding(runner, SAMPLINGS[name])
    (prompt,) = start(runner, [[7] * 30], SAMPLINGS[name], 1, seed=1)
    # Their blocks overlap those of the others: nobody looks at what is drawn here.
    monkeypatch.setattr(random_sampling, "_BEST", (1000, 1000))  # so that nobody draws again
    copies = LateCopies(monkeypatch)
    steps = [runner.launch(first)]
    second = behind(sequences, first)
    third = behind(sequences, first, 2)
    third = replace(third, rows=[prompt.row(12), *third.rows])
    for batch in (second, third):
        assert runner.can_launch_behind(batch)
        waited = list(copies.landed)
        num_started = copies.num_started
        with Waits() as waits:
            steps.append(runner.launch(batch))
        assert waits.ops == []
        assert copies.landed == waited
        # What the step before drew is there before this one's copies are.
        steps.pop(0).land()
        assert copies.landed and max(copies.landed) < num_started
    steps[0].land()


def test_what_needs_the_host_is_not_launched_behind_another_step(models: Callable[[str], CausalModel]) -> None:
    runner = runner_over(models("qwen3"))
    sequences, first = decoding(runner)
    (penalised,) = start(runner, [[1] * 40], SAMPLINGS["penalised"], 2, seed=1)
    (scored,) = start(runner, [[1] * 40], SAMPLINGS["scored"], 2, seed=2)
    batch = behind(sequences, first)
    row = batch.rows[0]
    with_row = {
        "a beam": msgspec.structs.replace(row, wanted=CandidatesWanted(2, np.zeros(4, np.int32), 3)),
        "scored": scored.row(10),
    }
    copies = HostCopies((0,), (0,))
    assert runner.can_launch_behind(batch)
    assert runner.can_launch_behind(replace(batch, rows=[penalised.row(40)]))
    waits = behind([penalised], first).rows[0]
    assert runner.can_launch_behind(replace(batch, rows=[waits])), "it is sampled once the step before has landed"
    assert runner.can_launch_behind(replace(batch, rows=behind([scored], first).rows)), "its prompt is computed"
    refused = {name: replace(batch, rows=[each, *batch.rows[1:]]) for name, each in with_row.items()}
    refused |= {
        "swapped out": replace(batch, to_host=copies),
        "swapped in": replace(batch, from_host=copies),
        "copied": replace(batch, copies=[BlockCopy(0, 1)]),
        "nothing": replace(batch, rows=[]),
    }
    for name, each in refused.items():
        assert not runner.can_launch_behind(each), name
    assert not runner_over(models("qwen3"), ahead=False).can_launch_behind(batch)


def test_a_cpu_launches_nothing_ahead(models: Callable[[str], CausalModel]) -> None:
    assert not TransformersRunner(models("qwen3"), NUM_BLOCKS).launches_ahead


def test_bad_logits_leave_nothing_of_the_step_behind(models: Callable[[str], CausalModel]) -> None:
    """The good ones go on as if nobody had tried; whose logits are bad is found when its step lands."""
    runner, alone = runner_over(models("qwen3")), expected(models("qwen3"))
    sequences = mixed(runner)
    bad = sequences[2]
    spoilt: list[int] = []

    def spoil(batch: WorkerBatch) -> WorkerBatch:
        """Between a launch and its landing nobody touches the pool; here nothing of a step is under way on a CPU."""
        if len(bad.output) == 5 and not spoilt:
            runner.pool[int(bad.blocks[0])] = float("nan")
            spoilt.append(batch.step)
        return batch

    driver = AheadDriver(runner, sequences, change=spoil).run()
    assert driver.failed == {bad.key} and driver.num_failed == 1
    for got, wanted in zip(sequences, alone, strict=True):
        assert got.output == wanted.output[: len(got.output)]
        assert got is bad or len(got.output) == 24


def test_a_stale_step_has_nothing_launched_behind_it(
    models: Callable[[str], CausalModel], monkeypatch: pytest.MonkeyPatch, reruns: list[int]
) -> None:
    monkeypatch.setattr(random_sampling, "_BEST", (1, 256))
    runner = runner_over(models("qwen3"))
    sequences, first = decoding(runner, SAMPLINGS["limited"])
    launched = runner.launch(first)
    following = runner.launch(behind(sequences, first))
    assert runner.can_launch_behind(behind(sequences, first, 2)), "nobody knows yet"
    launched.land()
    assert not runner.can_launch_behind(behind(sequences, first, 2))
    following.land()
    assert reruns == [2]
    assert runner.can_launch_behind(behind(sequences, first, 2))


def test_where_draws_change_too_often_nothing_is_launched_behind_them(
    models: Callable[[str], CausalModel], monkeypatch: pytest.MonkeyPatch, reruns: list[int]
) -> None:
    """Until they do not any more. Who follows no draw does not mind."""
    runner = runner_over(models("qwen3"))
    sequences = start(runner, [[1, 2, 3]] * 4, SAMPLINGS["limited"], num_output=150)
    with monkeypatch.context() as few:
        few.setattr(random_sampling, "_BEST", (1, 1000))
        driver = AheadDriver(runner, sequences[:2]).run()
    assert 0 < len(reruns) <= driver.num_launched_ahead < 20
    batch = WorkerBatch(1, [sequences[2].row(3)])
    assert runner.can_launch_behind(batch)
    assert not runner.can_launch_behind(behind(sequences[2:], batch))
    monkeypatch.setattr(random_sampling, "_BEST", (1000, 1000))
    driver = AheadDriver(runner, sequences[2:]).run()
    assert driver.num_launched_ahead > 50


@pytest.mark.parametrize("settles", [True, False])
def test_a_launch_that_fails_leaves_nothing_under_way_and_the_step_before_as_it_is(
    settles: bool, models: Callable[[str], CausalModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_over(models("qwen3"))
    sequences, first = decoding(runner)
    launched, second = runner.launch(first), behind(sequences, first)
    raised = pytest.raises(RuntimeError if settles else DeviceLost, match="out of memory")
    with failing_logits(runner, "out of memory", settles=settles) as order, raised:
        runner.launch(second)
    assert order == ["failed", "waited"]
    drawn = [row.token_ids[0] for row in launched.land().rows]
    again = runner.execute(second)  # with the tokens that have landed
    for sequence, token_id, row in zip(sequences, drawn, again.rows, strict=True):
        alone = runner_over(models("qwen3"), ahead=False)
        copy = replace(sequence, blocks=np.arange(4, dtype=np.int32), num_output=2, tokens=[])
        alone.add_sequence(copy.key, GREEDY, copy.prompt, len(copy.prompt))
        run(alone, [copy])
        assert copy.output == [token_id, row.token_ids[0]]


def test_a_draw_that_was_begun_by_a_step_that_fails_is_given_up(models: Callable[[str], CausalModel]) -> None:
    """A beam's logits are bad, which shows at the launch, behind the draws of other rows."""
    runner = runner_over(models("qwen3"))
    drawing, searched = start(runner, [[1] * 20, [2] * 20], SAMPLINGS["penalised"], 3)
    runner.pool[int(searched.blocks[0])] = float("nan")
    beam = msgspec.structs.replace(
        searched.row(20),
        token_ids=np.array([2], np.int32),
        position=19,
        wanted=CandidatesWanted(2, np.full(20, 2, np.int32), 20),
    )
    with pytest.raises(RowsFailed) as caught:
        runner.execute(WorkerBatch(1, [drawing.row(20), beam]))
    assert caught.value.keys == {searched.key}
    run(runner, [drawing])
    alone = runner_over(models("qwen3"), ahead=False)
    (same,) = start(alone, [[1] * 20], SAMPLINGS["penalised"], 3)
    run(alone, [same])
    assert drawing.output == same.output


def test_a_discarded_step_is_as_if_it_had_not_run(models: Callable[[str], CausalModel]) -> None:
    runner = runner_over(models("qwen3"))
    sequences, first = decoding(runner, SAMPLINGS["free"])
    launched = runner.launch(first)
    second = behind(sequences, first)
    discarded = runner.launch(second)
    launched.land()
    discarded.discard()
    got = [row.token_ids[0] for row in runner.execute(second).rows]
    plain = runner_over(models("qwen3"), ahead=False)
    same, first = decoding(plain, SAMPLINGS["free"])
    plain.execute(first)
    assert got == [row.token_ids[0] for row in plain.execute(behind(same, first)).rows]


def test_the_step_before_fails_and_the_one_behind_is_discarded(models: Callable[[str], CausalModel]) -> None:
    runner = runner_over(models("qwen3"))
    sequences, first = decoding(runner)
    runner.pool[int(sequences[0].blocks[0])] = float("nan")
    rows = [msgspec.structs.replace(first.rows[0], token_ids=np.array([5], np.int32), position=3), *first.rows[1:]]
    launched = runner.launch(replace(first, rows=rows))
    following = runner.launch(behind(sequences, first))
    with pytest.raises(RowsFailed) as caught:
        launched.land()
    assert caught.value.keys == {sequences[0].key}
    following.discard()
    assert runner.execute(replace(first, rows=first.rows[1:])).rows[0].token_ids


def test_a_step_takes_from_its_launch_or_the_landing_before_it_to_its_landing(
    models: Callable[[str], CausalModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("kvrelay.engine.run.in_flight.time", SimpleNamespace(perf_counter=lambda: now[0]))
    runner = runner_over(models("qwen3"))
    sequences, first = decoding(runner)
    now[0] = 100.0
    launched = runner.launch(first)
    now[0] = 101.0
    following = runner.launch(behind(sequences, first))
    now[0] = 110.0
    assert launched.land().forward_s == 10.0
    now[0] = 117.0
    assert following.land().forward_s == 7.0
    now[0] = 120.0
    third = runner.launch(behind(sequences, first, 2))
    now[0] = 121.0
    assert third.land().forward_s == 1.0


def test_a_step_whose_begin_was_noticed_late_took_what_the_device_says(
    models: Callable[[str], CausalModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is busy while both run: it finds both ended at the same time."""

    class Timed:
        def __init__(self, device: torch.device) -> None:
            pass

        def wait(self) -> None:
            pass

        def seconds_since(self, earlier: Timed) -> float:
            return 4.0

    now = [0.0]
    monkeypatch.setattr("kvrelay.engine.run.in_flight.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("kvrelay.engine.run.transformers_runner.Moment", Timed)
    runner = runner_over(models("qwen3"))
    sequences, first = decoding(runner)
    now[0] = 100.0
    launched, following = runner.launch(first), runner.launch(behind(sequences, first))
    now[0] = 110.0
    assert launched.land().forward_s == 10.0
    assert following.land().forward_s == 4.0, "not the nothing that lies between the two landings"
