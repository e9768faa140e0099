"""Checkpoints in the formats of GPTQ, AWQ and compressed-tensors, against float32 models of the same weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvrelay.engine.fused.kernel import PanelProducts
from kvrelay.engine.fused.panels import pack_integers
from kvrelay.engine.load.causal_model import load_model
from kvrelay.engine.load.integer_weight import IntegerWeight, unpack_awq, unpack_compressed, unpack_gptq
from kvrelay.engine.load.model_files import fingerprint
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.make import make_runner
from kvrelay.engine.run.attention import UnsupportedModel
from kvrelay.protocol.sampling import Sampling
from tests.quantized_checkpoints import Scheme, quantize, schemes, write_quantized
from tests.unit.engine.driving import run as drive
from tests.unit.engine.driving import start
from tests.unit.engine.test_fused_forward import distance, random_prompts, run

FUSED, MODULES = "qwen2", "gemma"  # the first has biases; the layers of the second are not known to the kernels


def load(directory: Path, dtype: str = "float32", *, fused: bool = True) -> Any:
    return load_model(open_source(str(directory), dtype), 16, fused_layers=fused)


def greedy(directory: Path) -> list[int]:
    runner = make_runner(str(directory), dtype="float32", num_blocks=16)
    (sequence,) = start(runner, [list(range(40, 75))], Sampling(temperature=0), num_output=12)
    drive(runner, [sequence])
    return sequence.output


CASES = [
    pytest.param(scheme, architecture, id=f"{architecture}: {scheme}")
    for scheme in schemes()
    for architecture in (FUSED, MODULES)
    if architecture == FUSED or not scheme.head  # the other's head shares the embeddings
]


@pytest.mark.parametrize(("scheme", "architecture"), CASES)
def test_logits_and_tokens_are_those_of_the_weights_in_float32(
    scheme: Scheme, architecture: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = write_quantized(model_dir(architecture), tmp_path / "model", scheme)
    model = load(tmp_path / "model")
    assert model.forward.name == ("fused" if architecture == FUSED else "eager")
    expected: Any = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    (prompt,) = random_prompts(1, 44)
    with torch.inference_mode():
        logits = expected(prompt[None]).logits[0]
    assert distance(run(model, [prompt], [40, 3, 1]), [logits]) < 1e-5
    tokens = torch.arange(40, 75)[None]
    output = expected.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy(tmp_path / "model") == output[0, 35:].tolist()


@pytest.mark.parametrize("scheme", [Scheme(group=64, symmetric=False), Scheme("int-quantized", 8, -1)], ids=str)
def test_bfloat16_is_near_float32(scheme: Scheme, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    reference = write_quantized(model_dir(FUSED), tmp_path / "model", scheme)
    prompts = random_prompts(2, 40)
    exact = run(load(reference), prompts, [36, 3, 1])
    fused = load(tmp_path / "model", "bfloat16")
    assert fused.forward.name == "fused"
    modules = distance(run(load(reference, "bfloat16", fused=False), prompts, [36, 3, 1]), exact)
    # The codes are exact, and the weights of the modules are rounded to bfloat16.
    assert distance(run(fused, prompts, [36, 3, 1]), exact) <= 1.1 * modules


@pytest.mark.parametrize("scheme", [scheme for scheme in schemes() if not scheme.shuffled], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_products_with_the_checkpoints_integers(scheme: Scheme, dtype: torch.dtype, gated: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weights, exact = [], []
    for _ in range(1 + gated):
        parts, weight = quantize(torch.randn(40, 192, generator=generator), scheme, generator)
        weights.append(read(parts, scheme, 40, 192))
        exact.append(weight)
        assert torch.equal(weights[-1].dequantize(torch.float32), weight)
    packed = pack_integers(weights, None, dtype, gated=gated)
    for num_tokens in (1, 5, 40):
        x = torch.randn(num_tokens, 192, generator=generator).to(dtype)
        each = [x.double() @ weight.double().t() for weight in exact]
        expected = torch.nn.functional.silu(each[0]) * each[1] if gated else each[0]
        error = (PanelProducts(dtype).linear(packed, x).double() - expected).abs().max()
        assert float(error) <= (1e-2 if dtype == torch.bfloat16 else 1e-5) * float(expected.abs().max())


def read(parts: dict[str, torch.Tensor], scheme: Scheme, num_out: int, num_in: int) -> IntegerWeight:
    """Unpacks by the functions under test, without a checkpoint around."""
    zeros = None
    if scheme.method == "gptq":
        codes, zeros = unpack_gptq(
            parts["qweight"], parts["qzeros"], scheme.bits, zeros_less_one=scheme.version == "gptq"
        )
    elif scheme.method == "awq":
        codes, zeros = unpack_awq(parts["qweight"], parts["qzeros"])
    elif scheme.method == "pack-quantized":
        codes = unpack_compressed(parts["weight_packed"], scheme.bits, num_in)
        if not scheme.symmetric:
            zeros = unpack_compressed(parts["weight_zero_point"].t(), scheme.bits, num_out)
    else:
        codes = parts["weight"]
        zeros = None if scheme.symmetric else parts["weight_zero_point"].t().contiguous()
    scales = parts["scales"] if "scales" in parts else parts["weight_scale"].t().contiguous()
    return IntegerWeight(codes, scales, zeros, scheme.bits, num_in if scheme.group == -1 else scheme.group)


def word(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number


def test_the_order_of_codes_in_words() -> None:
    """Words as the formats' own tools pack the codes 0 to 7 and 0 to 3."""
    column = torch.tensor([[word(0x76543210)]], dtype=torch.int32)
    zeros = torch.tensor([[word(0xF6543210)]], dtype=torch.int32)
    codes, points = unpack_gptq(column, zeros, 4, zeros_less_one=True)
    assert codes.tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]
    assert points.tolist() == [[-7, -6, -5, -4, -3, -2, -1, -8]]
    octets = torch.tensor([[word(0xFF020100)]], dtype=torch.int32)
    codes, points = unpack_gptq(octets, octets, 8, zeros_less_one=True)
    assert codes.tolist() == [[-128, -127, -126, 127]] and points.tolist() == [[-127, -126, -125, -128]]
    row = torch.tensor([[word(0x75316420)]], dtype=torch.int32)
    codes, points = unpack_awq(row, row)
    assert codes[:, 0].tolist() == points[0].tolist() == [-8, -7, -6, -5, -4, -3, -2, -1]
    assert unpack_compressed(column, 4, 7).tolist() == [[-8, -7, -6, -5, -4, -3, -2]]
    assert unpack_compressed(octets, 8, 4).tolist() == [[-128, -127, -126, 127]]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_words_of_compressed_tensors(bits: int) -> None:
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, 43)).to(torch.int8)
    assert torch.equal(unpack_compressed(packing.pack_to_int32(codes, bits), bits, 43), codes)
    points = codes[:, :3].contiguous()  # packed into single words
    assert torch.equal(unpack_compressed(packing.pack_to_int32(points, bits, 0).t(), bits, 6), points.t())


