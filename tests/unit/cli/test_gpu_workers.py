"""`kvrelay up --gpus`: from flags to workers' configurations, flags and environments; and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli.gpus import Gpu, GpuError
from kvrelay.cli.launch_plan import LaunchPlan, make_plan
from kvrelay.config import ConfigError, WorkerConfig, load_config

pytestmark = pytest.mark.unit
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
