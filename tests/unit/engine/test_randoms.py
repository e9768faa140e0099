"""The random numbers behind the draws."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.engine.sample.random_sampling import philox, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter: list[int], key: list[int], expected: list[int]) -> None:
    c0, c1, c2, c3, k0, k1 = (np.array([word], np.uint64) for word in (*counter, *key))
    assert [int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))] == expected


def test_each_part_of_the_key_matters() -> None:
    base = np.array([[7, 0, 100], [8, 0, 100], [7, 1, 100], [7, 0, 101], [7 + 2**40, 0, 100]], np.uint64)
    assert len(set(uniforms(*base.T).tolist())) == len(base)


def test_numbers_are_spread_evenly_over_positions() -> None:
    count = 50_000
    same = np.zeros(count, np.uint64)
    numbers = uniforms(same, same, np.arange(count, dtype=np.uint64))
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    chi_square = ((counts - count / 100) ** 2 / (count / 100)).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert numbers.min() >= 0 and numbers.max() < 1
