"""Ranks as processes: they start together, compute the same steps, and end together."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from kvrelay.curve import CurveKey, CurveKeys
from kvrelay.process_identity import has_ended, identity_of
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.local_ranks import LocalRanks, RanksFailed
from kvrelay.ranks.messages import End, encode
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.ranks.rank_member import RankEnds, RankMember
from kvrelay.ranks.transfers import RemoteReceiver
from kvrelay.step.batch import DeviceLost, StepResult, WorkerBatch, WorkerRow
from tests.component.ranks.replica_rank import digest
from tests.component.ranks.rig import NUM_BLOCKS, ROOT, Ranks, opened, rank_command, started
from tests.fakes.waiting import PATIENCE_S, wait_until
from tests.unit.worker.serving import FailingRunner, Job, Service, check_tokens, serve

KEY = ("request", 1, 0)


def jobs(count: int) -> list[Job]:
    """More than fit, so some are preempted."""
    return [
        Job(
            prompt=tuple(1 + (number * place) % 2 for place in range(1 + 5 * number % 23)),
            max_tokens=5 + number,
            after_step=number,
            stop_at=None,
            abort_at=6 if number == 3 else None,
            fail_at=None,
            prefill_only=False,
            scored=number == 4,
        )
        for number in range(count)
    ]


class Served(FailingRunner):
    """The ranks in the place of a runner of one process."""

    def __init__(self, ranks: Ranks, num_slots: int) -> None:
        super().__init__({}, num_slots, blame=True)
        self.ranks = ranks
        self.pool_bytes = ranks.leader.pool_bytes

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        self.ranks.runner.add_sequence(key, sampling, token_ids, num_prompt)

    def drop_sequence(self, key: SequenceKey) -> None:
        self.ranks.runner.drop_sequence(key)

    @property
    def num_sequences(self) -> int:
        return self.ranks.leader.num_sequences

    def execute(self, batch: WorkerBatch) -> StepResult:
        assert self.let_run.acquire(timeout=PATIENCE_S)
        return self.ranks.runner.execute(batch)


class OwnBlocks(Service):
    def write_as_a_peer(self) -> None:
        pass


def prompt_step(step: int) -> WorkerBatch:
    row = WorkerRow(
        key=KEY,
        token_ids=np.array([1, 2, 3], np.int32),
        position=0,
        block_ids=np.array([step % NUM_BLOCKS], np.int32),
        sample=True,
        is_prefill=True,
    )
    return WorkerBatch(step, [row])


def assert_none_runs(ranks: Ranks) -> None:
    for rank, process in ranks.local.processes.items():
        assert process.poll() is not None, f"rank {rank} still runs"


@pytest.mark.parametrize("num_slots", [pytest.param(0, marks=pytest.mark.slow), 40])
def test_all_ranks_have_the_same_after_chunks_preemptions_and_drafts(tmp_path: Path, num_slots: int) -> None:
    size, wanted = 3, jobs(8)
    files = {f"rank_{rank}": {"pool_file": str(tmp_path / f"{rank}")} for rank in range(1, size)}
    with started(size, num_slots, **files) as ranks:
        service = serve(
            OwnBlocks(
                wanted, "sarathi", num_slots, lambda fail_at, slots: Served(ranks, slots), overlap=True, most_drafts=3
            )
        )
        check_tokens(wanted, service.served, blame=True)
        for rank in range(1, size):
            assert (tmp_path / f"{rank}").read_text() == digest(ranks.leader.pool_bytes)
    assert [process.poll() for process in ranks.local.processes.values()] == [0, 0]


@pytest.mark.slow
def test_a_killed_rank_ends_the_group_between_steps() -> None:
    with started(3) as ranks:
        os.kill(ranks.local.processes[2].pid, signal.SIGKILL)
        with pytest.raises(DeviceLost, match=r"rank 2 was killed by SIGKILL"):
            ranks.group.lost.result(PATIENCE_S)
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        with pytest.raises(DeviceLost, match=r"rank 2 was killed by SIGKILL"):
            ranks.runner.execute(prompt_step(1))
    assert_none_runs(ranks)


@pytest.mark.slow
async def test_a_killed_rank_is_reported_to_the_event_loop() -> None:
    with opened(2) as ranks:
        await asyncio.to_thread(ranks.group.await_ready, "hash-model", PATIENCE_S)
        watching = asyncio.create_task(ranks.runner.watch())
        os.kill(ranks.local.processes[1].pid, signal.SIGKILL)
        with pytest.raises(DeviceLost, match=r"rank 1 was killed by SIGKILL"):
            await asyncio.wait_for(watching, PATIENCE_S)


def test_a_killed_rank_ends_the_step_that_waits_for_it() -> None:
    with started(2) as ranks:
        process = psutil.Process(ranks.local.processes[1].pid)
        process.suspend()
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        with pytest.raises(DeviceLost, match=r"rank 1 was killed by SIGKILL"):
            ranks.runner.execute(prompt_step(1))
        killer.join()


@pytest.mark.slow
def test_a_stopped_rank_is_silent_and_ends_the_group() -> None:
    with started(2, silence_s=2.0) as ranks:
        psutil.Process(ranks.local.processes[1].pid).suspend()
        with pytest.raises(DeviceLost, match=r"rank 1 .* is lost, or was silent for 2 s"):
            ranks.group.lost.result(PATIENCE_S)
    assert_none_runs(ranks)


def test_an_error_of_a_rank_is_the_error_of_the_step() -> None:
    with started(2, rank_1={"fail_at": 1}) as ranks:
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        ranks.runner.execute(prompt_step(1))
        with pytest.raises(DeviceLost, match=r"rank 1 .* failed: MemoryError: no memory is left, as told"):
            ranks.runner.execute(prompt_step(2))
    assert_none_runs(ranks)


@pytest.mark.slow
def test_an_unknown_sequence_fails_the_step_alone() -> None:
    with started(2) as ranks:
        with pytest.raises(KeyError, match="request"):
            ranks.runner.execute(prompt_step(1))
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        assert len(ranks.runner.execute(prompt_step(2)).rows[0].token_ids) == 1


# -- starts that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exit": 3}, r"rank 1 exited with status 3"),
        ({"fingerprint": "other"}, r"rank 1 .* has other weights than rank 0"),
    ],
)
def test_a_start_that_cannot_be_says_why_and_leaves_nothing(given: dict[str, Any], message: str) -> None:
    with opened(2, rank_1=given) as ranks, pytest.raises(RanksFailed, match=message):
        ranks.group.await_ready("hash-model", PATIENCE_S)
    assert_none_runs(ranks)


def test_ranks_that_do_not_connect_are_named() -> None:
    group = RankGroup(3, LocalRanks([]))
    with pytest.raises(RanksFailed, match=r"rank 1, 2 did not connect within 0.1 s: compare curve_key_file"):
        group.await_ready("hash-model", 0.1)
    group.close()


def test_a_rank_without_the_workers_key_ends_and_says_so() -> None:
    key, next_key = CurveKey.new(), CurveKey.new()
    group = RankGroup(2, LocalRanks([]), curve=CurveKeys(key))
    for other in (CurveKeys(next_key), None):
        with pytest.raises(RankEnds, match=f"rank 0: it encrypts with key {key.fingerprint}, this process has "):
            RankMember(1, "127.0.0.1", group.meeting, other)
    member = RankMember(1, "127.0.0.1", group.meeting, CurveKeys(next_key, key))
    wait_until(lambda: group._connected == {1})
    member.close()
    group.close()


# -- the ranks' side --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_end_with_a_killed_worker(tmp_path: Path) -> None:
    """Also ranks of other machines, which the kernel does not kill: their connection ends."""
    meeting = tmp_path / "meeting"
    remote = rank_command(meeting, 2, is_remote=True)
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.component.ranks.rig import *\n"
        "meeting = Path(sys.argv[1])\n"
        "group = RankGroup(3, LocalRanks([rank_command(meeting, 1)]), silence_s=2.0)\n"
        "write_meeting(group, meeting)\n"
        "group.await_ready('hash-model', 60)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(meeting)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as worker,
        subprocess.Popen(remote.command, env={**os.environ, **remote.environ}) as other,
    ):
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        family = psutil.Process(worker.pid).children(recursive=True)
        assert len(family) == 1
        worker.kill()
        assert other.wait(PATIENCE_S) == 1
        _, alive = psutil.wait_procs(family, PATIENCE_S)
        assert not alive


def remote_receiver(group: RankGroup, rank: int) -> RemoteReceiver:
    return RemoteReceiver(rank, group, "zmq", is_one_sided=False)


def test_the_processes_of_ranks_are_known_and_seen_to_end() -> None:
    """Until all have ended, slots into which they may write are not safe."""
    with started(3) as ranks:
        identities = ranks.group.identities
        assert identities == [identity_of(process.pid) for process in ranks.local.processes.values()]
        assert not any(map(has_ended, identities))
    wait_until(lambda: all(map(has_ended, identities)))


def test_a_step_waits_for_the_calls_that_were_sent_before_it(tmp_path: Path) -> None:
    """Otherwise a late block of a released reservation could be written over what the step writes."""
    order = tmp_path / "order"
    with started(3, rank_2={"order_file": str(order)}) as ranks:
        remote = remote_receiver(ranks.group, 2)
        assert remote.endpoint["address"].startswith("tcp://127.0.0.1:")
        remote.admit("r", 0, [1])
        remote.release("r")
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        ranks.runner.execute(prompt_step(1))
        assert order.read_text().splitlines() == ["released r", "step"]


@pytest.mark.slow
def test_a_call_that_cannot_be_carried_out_ends_the_group() -> None:
    with started(2) as ranks:
        remote_receiver(ranks.group, 1).admit("r", 0, [NUM_BLOCKS])
        with pytest.raises(DeviceLost, match="rank 1 exited with status 1"):
            ranks.group.lost.result(PATIENCE_S)
        remote_receiver(ranks.group, 1).release("r")  # calls to a failed group are lost
    assert_none_runs(ranks)


@pytest.mark.slow
def test_what_is_no_message_of_a_rank_is_ignored() -> None:
    with started(2) as ranks:
        context = zmq.Context()
        stranger = context.socket(zmq.PUSH)
        stranger.connect(f"tcp://127.0.0.1:{ranks.group.meeting.reports_port}")
        for raw in (b"", b"\xff" * 100, encode(End())):
            stranger.send(raw)
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        assert len(ranks.runner.execute(prompt_step(1)).rows) == 1
        stranger.close(linger=1000)
        context.term()
