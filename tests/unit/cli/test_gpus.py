"""What is read from nvidia-smi, and what CUDA_VISIBLE_DEVICES leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cli.gpus import Gpu, GpuError, list_gpus, read_listing, visible

pytestmark = pytest.mark.unit
H100, A100 = "GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"
PART, OTHER_PART = "MIG-33333333-aaaa-bbbb-cccc-000000000003", "MIG-44444444-aaaa-bbbb-cccc-000000000004"
LISTING = f"""\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: {H100})
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {A100})
  MIG 3g.20gb     Device  0: (UUID: {PART})
  MIG 1c.2g.10gb  Device  1: (UUID: {OTHER_PART})
"""
GPUS = [
    Gpu(H100, "NVIDIA H100 80GB HBM3", 0),
    Gpu(A100, "NVIDIA A100-SXM4-40GB", 1, is_split=True),
    Gpu(PART, "MIG 3g.20gb of NVIDIA A100-SXM4-40GB"),
    Gpu(OTHER_PART, "MIG 1c.2g.10gb of NVIDIA A100-SXM4-40GB"),
]


def test_gpus_and_their_parts_are_read() -> None:
    assert read_listing(LISTING) == GPUS
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
    found = visible(GPUS, wanted)
    assert [gpu.uuid for gpu in found] == [GPUS[index].uuid for index in expected]
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
    assert list_gpus({}) == GPUS
    assert [gpu.uuid for gpu in list_gpus({"CUDA_VISIBLE_DEVICES": "1"})] == [A100]
    _nvidia_smi(tmp_path, "echo 'driver/library version mismatch' >&2; exit 18")
    with pytest.raises(GpuError, match="ended with status 18: driver/library version mismatch"):
        list_gpus({})


def test_a_machine_without_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpuError, match="nvidia-smi not found"):
        list_gpus({})
