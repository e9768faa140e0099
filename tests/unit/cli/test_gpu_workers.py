"""`kvrelay up --gpus`: from flags to workers' configurations, flags and environments; and what is refused."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cli.gpus import Gpu, GpuError, MemoryShares, WorkerPlace, divide, list_gpus, place, read_listing, visible
from kvrelay.cli.launch_plan import LaunchPlan, make_plan
from kvrelay.config import ConfigError, WorkerConfig, load_config
from kvrelay.config.worker import Role

ENVIRON = {"KVRELAY_MODEL": "org/model"}
ONE = {"gpus": ("0",)}
GPUS = [
    *(Gpu(f"GPU-{number:08x}", "NVIDIA H100", number) for number in range(3)),
    Gpu("GPU-00000009", "NVIDIA A100", 3, is_split=True),
    Gpu("MIG-00000009", "MIG 1g.5gb of NVIDIA A100"),
]


def plan(environ: Mapping[str, str] = ENVIRON, **flags: Any) -> LaunchPlan:
    return make_plan(flags, environ, lambda _: GPUS)


def seen(made: LaunchPlan) -> list[tuple[str, str, float | None]]:
    """By worker: what it sees, and its share."""
    environs = [made.environ_of(worker).get("CUDA_VISIBLE_DEVICES", "") for worker in made.workers]
    return [
        (worker.worker_id, uuid, worker.memory_utilization) for worker, uuid in zip(made.workers, environs, strict=True)
    ]


def test_each_worker_sees_its_gpu_alone() -> None:
    made = plan(gpus=("0", "GPU-00000002"))
    assert seen(made) == [("prefill-0", "GPU-00000000", 0.9), ("decode-0", "GPU-00000002", 0.9)]
    assert {worker.device for worker in made.workers} == {"cuda"}
    assert str(made.placed["decode-0"]) == "on GPU 2 (NVIDIA H100), 90% of its memory"


def test_workers_of_one_gpu_share_it() -> None:
    parts = [(worker, "MIG-00000009", 0.4) for worker in ("prefill-0", "decode-0")]
    assert seen(plan(gpus=("MIG-00000009",), memory_utilization="0.8")) == parts
    made = plan(gpus=("1",), decode="2", prefill_memory_utilization="0.3")
    assert [share for _, _, share in seen(made)] == [0.3, 0.3, 0.3]
    apart = plan(prefill_gpus=("0",), decode_gpus=("0", "1"), decode="2")
    assert [share for _, _, share in seen(apart)] == [0.45, 0.45, 0.9]


def test_processes_make_the_same_of_their_flags() -> None:
    for made in (
        plan(gpus=("0",), memory_utilization="1"),
        plan(gpus=("0", "1"), kv_memory_bytes="8GiB", device="cuda"),
        make_plan({"memory_utilization": "0.7", "decode": "2"}, ENVIRON),
    ):
        for worker in made.workers:
            environ = {**ENVIRON, **made.environ_of(worker)}
            assert load_config(WorkerConfig, made.flags_of(worker), environ=environ, role=worker.role) == worker


def test_a_pool_with_a_size_of_its_own_gets_no_share() -> None:
    made = plan(gpus=("0",), num_blocks="100")
    assert [share for _, _, share in seen(made)] == [None, None]
    assert str(made.placed["prefill-0"]) == "on GPU 0 (NVIDIA H100)"


def test_without_devices_nobody_looks_for_gpus() -> None:
    def unwanted(_: Mapping[str, str]) -> list[Gpu]:
        raise AssertionError

    made = make_plan({"memory_utilization": "0.8"}, ENVIRON, unwanted)
    assert seen(made) == [("prefill-0", "", 0.4), ("decode-0", "", 0.4)]


def test_a_file_may_number_them(tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.toml"
    path.write_text("[up]\nprefill_gpus = [0]\ndecode_gpus = [1, 2]\n")
    assert plan(config=str(path)).up.decode_gpus == ("1", "2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpus": ("7",)}, r"gpus: there is no GPU 7 here \(allowed: 0, 1, 2, 3, MIG-00000009, or their UUIDs\)"),
        ({"gpus": ("0", "GPU-00000000")}, r"gpus: GPU-00000000 names GPU 0 \(NVIDIA H100\) twice"),
        ({"gpus": ("3",)}, r"gpus: GPU 3 \(NVIDIA A100\) is divided by MIG: name its parts"),
        (
            {"gpus": ("-1",)},
            r"--gpus = .*'-1' is not a GPU \(allowed: a number from 0 on, GPU-UUID or MIG-UUID\)",
        ),
        ({"gpus": ("cuda:0",)}, "'cuda:0' is not a GPU"),
        ({"gpus": ()}, "--gpus = .*names no GPU"),
        ({"gpus": ("0",), "decode_gpus": ("1",)}, "gpus excludes prefill_gpus and decode_gpus"),
        ({"prefill_gpus": ("0",)}, "prefill_gpus needs decode_gpus"),
        ({"decode_gpus": ("0",)}, "decode_gpus needs prefill_gpus"),
        ({"prefill": "0", "decode_gpus": ("0",), "prefill_gpus": ("1",)}, "prefill_gpus without prefill"),
        ({"prefill_memory_utilization": "0.5"}, "prefill_memory_utilization needs gpus"),
        (ONE | {"decode_memory_utilization": "1.5"}, r"--decode-memory-utilization = '1.5'.*more than 0, at most 1"),
        (ONE | {"decode_memory_utilization": "-0.1"}, "--decode-memory-utilization = '-0.1'"),
        (ONE | {"prefill_memory_utilization": "0.6", "decode_memory_utilization": "0.6"}, "are 1.2 of device"),
        (ONE | {"num_blocks": "9", "decode_memory_utilization": "0.6"}, "excludes num_blocks"),
        (ONE | {"prefill": "0", "prefill_memory_utilization": "0.1"}, "without prefill workers"),
        (ONE | {"device": "cpu"}, r"device = cpu beside gpus: .*\(allowed: auto, cuda\)"),
        (ONE | {"device": "cuda:1"}, "device = cuda:1 beside gpus"),
        (ONE | {"backend": "simulated"}, "gpus: backend = simulated"),
    ],
    ids=str,
)
def test_what_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**flags)


def test_a_machine_without_gpus_says_so() -> None:
    def none(_: Mapping[str, str]) -> list[Gpu]:
        raise GpuError("nvidia-smi is not here")

    with pytest.raises(ConfigError, match="gpus: nvidia-smi is not here; without GPUs leave it out"):
        make_plan({"gpus": ("0",)}, ENVIRON, none)


# -- what is read from nvidia-smi, and what cuda_visible_devices leaves of it ----------------------------------------


H100, A100 = "GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"
PART, OTHER_PART = "MIG-33333333-aaaa-bbbb-cccc-000000000003", "MIG-44444444-aaaa-bbbb-cccc-000000000004"
LISTING = f"""\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: {H100})
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {A100})
  MIG 3g.20gb     Device  0: (UUID: {PART})
  MIG 1c.2g.10gb  Device  1: (UUID: {OTHER_PART})
