"""`kvrelay size`: from a config alone, with the numbers of the documents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from kvrelay.cli.size import size
from kvrelay.flag_parser import CommandFailed

GIB = 1 << 30


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config.json with Llama 3 8B's shape, and nothing beside it."""
    shape: dict[str, Any] = {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    directory = tmp_path_factory.mktemp("llama-3-8b")
    LlamaConfig(**shape, max_position_embeddings=8192, dtype="bfloat16").save_pretrained(directory)
    return str(directory / "config.json")


def sizes(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    assert size([*argv, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    return (*printed["workers"], printed["handoff_bytes"])


def test_a_gpu(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode, handoff = sizes(capsys, config, "--gpu=h100")
    assert handoff == 4000 * 128 * 1024  # the 524 MB that four thousand tokens take
    assert decode["weights"] == 8_030_261_248 * 2
    taken = decode["weights"] + decode["largest_step"] + decode["pool"]
    assert 0.85 * 80e9 < taken < 0.9 * 80e9
    assert decode["tokens"] * 128 * 1024 == decode["pool"]
    assert decode["swap_space"] == pytest.approx(decode["pool"] / 4, rel=0.01) and not prefill["swap_space"]
    assert decode["swap_space"] < decode["request"] < decode["limit"]
    assert decode["sequences"] == decode["num_blocks"] // -(-4500 // 16)
    rounded, _, _ = sizes(capsys, config, "--memory=80GB", "--device=cuda", "--kv-cache-dtype=fp8")
    assert rounded["kv_per_token"] == prefill["kv_per_token"] / 2


def test_a_container_on_cpus(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit is the memory of which workers take a share."""
    _, decode, _ = sizes(capsys, config, "--memory=40GiB", "--dtype=bfloat16", "--tp=2", "--quantization=none")
    assert decode["num_processes"] == 2 and decode["shm"]
    assert decode["limit"] == 40 * GIB and 0.8 * 40 * GIB < decode["request"] <= 40 * GIB
    _, whole, _ = sizes(capsys, config, "--num-blocks=512", "--dtype=bfloat16", "--swap-space=0")
    _, int4, _ = sizes(capsys, config, "--num-blocks=512", "--dtype=bfloat16", "--swap-space=0", "--quantization=int4")
    assert int4["weights"] < 0.45 * whole["weights"]
    assert whole["request"] - int4["request"] == whole["weights"] - int4["weights"]


@pytest.mark.parametrize(
    ("rate", "transport"), [(0.5, "any transport"), (2, "or ZMQ without"), (20, r"10\.49 GB/s .* NIXL over RDMA")]
)
def test_the_transport_that_a_rate_needs(
    rate: float, transport: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert size([config, "--gpu=h100", f"--rate={rate}"]) == 0
    printed = capsys.readouterr().out
    assert re.search(f"handoff .*524 MB a prompt, .*{transport}", printed)
    assert re.search(r'# decode\nresources: \{requests: \{memory: \d+Gi\}, limits: .* nvidia.com/gpu: "1"\}\}', printed)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--gpu=l40s", "--dtype=float32", "--memory=30GiB"],
            "prefill: memory_utilization 0.9 of 30720 MiB .* too much",
        ),
        (["--device=cuda"], "the memory of the GPU is not known: name it with --gpu or --memory"),
        (["--tp=3", "--memory=80GiB"], "prefill: LlamaForCausalLM with tensor_parallel_size = 3"),
        (["--kv-memory-bytes=1MiB"], "a block takes"),
    ],
)
def test_what_is_not_possible_is_one_line(argv: list[str], message: str, config: str) -> None:
    with pytest.raises(CommandFailed, match=message) as failed:
        size([config, *argv])
    assert "\n" not in str(failed.value)


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"is not a model directory: it has no config.json"):
        size([str(tmp_path / "config.json")])