def test_the_log_says_what_is_kept(
    model_dir: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay")
    write_quantized(model_dir(FUSED), tmp_path / "kept", Scheme())
    load(tmp_path / "kept")
    assert "weights by gptq: 14 linear layers keep the checkpoint's integers, and 0 are dequantized" in caplog.text
    load(tmp_path / "kept", fused=False)
    assert "weights by gptq: 0 linear layers keep the checkpoint's integers, and 14 are dequantized" in caplog.text
    caplog.clear()
    write_quantized(model_dir(FUSED), tmp_path / "shuffled", Scheme(shuffled=True))
    model = load(tmp_path / "shuffled")
    assert model.forward.name == "fused"
    assert "and 14 are dequantized to float32" in caplog.text


def test_integers_take_a_part_of_the_memory(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    reference = write_quantized(model_dir(FUSED), tmp_path / "model", Scheme(group=64, head=True))
    kept, floats = load(tmp_path / "model").forward.weight_bytes, load(reference).forward.weight_bytes
    assert kept < 0.14 * floats


def change(directory: Path, key: str, tensor: torch.Tensor | None) -> None:
    """Replaces or removes a tensor of the first layer."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.0.mlp.up_proj.{key}"
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("scheme", "key", "tensor", "reason"),
    [
        (Scheme(), "qzeros", None, r"up_proj: the checkpoint lacks its qzeros"),
        (Scheme(), "scales", None, r"up_proj: the checkpoint lacks its scales"),
        (Scheme(), "qzeros", torch.zeros(4, 18, dtype=torch.int32), "neither 4 nor 8 bits"),
        (Scheme(), "qzeros", torch.zeros(3, 24, dtype=torch.int32), "not the same groups"),
        (Scheme(), "g_idx", torch.zeros(9, dtype=torch.int32), "other shapes than their scales or g_idx"),
        (Scheme(), "g_idx", torch.arange(128, dtype=torch.int32), "g_idx names the groups 0 to 127 of 4"),
        (Scheme(), "scales", torch.ones(4, 192, dtype=torch.float64), "its scales are F64"),
        (Scheme(), "qweight", torch.zeros(8, 192, dtype=torch.int32), r"up_proj"),
        (Scheme("awq"), "qweight", torch.zeros(128, 48, dtype=torch.int32), "not AWQ's 4 bits"),
        (Scheme("awq"), "qzeros", None, "lacks its qzeros"),
        (Scheme("pack-quantized"), "weight_shape", None, "lacks its weight_shape"),
        (Scheme("pack-quantized"), "weight_shape", torch.tensor([192, 100]), "do not hold a weight"),
        (Scheme("pack-quantized"), "weight_scale", torch.ones(192, 5), "128 inputs are not 5 groups"),
        (Scheme("int-quantized", 8, -1), "weight_scale", torch.ones(7, 1), "another shape than its weight"),
        (Scheme("int-quantized", 8, -1), "weight_scale", None, "lacks its weight_scale"),
    ],
)
def test_tensors_that_do_not_go_together_are_named(
    scheme: Scheme,
    key: str,
    tensor: torch.Tensor | None,
    reason: str,
    model_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    write_quantized(model_dir("llama"), tmp_path / "model", scheme)
    change(tmp_path / "model", key, tensor)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path / "model")


def with_config(model: Path, directory: Path, **config: Any) -> Path:
    """A directory with a config alone."""
    directory.mkdir()
    content = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return directory


def group_of(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq with bits = 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "many"}, "quantization_config cannot be read"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int8"}, "pack_dtype = 'int8'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version = 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "awq with bits = 8"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized", **group_of(num_bits=8)}, "format = "),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", **group_of(num_bits=3)}, "num_bits = 3"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", **group_of(num_bits=4, type="float")},
            "weights.type = 'float'",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", **group_of(num_bits=8, strategy="block")},
            "strategy = 'block'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "sparsity_config": {"format": "sparse-24-bitmask"},
                **group_of(num_bits=4),
            },
            "sparsity_config.format",
        ),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "quantization_config cannot be read"),
        ({"quant_method": "of_another_world"}, "'of_another_world', which is not known here. Served on a CPU are GPTQ"),
    ],
)
def test_what_is_not_served_is_refused_before_there_are_weights(
    config: dict[str, Any], reason: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        open_source(str(with_config(model_dir("llama"), tmp_path / "model", **config)))


def test_quantized_weights_are_not_rounded_again(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    directory = with_config(model_dir("llama"), tmp_path / "model", **Scheme().config)
    with pytest.raises(UnsupportedModel, match="int8: the checkpoint is quantized already, by gptq"):
        open_source(str(directory), quantization="int8")


def test_a_config_without_quantized_tensors_is_refused(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    write_quantized(model_dir("llama"), tmp_path / "model", Scheme("awq"))
    (tmp_path / "model" / "model.safetensors").unlink()
    save_file(load_file(model_dir("llama") / "model.safetensors"), tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="its config says awq, and no tensor is quantized"):
        load(tmp_path / "model")


def test_files_that_are_not_safetensors_are_refused(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    write_quantized(model_dir("llama"), tmp_path / "model", Scheme())
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"no model\.safetensors"):
        load(tmp_path / "model")


def test_shards_and_other_prefixes_are_found(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    reference = write_quantized(model_dir("llama"), tmp_path / "model", Scheme())
    path = tmp_path / "model" / "model.safetensors"
    tensors = {name.removeprefix("model."): each for name, each in load_file(path).items()}
    path.unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / "model" / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    model, prompts = load(tmp_path / "model"), random_prompts(1, 20)
    assert model.forward.name == "fused"
    assert model.eos_token_ids == (256,)
    assert distance(run(model, prompts, [20]), run(load(reference), prompts, [20])) < 1e-5


def test_workers_with_other_quantizations_do_not_hand_over_to_each_other(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    kinds = [Scheme(), Scheme(version="gptq_v2"), Scheme(group=64), Scheme("awq"), Scheme("pack-quantized")]
    found = set()
    for number, scheme in enumerate(kinds):
        write_quantized(model_dir("llama"), tmp_path / str(number), scheme)
        found.add(fingerprint(tmp_path / str(number), load(tmp_path / str(number)).layout))
    assert len(found) == len(kinds)
