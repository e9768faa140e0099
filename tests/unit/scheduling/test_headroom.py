"""Room that admission leaves for the tokens of those that run."""

from __future__ import annotations

import pytest

from kvrelay.kv.pool import BlockState
from kvrelay.scheduling.memory.headroom import RELAX_STEPS, RETRACTION_HORIZON, NewTokenRatio
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from tests.unit.scheduling.bench import BLOCK_SIZE, Bench, make_sequence

pytestmark = pytest.mark.unit


def bench_with(ratio: float, num_blocks: int = 12) -> Bench:
    return Bench(num_blocks, 64, 8, cache=False, settings=SchedulerSettings(new_token_ratio=ratio))


@pytest.mark.parametrize(("ratio", "num_admitted"), [(0.0, 6), (0.5, 3), (1.0, 2)])
def test_the_more_careful_the_ratio_the_fewer_are_admitted(ratio: float, num_admitted: int) -> None:
    """Prompts of 2 blocks with 16 tokens to draw: expected to take 0, 2 or 4 blocks more each, out of 12."""
    bench = bench_with(ratio)
    for number in range(6):
        bench.add([number] * 7, 16)
    assert len(bench.step()[0].admitted) == num_admitted


def test_full_care_prevents_every_preemption_and_none_causes_them() -> None:
    preemptions = {}
    for ratio in (0.0, 1.0):
        bench = bench_with(ratio)
        for number in range(6):
            bench.add([number] * 7, 16)
        bench.scheduler.lifecycle.new_token_ratio.floor = ratio  # it does not relax here
        bench.run()
        preemptions[ratio] = bench.scheduler.num_preemptions
    assert preemptions[0.0] > 0
    assert preemptions[1.0] == 0


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
    bench = bench_with(0.0, num_blocks=6)
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
