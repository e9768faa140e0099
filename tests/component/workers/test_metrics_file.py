"""The file of steps and sequences tells what really happened, and so do the reports of handoffs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.protocol.messages import Reassign, Status
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.telemetry.metrics_file import HandoffRecord, Record, SequenceRecord, StepRecord, read_metrics
from tests.component.workers.rig import fleet, prompt_of, run
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import until
from tests.fakes.workers import LocalWorker, StubRouter


def serve_three_requests(redis_server: EmbeddedRedis, path: str) -> None:
    """By a prefill and a decode worker: 40 tokens each, with 10 tokens of output."""

    async def serve() -> None:
        settings: dict[str, object] = {"token_budget": 16, "max_running": 4, "metrics_file": path}
        workers = [
            LocalWorker(redis_server.url, role, HashRunner(), worker_id=role, **settings)
            for role in ("prefill", "decode")
        ]
        prefill, decode = [await worker.start() for worker in workers]
        router = StubRouter()
        sampling = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True)
        for number in range(3):
            tokens = [number + 1] * 40
            await router.prefill(prefill, decode, f"r{number}", tokens, sampling).finished()
        for worker in workers:
            await worker.stop()
        router.close()

    run(serve)


def test_a_full_disk_ends_no_worker_and_no_request(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.telemetry.metrics_file.FLUSH_INTERVAL_S", 0.0)  # every step writes
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no device that is always full")
    serve_three_requests(redis_server, str(full))


@pytest.fixture
def records(redis_server: EmbeddedRedis, tmp_path: Path) -> dict[str, list[Record]]:
    serve_three_requests(redis_server, str(tmp_path / "{worker_id}.jsonl"))
    return {role: list(read_metrics(tmp_path / f"{role}.jsonl")) for role in ("prefill", "decode")}


def test_steps_add_up_to_the_work(records: dict[str, list[Record]]) -> None:
    steps = {role: [r for r in found if isinstance(r, StepRecord)] for role, found in records.items()}
    assert sum(step.num_prefill_tokens for step in steps["prefill"]) == 3 * 40
    assert all(step.num_prefill_tokens <= 16 and step.num_decodes == 0 for step in steps["prefill"])
    assert sum(step.num_decode_tokens for step in steps["decode"]) == 3 * 9
    assert [step.step for step in steps["prefill"]] == sorted(step.step for step in steps["prefill"])
    for step in steps["prefill"] + steps["decode"]:
        assert 0 <= step.num_committed_slots <= step.num_allocated_slots <= 64 * 16
    assert max(step.num_committed_slots for step in steps["decode"]) >= 40
    assert all(step.forward_s > 0 and step.schedule_s > 0 and step.commit_s > 0 for step in steps["decode"])


def test_each_sequence_has_its_course(records: dict[str, list[Record]]) -> None:
    sequences = {role: [r for r in found if isinstance(r, SequenceRecord)] for role, found in records.items()}
    assert [s.request for s in sequences["prefill"]] == [s.request for s in sequences["decode"]] == ["r0", "r1", "r2"]
    for one in sequences["prefill"]:
        assert one.finish is None  # it went on elsewhere
        assert one.num_output_tokens == 1
        assert one.queue_s is not None and one.ttft_s is not None
        assert one.queue_s <= one.ttft_s <= one.total_s
    for one in sequences["decode"]:
        assert one.finish is FinishReason.LENGTH
        assert (one.num_prompt_tokens, one.num_output_tokens) == (40, 9)
        assert one.tpot_s is not None and one.tpot_s > 0


def test_each_handoff_is_told_by_both_sides(records: dict[str, list[Record]]) -> None:
    handoffs = {role: [r for r in found if isinstance(r, HandoffRecord)] for role, found in records.items()}
    for role, found in handoffs.items():
        assert [(one.request, one.role, one.transport) for one in found] == [(f"r{i}", role, "zmq") for i in range(3)]
        for one in found:
            assert one.num_blocks == 3
            assert one.num_bytes > 0 and one.exposed_s >= 0
            assert 0 <= one.grant_wait_s <= one.duration_s
    for sent, taken in zip(handoffs["prefill"], handoffs["decode"], strict=True):
        assert sent.num_bytes == taken.num_bytes


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b'{"kind":"sequence","at":1.0')
    assert list(read_metrics(path)) == []


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


async def test_both_sides_report_times_sizes_and_failures_by_cause(redis_url: str) -> None:
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
