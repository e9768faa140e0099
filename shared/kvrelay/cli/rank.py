"""`kvrelay rank`: one rank of a worker whose model is divided among several machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvrelay.config.loader import DESCRIPTIONS, ConfigError, load_config
from kvrelay.config.ranks import RankConfig


def rank(argv: Sequence[str]) -> int:
    """Runs until the worker ends. Returns the exit status: 1 if the rank could not go on, 2 for invalid flags."""
    try:
        config = load_config(RankConfig, argv, prog="kvrelay rank", description=DESCRIPTIONS["rank"])
    except ConfigError as error:
        print(f"kvrelay rank: {error}", file=sys.stderr)
        return 2
    from kvrelay.worker.rank_main import run_rank  # slow to import

    return run_rank(config)
