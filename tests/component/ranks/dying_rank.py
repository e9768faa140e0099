"""A rank that joins, and ends while it loads its part. Takes the flags of `kvrelay rank`."""

from __future__ import annotations

import os
import sys

from kvrelay.config.loader import load_config
from kvrelay.config.ranks import RankConfig
from kvrelay.ranks.messages import RankSettings
from kvrelay.ranks.rank_member import FollowingRunner, MemberOptions, RankMember, Report
from kvrelay.worker.rank_main import own_software


def load(settings: RankSettings, rank: int, report: Report) -> FollowingRunner:
    os._exit(7)


if __name__ == "__main__":
    config = load_config(RankConfig, sys.argv[1:])
    RankMember(MemberOptions(config.engine, config.rank, own_software()), load).run()
