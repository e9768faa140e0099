"""Where workers go and what share of a GPU's memory each gets: rules, against counting by hand and for any numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cli.gpus import GpuError, MemoryShares, WorkerPlace, divide, place
from kvrelay.config.worker import Role

pytestmark = pytest.mark.unit
TOTAL: dict[Role, float] = {"prefill": 0.9, "decode": 0.9}


def placed(
    devices: str, num_prefill: int, num_decode: int, shares: MemoryShares | None = None
) -> list[tuple[str, float]]:
    counts: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}
    places = place(divide(devices.split(), counts), counts, shares or MemoryShares(TOTAL))
    return [(" ".join(each.devices), each.share or 0) for each in places]


@pytest.mark.parametrize(
    ("devices", "num_prefill", "num_decode", "expected"),
    [
        ("a b", 1, 1, "a b"),
        ("a b c", 1, 1, "a b"),  # more GPUs than workers
        ("a", 1, 1, "a a"),
        ("a", 2, 1, "a a a"),
        ("a b c", 1, 2, "a b c"),
        ("a b c d", 3, 1, "a b c d"),
        ("a b", 1, 3, "a b b b"),  # roles apart, though not even
        ("a b c", 2, 2, "a a b c"),  # decode gets the one that is over
        ("a b c", 0, 2, "a b"),
        ("a b", 0, 3, "a b a"),
    ],
)
def test_who_goes_where(devices: str, num_prefill: int, num_decode: int, expected: str) -> None:
    assert [device for device, _ in placed(devices, num_prefill, num_decode)] == expected.split()


def test_each_role_may_have_its_own_list() -> None:
    counts: dict[Role, int] = {"prefill": 3, "decode": 2}
    places = place({"prefill": ["a", "b"], "decode": ["b"]}, counts, MemoryShares(TOTAL))
    assert places == [
        WorkerPlace("prefill", 0, ("a",), 0.45),
        WorkerPlace("prefill", 1, ("b",), 0.3),
        WorkerPlace("prefill", 2, ("a",), 0.45),
        WorkerPlace("decode", 0, ("b",), 0.3),
        WorkerPlace("decode", 1, ("b",), 0.3),
    ]


@pytest.mark.parametrize(
    ("devices", "counts", "sizes", "expected"),
    [
        ("a b c d", (1, 1), (2, 2), ["a b", "c d"]),
        ("a b c d", (1, 2), (2, 1), ["a b", "c", "d"]),
        ("a b c", (1, 1), (1, 2), ["a", "b c"]),
        ("a b c d e", (1, 1), (1, 2), ["a", "b c"]),  # two more are left over
        ("a b c d e f g", (2, 1), (2, 3), ["a b", "c d", "e f g"]),
        ("a b c d", (0, 2), (1, 2), ["a b", "c d"]),
        ("a b", (1, 1), (2, 2), ["a b", "a b"]),  # too few for both: shared
        ("a b", (1, 2), (1, 2), ["a", "a b", "a b"]),
    ],
)
def test_ranks_have_a_gpu_each(
    devices: str, counts: tuple[int, int], sizes: tuple[int, int], expected: list[str]
) -> None:
    numbers, ranks = ({"prefill": first, "decode": second} for first, second in (counts, sizes))
    divided = divide(devices.split(), numbers, ranks)  # type: ignore[arg-type]
    places = place(divided, numbers, MemoryShares(TOTAL), ranks)  # type: ignore[arg-type]
    assert [" ".join(each.devices) for each in places] == expected
    on = Counter(device for each in places for device in each.devices)
    for each in places:
        assert each.share == min(math.floor(0.9 / on[device] * 1e6) / 1e6 for device in each.devices)


def test_too_few_gpus_for_the_ranks_of_a_worker_are_refused() -> None:
    counts: dict[Role, int] = {"prefill": 1, "decode": 1}
    with pytest.raises(GpuError, match=r"decode workers have 4 ranks with a GPU each \(named: 3\)"):
        place({"prefill": ["a"], "decode": ["b", "c", "d"]}, counts, MemoryShares(TOTAL), {"prefill": 1, "decode": 4})


def test_what_is_stated_comes_off_the_total() -> None:
    assert placed("a", 1, 2, MemoryShares({"decode": 0.9}, {"prefill": 0.3})) == [("a", 0.3), ("a", 0.3), ("a", 0.3)]
    assert placed("a", 1, 1, MemoryShares({}, {"prefill": 0.25, "decode": 0.75})) == [("a", 0.25), ("a", 0.75)]
    assert placed("a b", 1, 1, MemoryShares({"decode": 0.9}, {"prefill": 0.5})) == [("a", 0.5), ("b", 0.9)]


def test_pools_of_a_stated_size_need_no_share() -> None:
    counts: dict[Role, int] = {"prefill": 1, "decode": 1}
    apart = place(divide(["a", "b"], counts), counts, MemoryShares({"decode": 0.8}))
    assert [each.share for each in apart] == [None, 0.8]
    beside_a_stated_one = place(divide(["a"], counts), counts, MemoryShares({}, {"decode": 0.5}))
    assert [each.share for each in beside_a_stated_one] == [None, 0.5]
    with pytest.raises(GpuError, match=r"decode_memory_utilization is needed: on device a prefill workers have"):
        place(divide(["a"], counts), counts, MemoryShares({"decode": 0.8}))


def test_shares_that_do_not_fit_are_refused_with_the_sum() -> None:
    with pytest.raises(GpuError, match=r"2 x decode_memory_utilization = 0\.6 are 1\.2 of .*at most 1"):
        placed("a", 0, 2, MemoryShares({}, {"decode": 0.6}))
    with pytest.raises(GpuError, match=r"1 x prefill.* = 0\.7 and 1 x decode.* = 0\.4 are 1\.1 of device a"):
        placed("a", 1, 1, MemoryShares({}, {"prefill": 0.7, "decode": 0.4}))
    with pytest.raises(GpuError, match=r"memory_utilization = 0\.9: stated .* take 0\.9, .*decode-0"):
        placed("a", 1, 1, MemoryShares({"decode": 0.9}, {"prefill": 0.9}))


@given(
    num_devices=st.integers(1, 6),
    num_prefill=st.integers(0, 9),
    num_decode=st.integers(1, 9),
    total=st.floats(0.01, 1),
    stated=st.none() | st.floats(0.001, 0.1),
)
def test_for_any_numbers(
    num_devices: int, num_prefill: int, num_decode: int, total: float, stated: float | None
) -> None:
    devices = [f"gpu{number}" for number in range(num_devices)]
    counts: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}
    shares = MemoryShares({"prefill": total, "decode": total}, {} if stated is None else {"prefill": stated})
    try:
        places = place(divide(devices, counts), counts, shares)
    except GpuError:
        assert stated is not None and stated * num_prefill > min(total, 1) - num_decode * 1e-6
        return
    by_role = Counter(each.role for each in places)
    assert (by_role["prefill"], by_role["decode"]) == (num_prefill, num_decode)
    on: dict[str, list[WorkerPlace]] = defaultdict(list)
    for each in places:
        on[each.devices[0]].append(each)
    assert set(on) <= set(devices)
    for neighbours in on.values():
        taken = math.fsum(each.share or 0 for each in neighbours)
        free = [each.share or 0 for each in neighbours if stated is None or each.role == "decode"]
        assert all(share > 0 for share in free) and len(set(free)) <= 1
        if free:
            assert taken <= total + 1e-9 and taken > total - 1e-6 * len(neighbours) - 1e-9
    if num_devices > 1:
        assert all(len({each.role for each in neighbours}) == 1 for neighbours in on.values()), "roles are apart"
        assert max(map(len, on.values())) == _least_crowded(num_devices, num_prefill, num_decode)


def _least_crowded(num_devices: int, num_prefill: int, num_decode: int) -> int:
    """By trying every way to give each GPU one role."""
    return min(
        max(
            math.ceil(count / roles.count(role)) if count else 0
            for role, count in (("prefill", num_prefill), ("decode", num_decode))
        )
        for roles in itertools.product(("prefill", "decode"), repeat=num_devices)
        if (not num_prefill or "prefill" in roles) and "decode" in roles
    )
