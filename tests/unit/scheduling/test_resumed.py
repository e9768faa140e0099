"""A resumed prompt ends with output of an earlier attempt, so its last token, alone in a step, looks like a decode."""

from __future__ import annotations

import pytest

from kvrelay.kv.pool import BlockState
from kvrelay.scheduling.plan import SequenceOutput
from tests.unit.scheduling.bench import SCHEDULERS, Bench, make_sequence

pytestmark = pytest.mark.unit


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
