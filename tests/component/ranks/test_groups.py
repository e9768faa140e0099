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

from kvrelay.process_identity import has_ended, identity_of
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.messages import STEP_TOPIC, Start, encode
from kvrelay.ranks.rank_group import RankGroup, RanksFailed
from kvrelay.ranks.rank_member import facts_of
from kvrelay.ranks.remote_transfers import RemoteReceiver
from kvrelay.ranks.transfer_messages import TransferSettings
from kvrelay.step.batch import DeviceLost, StepResult, WorkerBatch, WorkerRow
from tests.component.ranks.replica_rank import digest
from tests.component.ranks.rig import (
    BLOCK_SIZE,
    LONGEST,
    NUM_BLOCKS,
    ROOT,
    Ranks,
    group_options,
    opened,
    rank_command,
    rank_settings,
    start,
)
from tests.fakes.replicas import LeadingHashRunner
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


def assert_none_runs(group: RankGroup) -> None:
    for process in group.processes:
        assert process.exit_status() is not None, f"rank {process.rank} still runs"


@pytest.mark.parametrize("num_slots", [pytest.param(0, marks=pytest.mark.slow), 40])
def test_all_ranks_have_the_same_after_chunks_preemptions_and_drafts(tmp_path: Path, num_slots: int) -> None:
    size, wanted = 3, jobs(8)
    files = {f"rank_{rank}": {"pool_file": str(tmp_path / f"{rank}")} for rank in range(1, size)}
    with opened(size, **files) as group:
        ranks = start(group, size, num_slots)
        service = serve(
            OwnBlocks(
                wanted, "sarathi", num_slots, lambda fail_at, slots: Served(ranks, slots), overlap=True, most_drafts=3
            )
        )
        check_tokens(wanted, service.served, blame=True)
        for rank in range(1, size):
            assert (tmp_path / f"{rank}").read_text() == digest(ranks.leader.pool_bytes)
    assert [process.exit_status() for process in group.processes] == [0, 0]


@pytest.mark.slow
def test_a_killed_rank_ends_the_group_between_steps() -> None:
    with opened(3) as group:
        ranks = start(group, 3)
        os.kill(group.processes[1].pid, signal.SIGKILL)
        with pytest.raises(DeviceLost, match=r"rank 2 was killed by SIGKILL"):
            group.lost.result(PATIENCE_S)
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        with pytest.raises(DeviceLost, match=r"rank 2 was killed by SIGKILL"):
            ranks.runner.execute(prompt_step(1))
    assert_none_runs(group)


@pytest.mark.slow
async def test_a_killed_rank_is_reported_to_the_event_loop() -> None:
    with opened(2) as group:
        ranks = await asyncio.to_thread(start, group, 2)
        watching = asyncio.create_task(ranks.runner.watch())
        os.kill(group.processes[0].pid, signal.SIGKILL)
        with pytest.raises(DeviceLost, match=r"rank 1 was killed by SIGKILL"):
            await asyncio.wait_for(watching, PATIENCE_S)


def test_a_killed_rank_ends_the_step_that_waits_for_it() -> None:
    with opened(2) as group:
        ranks = start(group, 2)
        process = psutil.Process(group.processes[0].pid)
        process.suspend()
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        with pytest.raises(DeviceLost, match=r"rank 1 was killed by SIGKILL"):
            ranks.runner.execute(prompt_step(1))
        killer.join()


@pytest.mark.slow
def test_a_stopped_rank_is_silent_and_ends_the_group() -> None:
    with opened(2, options={"silence_s": 2.0}) as group:
        start(group, 2)
        psutil.Process(group.processes[0].pid).suspend()
        with pytest.raises(DeviceLost, match=r"rank 1 .* has been silent for 2 s"):
            group.lost.result(PATIENCE_S)
    assert_none_runs(group)


def test_an_error_of_a_rank_is_the_error_of_the_step() -> None:
    with opened(2, rank_1={"fail_at": 1}) as group:
        ranks = start(group, 2)
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        ranks.runner.execute(prompt_step(1))
        with pytest.raises(DeviceLost, match=r"rank 1 .* failed: MemoryError: no memory is left, as told"):
            ranks.runner.execute(prompt_step(2))
    assert_none_runs(group)


@pytest.mark.slow
def test_an_unknown_sequence_fails_the_step_alone() -> None:
    with opened(2) as group:
        ranks = start(group, 2)
        with pytest.raises(KeyError, match="request"):
            ranks.runner.execute(prompt_step(1))
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        assert len(ranks.runner.execute(prompt_step(2)).rows[0].token_ids) == 1


# -- starts that fail -------------------------------------------------------------------------------------------------


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exit": 3}, r"rank 1 exited with status 3 before it joined"),
        ({"version": "0.9"}, r"rank 1 .* runs kvrelay 0.9 .* rank 0 runs kvrelay 1.0"),
        ({"as_rank": 2}, r"joined as rank 2 of 2 \(allowed: 1 to 1"),
        ({"load_error": "3 heads do not divide by 2"}, r"rank 1 .* failed: ValueError: 3 heads do not divide by 2"),
        ({"fingerprint": "other"}, r"rank 1 .* loaded another model or pool than rank 0: model other instead of hash"),
    ],
)
def test_a_start_that_cannot_be_says_why_and_leaves_nothing(given: dict[str, Any], message: str) -> None:
    with opened(2, rank_1=given) as group, pytest.raises(RanksFailed, match=message):
        start(group, 2)
    assert_none_runs(group)


def test_a_rank_that_never_comes() -> None:
    group = RankGroup(group_options(3, timeout_s=0.5), lambda engine: [])
    with pytest.raises(RanksFailed, match=r"ranks 1, 2 of 3 did not join within 0.5 s \(rank_timeout_s\)"):
        group.await_joined()
    group.close()


