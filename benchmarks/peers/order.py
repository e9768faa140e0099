"""The order in which servers take turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

Order = Literal["abba", "random"]


def turns(servers: Sequence[str], num_rounds: int, order: Order, seed: int) -> list[list[str]]:
    """The servers of each round. `abba` reverses every second round, so that a drift of the machine's speed favours no
    server over an even number of rounds; `random` shuffles each round."""
    shuffled = random.Random(seed)
    rounds = []
    for number in range(num_rounds):
        names = list(servers)
        if order == "random":
            shuffled.shuffle(names)
        elif number % 2:
            names.reverse()
        rounds.append(names)
    return rounds
