"""What workers measure of themselves, and whose share of their load is whose."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.kv.hashing import root_hash
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.codec import decode_body, encode_body
from kvrelay.protocol.messages import LoadReport, PeerRef, Status
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.plan import PlannedRow, StepPlan
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Origin, Sequence, TokenBuffer
from kvrelay.worker.load_report import PushClock, SpeedMeter, report_load

A, B = (PeerRef(name, "1", f"tcp://{name}") for name in "ab")


def sequence(name: str, num_tokens: int, router: PeerRef = A) -> Sequence:
    return Sequence(
        key=(name, 1, 0),
        tokens=TokenBuffer(np.full(num_tokens, hash(name) % 1000, np.int32)),
        num_prompt=num_tokens,
        sampling=Sampling(max_tokens=8),
        root=root_hash(model="m"),
        table=BlockTable(16),
        origin=Origin(router),
    )


def step(*lengths: int) -> StepPlan:
    return StepPlan(1, [PlannedRow(sequence("s", 1), 100, length, length > 1, True) for length in lengths])


def test_a_report_has_everybodys_backlog_and_the_readers_share() -> None:
    pool = BlockPool(64, 16)
    limits = SchedulerLimits(32, 8, 512, frozenset())
    scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), SchedulerSettings())
    scheduler.add(sequence("x", 100))
    scheduler.add(sequence("y", 50, B))
    plain, named = report_load(scheduler, SpeedMeter())
    assert (plain.queued_tokens, plain.own_queued_tokens, plain.num_sequences) == (150, 0, 2)
    assert (named[A].queued_tokens, named[A].own_queued_tokens, named[A].own_sequences) == (150, 100, 1)
    assert named[B].own_queued_pairs == pytest.approx(50 * 25)
    assert plain.step_cost is None and plain.transfer_bytes_s is None


def test_the_cost_of_prompts_is_known_after_prompts_not_after_decodes() -> None:
    meter = SpeedMeter()
    for _ in range(50):
        meter.stepped(step(1, 1, 1), 0.0023)
    assert meter.step_cost is None
    for length in (100, 400, 50, 200) * 20:
        meter.stepped(step(length), 0.002 + 1e-4 * length)
    assert meter.step_cost is not None
    fixed_s, token_s, pair_s = meter.step_cost
    assert fixed_s + token_s * 300 + pair_s * 300 * 250 == pytest.approx(0.032, rel=0.15)


def test_pushes_that_overlap_are_one_busy_time() -> None:
    clock, meter = PushClock(), SpeedMeter()
    clock.started(4, 1.0)
    clock.started(4, 1.5)
    clock.ended(4, 2.0)
    assert clock.busy_s(2.5) == pytest.approx(1.5)
    clock.ended(4, 3.0)
    assert clock.busy_s(9.0) == pytest.approx(2.0)
    clock.ended(1, 9.0)
    assert clock.busy_s(9.0) == pytest.approx(2.0)
    meter.pushed(0, 0.0)
    assert meter.transfer_bytes_s is None
    meter.pushed(1000, 2.0)
    assert meter.transfer_bytes_s == pytest.approx(500)


def test_a_status_without_a_load_report_is_that_of_an_older_worker() -> None:
    plain = Status(query=1, draining=False, queues={}, blocks={}, totals={})
    assert decode_body([b"", *encode_body(plain)]) == plain
    told = Status(query=1, draining=False, queues={}, blocks={}, totals={}, load=LoadReport(step_cost=(1.0, 2.0, 3.0)))
    assert decode_body([b"", *encode_body(told)]) == told