"""
READ_GPUS = [
    Gpu(H100, "NVIDIA H100 80GB HBM3", 0),
    Gpu(A100, "NVIDIA A100-SXM4-40GB", 1, is_split=True),
    Gpu(PART, "MIG 3g.20gb of NVIDIA A100-SXM4-40GB"),
    Gpu(OTHER_PART, "MIG 1c.2g.10gb of NVIDIA A100-SXM4-40GB"),
]


def test_gpus_and_their_parts_are_read() -> None:
    assert read_listing(LISTING) == READ_GPUS
    assert read_listing("No devices found.\n") == []


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("1,0", [1, 0]),
        (f"{PART},0", [2, 0]),
        ("GPU-2,0", [1, 0]),  # the beginning of a UUID
        ("0,7,1", [0]),  # what names nothing ends the list
        ("GPU-", []),  # names both
    ],
)
def test_what_is_visible(wanted: str | None, expected: list[int]) -> None:
    found = visible(READ_GPUS, wanted)
    assert [gpu.uuid for gpu in found] == [READ_GPUS[index].uuid for index in expected]
    if wanted is not None:
        assert [gpu.number for gpu in found if gpu.number is not None] == [
            position for position, gpu in enumerate(found) if gpu.number is not None
        ]


def _nvidia_smi(directory: Path, script: str) -> dict[str, str]:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {}


def test_the_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _nvidia_smi(tmp_path, f'[ "$1" = -L ] && cat <<END\n{LISTING}END')
    assert list_gpus({}) == READ_GPUS
    assert [gpu.uuid for gpu in list_gpus({"CUDA_VISIBLE_DEVICES": "1"})] == [A100]
    _nvidia_smi(tmp_path, "echo 'driver/library version mismatch' >&2; exit 18")
    with pytest.raises(GpuError, match="ended with status 18: driver/library version mismatch"):
        list_gpus({})


def test_a_machine_without_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpuError, match="nvidia-smi not found"):
        list_gpus({})


# -- where workers go and what share of a gpu's memory each gets -----------------------------------------------------


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
