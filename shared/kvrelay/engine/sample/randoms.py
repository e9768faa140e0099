"""Random numbers that depend on a key alone, and not on other numbers generated before or beside them.

Philox4x32-10, a counter-based generator: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

UInt64Array = NDArray[np.uint64]


def uniforms(seeds: UInt64Array, sequence_indices: UInt64Array, positions: UInt64Array) -> NDArray[np.float64]:
    """Returns a number in [0, 1) with 53 random bits for each (seed, sequence index, position). All arrays are
    `[rows]`."""
    counter = (positions & _LOW, positions >> _SHIFT, sequence_indices & _LOW, np.zeros_like(positions))
    first, second, _, _ = philox(counter, (seeds & _LOW, seeds >> _SHIFT))
    bits = ((first << _SHIFT) | second) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def philox(
    counter: tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array], key: tuple[UInt64Array, UInt64Array]
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Runs ten rounds over 32-bit words that are stored in 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1 = (product_1 >> _SHIFT) ^ c1 ^ k0, product_1 & _LOW
        c2, c3 = (product_0 >> _SHIFT) ^ c3 ^ k1, product_0 & _LOW
        k0, k1 = (k0 + _KEY_STEP_0) & _LOW, (k1 + _KEY_STEP_1) & _LOW
    return c0, c1, c2, c3
