"""A rank that comes to its group, and ends before it loads its part. Takes the flags of `kvrelay rank`."""

from __future__ import annotations

import os
import sys

from kvrelay.config.loader import load_config
from kvrelay.config.ranks import WAIT_FOR_WORKER_S, RankConfig
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator

if __name__ == "__main__":
    config = load_config(RankConfig, sys.argv[1:])
    host, _, port = config.engine.rpartition(":")
    group = GroupCoordinator.connect(config.rank, None, (host, int(port)), WAIT_FOR_WORKER_S)
    os._exit(7)
