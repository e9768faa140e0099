"""Rank 0 of a group of two whose other rank joins, and then takes part in nothing.

Arguments: the port, and whether the ranks share memory: "shared" or "gloo".
"""

from __future__ import annotations

import sys
import threading

import torch

from kvrelay.engine.parallel.group_coordinator import GroupCoordinator, RankLost
from tests.fakes.waiting import PATIENCE_S


def main() -> None:
    group = GroupCoordinator.connect(0, 2, ("127.0.0.1", int(sys.argv[1])), PATIENCE_S)
    if sys.argv[2] == "gloo":
        group._shared = None
    threading.Timer(0.2, group.leave).start()
    for _ in range(2):  # in the collective, and before the next one
        try:
            group.all_reduce(torch.ones(4))
        except RankLost as error:
            print(error)


if __name__ == "__main__":
    main()
