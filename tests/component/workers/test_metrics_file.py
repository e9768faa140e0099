"""The file of steps and sequences tells what really happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.telemetry.metrics_file import HandoffRecord, Record, SequenceRecord, StepRecord, read_metrics
from tests.component.workers.rig import run
from tests.fakes.hash_runner import HashRunner
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
