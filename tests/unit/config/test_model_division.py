"""Sizes that do not divide are found in a model's config, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli.launch_plan import make_plan
from kvrelay.cli.preflight import check_sizes
from kvrelay.config import ConfigError
from kvrelay.ranks.local_ranks import why_not_divided

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
