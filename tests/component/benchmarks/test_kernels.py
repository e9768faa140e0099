"""What is compiled ahead for a GPU is what kvrelay asks for there, and it gets to where it is looked for."""

from __future__ import annotations

import sys
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import kernel_archive, kernels
from benchmarks.gpu.scale import SCALES
from kvrelay.backends.backend import KVLayout
from kvrelay.backends.flashinfer import FlashInferBackend
from tests.gpu.test_attention import SHAPES
from tests.tiny_models import ARCHITECTURES

HOPPER = (9, 0)


@dataclass
class Recipe:
    name: str

    def build_and_load(self) -> Any:
        raise AssertionError("nothing is compiled to find out what would be")


class Asking:
    """A wrapper that asks for a module when it is planned, and computes nothing."""

    kernel = ""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        self.tensor_cores = options.get("use_tensor_cores", False)
        self.backend = options.get("backend", "auto")
        torch.empty(8, dtype=torch.uint8, pin_memory=True)

    def reset_workspace_buffer(self, *buffers: torch.Tensor) -> None:
        pass

    def plan(self, *arguments: Any, **options: Any) -> None:
        kernel = "prefill" if self.tensor_cores else self.kernel
        backend = {True: "fa3", False: "fa2"}[asking.get_compute_capability(None) == HOPPER and self.backend == "auto"]
        window, cap = options["window_left"] != -1, bool(options["logits_soft_cap"])
        head_dim = arguments[-2]
        stored = "" if options["kv_data_type"] == options["q_data_type"] else f" {options['kv_data_type']}"
        name = f"{kernel} {backend} {head_dim} {options['q_data_type']} {window} {cap}{stored}"
        assert sum(asking.jit.core.JitSpec(name).build_and_load().plan(1, 2)) == 0

    def run(self, query: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool = False) -> Any:
        return (out, torch.zeros(query.shape[:2])) if return_lse else out


class AskingPrefill(Asking):
    kernel = "prefill"


class AskingDecode(Asking):
    kernel = "decode"


def no_device(device: Any) -> tuple[int, int]:
    raise AssertionError("there is no GPU here")


def ask_to_append(*arguments: Any) -> None:
    asking.jit.core.JitSpec("page").build_and_load().append(*arguments)


asking = SimpleNamespace(
    __name__="asking",
    __version__="0.7.2",
    get_compute_capability=no_device,
    BatchPrefillWithPagedKVCacheWrapper=AskingPrefill,
    BatchDecodeWithPagedKVCacheWrapper=AskingDecode,
    append_paged_kv_cache=ask_to_append,
    jit=SimpleNamespace(core=SimpleNamespace(JitSpec=Recipe)),
)


@pytest.fixture(autouse=True)
def _imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asking", asking)


def names(*wanted: str) -> set[str]:
    return set(kernels.recipes(asking, map(kernels.Layers.parse, wanted), HOPPER))


def test_all_that_a_start_and_steps_ask_for_is_kept() -> None:
    assert names("32,8,128") == {
        "page",
        "prefill fa3 128 torch.bfloat16 False False",  # chunks
        "prefill fa2 128 torch.bfloat16 False False",  # single tokens on tensor cores
    }
    assert names("8,4,256,window=70,softcap=50") == {
        "page",
        "prefill fa3 256 torch.bfloat16 True True",
        "decode fa2 256 torch.bfloat16 True True",
        "prefill fa2 256 torch.bfloat16 True True",  # of batch_invariant
    }
    assert names("32,8,128,fp8_e4m3") == {
        "page",
        "prefill fa2 128 torch.bfloat16 False False torch.float8_e4m3fn",
    }
    assert names("8,8,64,float16") > {"decode fa2 64 torch.float16 False False"}


def test_what_is_asked_for_depends_on_the_gpu() -> None:
    assert not any("fa3" in name for name in kernels.recipes(asking, [kernels.Layers(32, 8, 128)], (8, 0)))


def test_nothing_is_pretended_any_more_afterwards() -> None:
    before = torch.empty, torch.version.cuda, Recipe.build_and_load
    names("32,8,128")
    assert (torch.empty, torch.version.cuda, Recipe.build_and_load) == before
    assert asking.get_compute_capability is no_device