def test_an_address_that_is_taken() -> None:
    first = RankGroup(group_options(2), lambda engine: [])
    with pytest.raises(RanksFailed, match=f"cannot listen for ranks on 127.0.0.1 port {first.port}"):
        RankGroup(group_options(2, port=first.port), lambda engine: [])
    first.close()


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_loads(tmp_path: Path) -> None:
    with opened(2, rank_1={"hold_load": str(tmp_path / "never")}) as group:
        group.await_joined()
        group.start(rank_settings(2))
        os.kill(group.processes[0].pid, signal.SIGKILL)
        leader = LeadingHashRunner(NUM_BLOCKS, BLOCK_SIZE, LONGEST)
        with pytest.raises(RanksFailed, match=r"rank 1 was killed by SIGKILL while it loaded"):
            group.await_ready(facts_of(leader.spec))


# -- the ranks' side --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_finds_no_engine() -> None:
    command = rank_command("127.0.0.1:9", 1, timeout_s=0.5)
    ended = subprocess.run(
        command.command, env={**os.environ, **command.environ}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 1
    assert "no engine at 127.0.0.1:9 asked for ranks within 0.5 s" in ended.stderr


@pytest.mark.slow
def test_ranks_end_with_a_killed_engine(tmp_path: Path) -> None:
    """Also ranks of other machines, which the kernel does not kill: their engine is silent."""
    script = (
        "import sys, time\n"
        "from tests.component.ranks.rig import *\n"
        "def commands(engine):\n"
        "    local, remote = rank_command(engine, 1), rank_command(engine, 2, parent=None)\n"
        "    import subprocess\n"
        "    told = json.loads(remote.command[3]); del told['parent']\n"
        "    subprocess.Popen([*remote.command[:3], json.dumps(told)], env={**os.environ, **remote.environ})\n"
        "    return [local]\n"
        "group = RankGroup(group_options(3, silence_s=2.0), commands)\n"
        "start(group, 3)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    engine = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
    family = psutil.Process(engine.pid).children(recursive=True)
    assert len(family) == 2
    engine.kill()
    engine.wait()
    engine.stdout.close()
    _, alive = psutil.wait_procs(family, PATIENCE_S)
    assert not alive


TRANSFERS = TransferSettings("decode", "zmq", checksums=False, max_peers=8)


def remote_receiver(group: RankGroup, rank: int) -> RemoteReceiver:
    return RemoteReceiver(rank, group, "zmq", is_one_sided=False)


def test_the_processes_of_ranks_are_known_and_seen_to_end() -> None:
    """Until all have ended, slots into which they may write are not safe."""
    with opened(3) as group:
        start(group, 3)
        identities = list(group.identities)
        assert identities == [identity_of(process.pid) for process in group.processes]
        assert not any(map(has_ended, identities))
    wait_until(lambda: all(map(has_ended, identities)))


def test_a_step_waits_for_the_calls_that_were_published_before_it(tmp_path: Path) -> None:
    """Otherwise a late block of a released reservation could be written over what the step writes."""
    order = tmp_path / "order"
    with opened(3, rank_2={"order_file": str(order)}) as group:
        ranks = start(group, 3, transfers=TRANSFERS)
        remote = remote_receiver(group, 2)
        assert remote.endpoint["address"].startswith("tcp://127.0.0.1:")
        remote.admit("r", 0, [1])
        remote.release("r")
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        ranks.runner.execute(prompt_step(1))
        assert order.read_text().splitlines() == ["released r", "step"]


@pytest.mark.slow
def test_a_call_that_cannot_be_carried_out_ends_the_group() -> None:
    with opened(2) as group:
        start(group, 2, transfers=TRANSFERS)
        remote_receiver(group, 1).admit("r", 0, [NUM_BLOCKS])
        with pytest.raises(DeviceLost, match="rank 1 exited with status 1"):
            group.lost.result(PATIENCE_S)
        remote_receiver(group, 1).release("r")  # calls to a failed group are lost
    assert_none_runs(group)


@pytest.mark.slow
def test_a_lost_message_ends_the_rank() -> None:
    """A message with a number that does not follow."""
    with opened(2) as group:
        start(group, 2)
        with group._publishing:
            group._publisher.send_multipart(
                [STEP_TOPIC, (10**6).to_bytes(8, "little"), encode(Start(rank_settings(2)))]
            )
        with pytest.raises(
            DeviceLost, match=r"rank 1 .* failed: message 1000000 came after message \d+: some were lost"
        ):
            group.lost.result(PATIENCE_S)


@pytest.mark.slow
def test_a_lost_last_message_is_noticed_by_the_life_signs() -> None:
    with opened(2, options={"silence_s": 1.5}) as group:
        start(group, 2)
        with group._publishing:
            group._num_published += 1  # the ranks never receive this number
        with pytest.raises(DeviceLost, match="rank 1 exited with status 1"):
            group.lost.result(PATIENCE_S)


@pytest.mark.slow
def test_what_is_no_message_of_a_rank_is_ignored() -> None:
    with opened(2) as group:
        ranks = start(group, 2)
        context = zmq.Context()
        stranger = context.socket(zmq.PUSH)
        stranger.connect(f"tcp://127.0.0.1:{group._results_port}")
        for raw in (b"", b"\xff" * 100, encode(Start(rank_settings(2)))):
            stranger.send(raw)
        ranks.runner.add_sequence(KEY, Sampling(), [1, 2, 3], 3)
        assert len(ranks.runner.execute(prompt_step(1)).rows) == 1
        stranger.close(linger=1000)
        context.term()
