"""Fields of ranks: what goes together, what flags become, and sizes that do not divide, found in a model's config."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvrelay.cli.gpus import Gpu
from kvrelay.cli.launch_plan import make_plan
from kvrelay.cli.preflight import check_sizes
from kvrelay.config.loader import ConfigError, resolve
from kvrelay.config.ranks import RankConfig
from kvrelay.config.worker import WorkerConfig
from kvrelay.ranks.local_ranks import why_not_divided


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 0}, "greater than or equal to 1"),
        ({"tensor_parallel_size": 65}, "less than or equal to 64"),
        ({"local_ranks": 1}, r"local_ranks = 1 of tensor_parallel_size = 1 \(allowed: 0 to 0"),
        ({"tensor_parallel_size": 2, "local_ranks": 2}, r"local_ranks = 2 of tensor_parallel_size = 2"),
        ({"tensor_parallel_size": 3, "local_ranks": 1}, "local_ranks = 1 needs a rank_port"),
        ({"rank_host": "0.0.0.0"}, "must be one address of this machine"),
        ({"rank_host": "::"}, "must be one address of this machine"),
        ({"tensor_parallel_size": 2, "backend": "simulated"}, "divides a real model"),
        ({"pipeline_parallel_size": 2, "backend": "simulated"}, "pipeline_parallel_size = 2 divides a real model"),
        ({"pipeline_parallel_size": 5, "tensor_parallel_size": 13}, r"65 ranks \(allowed: up to 64 together\)"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "local_ranks": 4}, r"allowed: 0 to 3"),
        ({"pipeline_parallel_size": 2, "local_ranks": 2}, r"local_ranks = 2 of pipeline_parallel_size = 2"),
    ],
)
def test_what_does_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        WorkerConfig(role="decode", **given)


def test_ranks_that_a_worker_starts() -> None:
    assert WorkerConfig(role="decode", pipeline_parallel_size=3).num_local_ranks == 2
    assert WorkerConfig(role="decode").num_local_ranks == 0
    assert WorkerConfig(role="decode", tensor_parallel_size=4).num_local_ranks == 3
    some = WorkerConfig(role="decode", tensor_parallel_size=4, local_ranks=1, rank_port=4000)
    assert some.num_local_ranks == 1


@pytest.mark.parametrize("engine", ["10.0.0.1:4000", "worker.example:1", "[fd00::1]:4000"])
def test_an_address_of_the_worker(engine: str) -> None:
    assert resolve(RankConfig, {"engine": engine, "rank": "3"}, {}).engine == engine


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine": "10.0.0.1", "rank": "1"}, "--engine = '10.0.0.1'"),
        ({"engine": "tcp://10.0.0.1:1", "rank": "1"}, "--engine"),
        ({"engine": "10.0.0.1:1", "rank": "0"}, r"--rank = '0'.*must be a whole number, 1 to 63"),
        ({"engine": "10.0.0.1:1"}, "--rank is needed"),
        ({"engine": "10.0.0.1:1", "rank": "1", "curve_key_file": "/nowhere"}, "cannot read /nowhere"),
    ],
)
def test_wrong_flags_of_a_rank(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(RankConfig, flags, {})


def test_up_divides_the_cores_among_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    plan = make_plan({"prefill": "0", "decode": "2", "tensor_parallel_size": "2"}, {})
    for worker in plan.workers:
        assert (worker.tensor_parallel_size, worker.threads) == (2, 3)
        flags = plan.flags_of(worker)
        assert {"--tensor-parallel-size=2", "--pipeline-parallel-size=1", "--threads=3"} <= set(flags)
        assert plan.environ_of(worker)["OMP_NUM_THREADS"] == "3"


def test_up_gives_a_role_its_own_size(tmp_path: Path) -> None:
    plan = make_plan({"prefill": "0", "decode": "1", "decode_tensor_parallel_size": "4"}, {})
    assert [worker.tensor_parallel_size for worker in plan.workers] == [4]
    with pytest.raises(ConfigError, match="prefill_tensor_parallel_size without prefill workers"):
        make_plan({"prefill": "0", "prefill_tensor_parallel_size": "2"}, {})
    file = tmp_path / "kvrelay.toml"
    file.write_text("[prefill]\npipeline_parallel_size = 3\n[worker]\npipeline_parallel_size = 2\n")
    unequal = make_plan({"config": str(file)}, {})
    assert [worker.pipeline_parallel_size for worker in unequal.workers] == [3, 2]


GPUS = [Gpu(f"GPU-{number:08x}", "NVIDIA H100", number) for number in range(5)]


def test_ranks_take_the_gpus_of_their_numbers() -> None:
    flags = {"gpus": ("0", "1", "2", "4"), "decode_tensor_parallel_size": "3"}
    plan = make_plan(flags, {}, lambda _: GPUS)
    seen = [plan.environ_of(worker)["CUDA_VISIBLE_DEVICES"] for worker in plan.workers]
    assert seen == ["GPU-00000000", "GPU-00000001,GPU-00000002,GPU-00000004"]
    assert [worker.device for worker in plan.workers] == ["cuda", "cuda"]
    assert str(plan.placed["decode-0"]) == (
        "on GPU 1 (NVIDIA H100) and GPU 2 (NVIDIA H100) and GPU 4 (NVIDIA H100), 90% of their memory"
    )


def test_too_few_gpus_for_the_ranks_of_a_worker() -> None:
    with pytest.raises(ConfigError, match=r"gpus: decode workers have 2 ranks with a GPU each \(named: 1\)"):
        make_plan({"prefill": "0", "tensor_parallel_size": "2", "gpus": ("0",)}, {}, lambda _: GPUS)


def test_up_waits_for_all_workers_of_data_parallel_groups(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text("[decode]\ndata_parallel_size = 2\n")
    plan = make_plan({"prefill": "1", "decode": "2", "config": str(file)}, {})
    assert [(worker.data_parallel_size, worker.started_worker_ids) for worker in plan.workers] == [
        (1, {"prefill-0"}),
        (2, {"decode-0", "decode-0-dp1"}),
        (2, {"decode-1", "decode-1-dp1"}),
    ]
    assert all(f"--data-parallel-size={worker.data_parallel_size}" in plan.flags_of(worker) for worker in plan.workers)


# -- sizes that do not divide are found in a model's config, without torch -------------------------------------------


SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3}


def model_of(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("config", [SIZES, {"text_config": SIZES, "num_hidden_layers": 1}], ids=["text", "nested"])
def test_heads_and_layers(tmp_path: Path, config: dict[str, Any]) -> None:
    model = model_of(tmp_path, config)
    for size in (1, 2, 4, 8):  # KV heads are divided, or replicated
        assert why_not_divided(model, size, 1) == why_not_divided(model, size, 3) == ""
    assert why_not_divided(model, 3, 1) == "tensor_parallel_size = 3: 8 attention heads do not divide by it"
    assert why_not_divided(model, 16, 1) == "tensor_parallel_size = 16: 8 attention heads do not divide by it"
    assert why_not_divided(model, 2, 4) == "pipeline_parallel_size = 4: it has 3 layers, and each stage needs one"


def test_kv_heads_that_do_not_divide(tmp_path: Path) -> None:
    model = model_of(tmp_path, SIZES | {"num_attention_heads": 12, "num_key_value_heads": 6})
    assert why_not_divided(model, 4, 1).startswith("tensor_parallel_size = 4: 6 KV heads do not divide by it")
    assert why_not_divided(model, 12, 1) == ""


@pytest.mark.parametrize(
    "config", [{}, {"num_attention_heads": None}, {"text_config": None}, {"num_hidden_layers": "3"}]
)
def test_what_is_not_stated_is_checked_when_the_model_is_loaded(tmp_path: Path, config: dict[str, Any]) -> None:
    assert why_not_divided(model_of(tmp_path, config), 3, 9) == ""
    assert why_not_divided("organisation/model", 3, 9) == ""
    (tmp_path / "config.json").write_text("[")
    assert why_not_divided(str(tmp_path), 3, 9) == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tensor_parallel_size": "3"}, "prefill-0: .* with tensor_parallel_size = 3: 8 attention heads"),
        ({"decode_tensor_parallel_size": "16"}, "decode-0: .* with tensor_parallel_size = 16"),
        ({"pipeline_parallel_size": "4"}, "prefill-0: .* with pipeline_parallel_size = 4: it has 3 layers"),
    ],
)
def test_a_plan_names_the_worker(tmp_path: Path, flags: dict[str, str], message: str) -> None:
    environ = {"KVRELAY_MODEL": model_of(tmp_path, SIZES)}
    check_sizes(make_plan({"prefill_tensor_parallel_size": "2"}, environ).workers)
    with pytest.raises(ConfigError, match=message):
        check_sizes(make_plan(flags, environ).workers)
