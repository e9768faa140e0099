"""A group of real processes around the hash model, as an engine would have it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.ranks.messages import RankSettings
from kvrelay.ranks.rank_group import GroupOptions, RankCommand, RankGroup
from kvrelay.ranks.rank_member import facts_of
from kvrelay.ranks.ranked_runner import RankedRunner
from kvrelay.ranks.transfer_messages import TransferSettings
from tests.component.ranks.replica_rank import SOFTWARE
from tests.fakes.replicas import LeadingHashRunner
from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
NUM_BLOCKS, BLOCK_SIZE, LONGEST = 14, 4, 56


def rank_command(engine: str, rank: int, **given: Any) -> RankCommand:
    told = {"engine": engine, "rank": given.pop("as_rank", rank), "parent": os.getpid(), **given}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.component.ranks.replica_rank", json.dumps(told)]
    return RankCommand(rank, command, {"PYTHONPATH": path})


def group_options(size: int, **changes: Any) -> GroupOptions:
    return GroupOptions(**{"size": size, "group": "test", "software": SOFTWARE, "timeout_s": PATIENCE_S, **changes})


def rank_settings(size: int, num_slots: int = 0, transfers: TransferSettings | None = None) -> RankSettings:
    return RankSettings(
        model="hash",
        size=size,
        init_address="",
        timeout_s=PATIENCE_S,
        dtype="auto",
        kv_cache_dtype="auto",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        kv_memory_bytes=0,
        pool_sizing=None,
        swap_bytes=1024 * num_slots,
        max_model_len=LONGEST,
        fused_layers=True,
        quantization="none",
        load_format="auto",
        transfers=transfers,
    )


@dataclass
class Ranks:
    """A group that is ready."""

    group: RankGroup
    leader: LeadingHashRunner
    runner: RankedRunner


@contextmanager
def opened(size: int, *, options: dict[str, Any] | None = None, **given: dict[str, Any]) -> Iterator[RankGroup]:
    """A group whose processes have been started. `rank_1` and so on are the arguments of a rank."""

    def commands(engine: str) -> list[RankCommand]:
        return [rank_command(engine, rank, **given.get(f"rank_{rank}", {})) for rank in range(1, size)]

    group = RankGroup(group_options(size, **(options or {})), commands)
    try:
        yield group
    finally:
        group.close()


def start(group: RankGroup, size: int, num_slots: int = 0, transfers: TransferSettings | None = None) -> Ranks:
    """Raises RanksFailed."""
    group.await_joined()
    group.start(rank_settings(size, num_slots, transfers))
    leader = LeadingHashRunner(NUM_BLOCKS, BLOCK_SIZE, LONGEST, num_swap_slots=num_slots)
    group.await_ready(facts_of(leader.spec))
    return Ranks(group, leader, RankedRunner(leader, group))
