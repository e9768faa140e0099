"""What workers report of their handoffs, and what is left to send when a prompt's last chunk is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.protocol.messages import Reassign, Status
from kvrelay.protocol.sampling import Sampling
from kvrelay.telemetry.metrics_file import HandoffRecord, read_metrics
from tests.component.workers.rig import fleet, prompt_of, run
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import until
from tests.fakes.workers import LocalWorker

pytestmark = pytest.mark.component
GREEDY = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True)
CHUNK_TOKENS, BLOCK_TOKENS = 64, 16


def report(worker: LocalWorker) -> Status:
    return worker.started.reports.status()


def test_after_the_last_chunk_only_its_own_blocks_are_outstanding_whatever_the_prompt(
    redis_url: str, tmp_path: Path
) -> None:
    lengths = [64, 128, 192, 320, 448]

    async def test() -> None:
        settings = {"token_budget": CHUNK_TOKENS, "max_running": 8}
        path = str(tmp_path / "{worker_id}.jsonl")
        async with fleet(redis_url, [], [HashRunner()], **settings) as f:
            prefill = LocalWorker(redis_url, "prefill", HashRunner(), worker_id="p", metrics_file=path, **settings)
            f.prefill.append(prefill)
            await prefill.start()
            for length in lengths:
                prompt = prompt_of(length)
                prefill.runner.hold_after(0)
                got = f.router.prefill(prefill.me, f.decode[0].me, f"r{length}", prompt, GREEDY)
                await until(lambda: report(prefill).queues["granted"])  # decode has answered before the first chunk
                prefill.runner.go_on()
                await got.finished()
                assert got.output == expected_tokens(prompt, GREEDY, 512)

    sizes = [length // BLOCK_TOKENS for length in lengths]
    of_a_chunk = [CHUNK_TOKENS // BLOCK_TOKENS] * len(lengths)
    found: list[list[int]] = []
    for _ in range(3):  # on a busy machine decode may be asked a second time, when the prompt is computed already
        (tmp_path / "p.jsonl").unlink(missing_ok=True)
        run(test)
        handoffs = [record for record in read_metrics(tmp_path / "p.jsonl") if isinstance(record, HandoffRecord)]
        assert [record.num_blocks for record in handoffs] == sizes
        found.append([record.num_tail_blocks for record in handoffs])
        if found[-1] == of_a_chunk:
            return
    raise AssertionError(found)


def test_both_sides_report_times_sizes_and_failures_by_cause(redis_url: str) -> None:
    async def test() -> None:
        async with fleet(redis_url, [HashRunner()], [HashRunner(), HashRunner()]) as f:
            for number in range(4):
                got = f.router.prefill(f.prefill[0].me, f.decode[0].me, f"r{number}", prompt_of(50, number), GREEDY)
                await got.finished()
            f.decode[1].started.role.begin_drain()
            refused = f.router.prefill(f.prefill[0].me, f.decode[1].me, "refused", prompt_of(60), GREEDY)
            await refused.until(lambda r: bool(r.need_decode))
            f.router.send(f.prefill[0].me, "refused", Reassign(decode=f.decode[0].me))
            await refused.finished()
            await f.until_clean()
            # A push may be told of after the commit that it led to.
            await until(lambda: report(f.prefill[0]).totals["pushed_blocks"] >= 20)
            for worker in (f.prefill[0], f.decode[0]):
                found = report(worker).histograms
                for name in ("duration", "grant_wait", "exposed", "size", "rate"):
                    assert sum(found[f"kvrelay.handoff.{name}"].counts) == 5, name
                block_bytes = worker.context.pool.num_blocks and worker.runner.pool_bytes.shape[1]
                assert found["kvrelay.handoff.size"].total == 5 * 4 * block_bytes
            totals = report(f.prefill[0]).totals
            assert totals["handoff_failures.refused"] == 1
            assert totals["push_runs"] <= totals["pushed_blocks"] == 20
            assert report(f.prefill[0]).queues["granted"] == 0

    run(test)