def test_what_the_gpu_tests_and_the_benchmark_attend_with_is_compiled() -> None:
    default = names(*kernels.DEFAULT)
    for shape in SHAPES.values():
        layers = kernels.Layers(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, shape.window, shape.softcap, shape.stored
        )
        assert set(kernels.recipes(asking, [layers], HOPPER)) <= default
    scale = SCALES["full"]
    text = f"{scale.num_heads},{scale.config['num_key_value_heads']},{scale.head_dim},{scale.dtype}"
    assert names(text) <= default
    for make in ARCHITECTURES.values():
        config = make()
        window = getattr(config, "sliding_window", None)
        layers = kernels.Layers(config.num_attention_heads, config.num_key_value_heads, config.head_dim, window=window)
        if FlashInferBackend.can_hold(layers.layout):
            assert set(kernels.recipes(asking, [layers], HOPPER)) <= default


def test_layers_are_told_in_words() -> None:
    assert kernels.Layers.parse("32,8,128") == kernels.Layers(32, 8, 128)
    given = kernels.Layers.parse("8,4,256,float16,window=4096,softcap=50")
    assert given == kernels.Layers(8, 4, 256, torch.float16, 4096, 50.0)
    assert replace(given.layout, num_layers=1) == KVLayout(1, 4, 256, 16, torch.float16)
    given = kernels.Layers.parse("32,8,128,fp8_e5m2")
    assert given.layout == KVLayout(2, 8, 128, 16, torch.bfloat16, torch.float8_e5m2)
    for change in ("fp8", "float32", "window", "sinks=1"):
        with pytest.raises(ValueError, match=r"none of|invalid literal"):
            kernels.Layers.parse(f"32,8,128,{change}")
    for wrong in ("32,8", "32,8,96", "30,8,128"):
        with pytest.raises(ValueError, match=r"knows no|none of|not enough|invalid literal"):
            kernels.Layers.parse(wrong)


def make_site(folder: Path, version: str) -> Path:
    (folder / "flashinfer").mkdir(parents=True)
    (folder / f"flashinfer_python-{version}.dist-info").mkdir()
    return folder


def test_modules_get_to_where_flashinfer_looks_first(tmp_path: Path) -> None:
    libraries = {}
    for name in ("page", "prefill"):
        libraries[name] = tmp_path / f"{name}.so"
        libraries[name].write_bytes(name.encode() * 100)
    archive = kernel_archive.pack(tmp_path / "wheels", "0.7.2", "9.0a", libraries)
    assert archive.name == kernel_archive.archive_name("0.7.2", "9.0a")
    site = make_site(tmp_path / "site", "0.7.2")
    assert kernel_archive.unpack(archive, site) == ["page", "prefill"]
    placed = site / "flashinfer" / "data" / "aot"
    assert {path.relative_to(placed): path.read_bytes() for path in placed.rglob("*.so")} == {
        Path(name, f"{name}.so"): library.read_bytes() for name, library in libraries.items()
    }


def test_modules_of_another_flashinfer_are_refused(tmp_path: Path) -> None:
    library = tmp_path / "page.so"
    library.write_bytes(b"page")
    archive = kernel_archive.pack(tmp_path, "0.7.2", "9.0a", {"page": library})
    site = make_site(tmp_path / "site", "0.7.20")
    with pytest.raises(SystemExit, match=r"for FlashInfer 0\.7\.2, which is not in"):
        kernel_archive.unpack(archive, site)
    assert not list(site.rglob("*.so"))


def test_only_the_modules_that_an_archive_names_are_unpacked(tmp_path: Path) -> None:
    library = tmp_path / "page.so"
    library.write_bytes(b"page")
    archive = kernel_archive.pack(tmp_path, "0.7.2", "9.0a", {"page": library})
    more = tmp_path / "more.tar"
    with tarfile.open(archive) as packed, tarfile.open(more, "w") as written:
        for member in packed:
            written.addfile(member, packed.extractfile(member))
        written.add(library, "../page.so")
    site = make_site(tmp_path / "site", "0.7.2")
    kernel_archive.unpack(more, site)
    assert [path.name for path in tmp_path.joinpath("site", "flashinfer").rglob("*.so")] == ["page.so"]
