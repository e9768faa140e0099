"""How benchmarks/load_profile divides the time of a load."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cpu_kernels_steps import Work
from benchmarks.load_profile import IDLE_NS, KINDS, Limits, profile_of

pytestmark = pytest.mark.unit

MS = 1_000_000


def step(began_ms: int, ended_ms: int, gap_ms: int, forward_ms: int, prompt: int, decodes: int) -> dict[str, Any]:
    tokens = [1] * decodes + ([prompt] if prompt else [])
    times = {"began": began_ms * MS, "ended": ended_ms * MS, "gap": gap_ms * MS, "forward": forward_ms * MS}
    return {**times, "prompt_tokens": prompt, "tokens": tokens}


def test_the_time_of_a_load_is_forwards_by_kind_waiting_and_what_lies_between() -> None:
    assert IDLE_NS < 40 * MS
    # The first step's gap was before the load.
    lines = [step(0, 10, 500, 8, 64, 0), step(12, 17, 2, 4, 0, 3), step(57, 60, 40, 3, 0, 1)]
    work = [Work(0, 4_000_000, 0), Work(2_000_000, 0, 0), Work(1_000_000, 0, 500_000)]
    found = profile_of(lines, work, Limits(read_gb_s=1.0, gflop_s=1.0), concurrency=3, output_tokens_s=50.0)
    assert found.seconds == pytest.approx(0.060)
    with_prompts, decodes = (found.kinds[kind] for kind in KINDS)
    assert (with_prompts.num_steps, with_prompts.num_prompt_tokens, with_prompts.num_decode_tokens) == (1, 64, 0)
    assert (decodes.num_steps, decodes.num_prompt_tokens, decodes.num_decode_tokens) == (2, 0, 4)
    assert with_prompts.forward_s == pytest.approx(0.008) and with_prompts.floor_s == pytest.approx(0.004)
    assert decodes.forward_s == pytest.approx(0.007) and decodes.floor_s == pytest.approx(0.003)
    assert found.idle_s == pytest.approx(0.040)
    assert found.between_s == pytest.approx(0.060 - 0.015 - 0.040)
