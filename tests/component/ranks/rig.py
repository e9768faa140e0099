"""A group of real processes around the hash model, as a worker would have it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from kvrelay.ranks.local_ranks import LocalRanks, RankCommand
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.ranks.ranked_runner import RankedRunner
from tests.fakes.replicas import LeadingHashRunner
from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
NUM_BLOCKS, BLOCK_SIZE, LONGEST = 14, 4, 56


def rank_command(meeting: Path, rank: int, **given: Any) -> RankCommand:
    """The rank waits until the file `meeting` says where rank 0 is."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    told = json.dumps({"meeting": str(meeting), "rank": rank, **given})
    command = [sys.executable, "-m", "tests.component.ranks.replica_rank", told]
    return RankCommand(rank, command, {"PYTHONPATH": path})


@dataclass
class Ranks:
    """A group that is ready."""

    group: RankGroup
    local: LocalRanks
    leader: LeadingHashRunner
    runner: RankedRunner


@contextmanager
def opened(size: int, num_slots: int = 0, silence_s: float = 15.0, **given: dict[str, Any]) -> Iterator[Ranks]:
    """A group whose processes have been started. `rank_1` and so on are the arguments of a rank. Ends it."""
    with TemporaryDirectory() as directory:
        meeting = Path(directory) / "meeting"
        others = {rank: given.get(f"rank_{rank}", {}) for rank in range(1, size)}
        local = LocalRanks([rank_command(meeting, rank, num_slots=num_slots, **own) for rank, own in others.items()])
        group = RankGroup(size, local, silence_s=silence_s)
        write_meeting(group, meeting)
        leader = LeadingHashRunner(NUM_BLOCKS, BLOCK_SIZE, LONGEST, num_host_slots=num_slots)
        try:
            yield Ranks(group, local, leader, RankedRunner(leader, group))
        finally:
            group.close()


def write_meeting(group: RankGroup, path: Path) -> None:
    whole = path.with_suffix(".new")
    whole.write_bytes(msgspec.json.encode(group.meeting))
    whole.rename(path)


@contextmanager
def started(size: int, num_slots: int = 0, **given: Any) -> Iterator[Ranks]:
    """A group that is ready."""
    with opened(size, num_slots, **given) as ranks:
        ranks.group.await_ready(ranks.leader.spec.fingerprint, PATIENCE_S)
        yield ranks
