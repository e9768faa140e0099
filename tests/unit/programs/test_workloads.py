"""The workloads that come with the language."""

from __future__ import annotations

import pytest

from kvrelay_programs.workloads import Workload, find_workload, workloads
from tests.fakes.program_endpoint import FakeEndpoint


@pytest.fixture(params=list(workloads()))
def workload(request: pytest.FixtureRequest) -> Workload:
    return find_workload(request.param)


def prompts_of(workload: Workload, num_programs: int, seed: int) -> list[str]:
    endpoint = FakeEndpoint()
    workload.program.run_batch(workload.draw(num_programs, seed), endpoint=endpoint, num_threads=1, parallel=False)
    return endpoint.calls


def test_the_same_seed_gives_the_same_calls_and_another_one_others(workload: Workload) -> None:
    prompts = prompts_of(workload, 2, seed=1)
    assert prompts == prompts_of(workload, 2, seed=1)
    assert not set(prompts) & set(prompts_of(workload, 2, seed=2))


def test_programs_share_the_beginning_that_the_workload_says(workload: Workload) -> None:
    endpoint = FakeEndpoint()
    workload.program.run_batch(workload.draw(3, seed=1), endpoint=endpoint, num_threads=1)
    calls = zip(endpoint.callers, endpoint.calls, strict=True)
    firsts = {caller.session: prompt for caller, prompt in reversed(list(calls))}
    assert len(firsts) == 3
    one, other, _ = firsts.values()
    num_shared = next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    if "all programs" in workload.shares or "examples" in workload.shares:
        assert num_shared > 0.3 * len(one)
    elif workload.name != "rag":  # whose documents are drawn
        assert num_shared < 100


def test_an_unknown_workload_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="no workload 'tree'; there are few-shot-5"):
        find_workload("tree")
