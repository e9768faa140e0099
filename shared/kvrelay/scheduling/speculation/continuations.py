"""Predicts how a text continues from earlier continuations of its end.

The continuations of earlier places of one match are the paths below one node of a suffix tree. The likeliest path goes
from each node to the child that most of them go to, and a token's share of those at its node estimates its probability
(Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2025).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that may follow a match of this kind. `shares`: of each token, among the places where all before it
    followed."""

    kind: int
    token_ids: Seq[int] | NDArray[np.int32]
    shares: Seq[float]


def likeliest(paths: Seq[Seq[int]], count: int) -> tuple[list[int], list[float]]:
    """Returns the likeliest path through these continuations, at most `count` tokens, and their shares. Of equally
    frequent tokens the one of the first path is taken. A path that ends counts as one that goes elsewhere."""
    token_ids: list[int] = []
    shares: list[float] = []
    together = paths
    for at in range(count):
        if len(together) == 1:
            rest = together[0][at:count]
            token_ids += rest
            shares += [1.0] * len(rest)
            break
        counts: dict[int, int] = {}
        for path in together:
            if at < len(path):
                counts[path[at]] = counts.get(path[at], 0) + 1
        if not counts:
            break
        token_id = max(counts, key=counts.__getitem__)
        token_ids.append(token_id)
        shares.append(counts[token_id] / len(together))
        together = [path for path in together if at < len(path) and path[at] == token_id]
    return token_ids, shares
