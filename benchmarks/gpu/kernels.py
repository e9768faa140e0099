"""Compiles ahead what kvrelay asks of FlashInfer, where there is `nvcc` and no GPU: see `prepare`.

Which modules those are is not listed here: the steps of kvrelay's own trial, and its own fixed steps, are run on the
CPU, over FlashInfer's real Python, which is told that it has a GPU of the architecture. Where FlashInfer would compile
and load a module, the module's recipe is kept, and a stand-in that computes nothing takes its place. The recipes are
then built by FlashInfer itself.

A compiled module is one shared library, and needs nothing of Python or torch. FlashInfer loads it from `data/aot` of
its own package before it looks for a compiler: so that is where `prepare install` puts it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.kernel_archive import pack
from kvrelay.backends.backend import KV_DTYPES, KVLayout, LayerKind, PackedRows, StepAttention, allocate_pool
from kvrelay.backends.choose_backend import trial_rows
from kvrelay.backends.flashinfer import FlashInferBackend

_CPU = torch.device("cpu")
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Layers:
    """Attention layers of a model, as far as kernels differ by it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    stored: torch.dtype | None = None  # of the pool; None: dtype

    @classmethod
    def parse(cls, text: str) -> Layers:
        """From `32,8,128`, with `,float16`, `,fp8_e4m3`, `,window=4096` and `,softcap=50` where they apply.

        Raises:
            ValueError: it is not of this form.
        """
        heads, kv_heads, head_dim, *more = text.split(",")
        layers = cls(int(heads), int(kv_heads), int(head_dim))
        for word in more:
            name, _, value = word.partition("=")
            if name == "window":
                layers = replace(layers, window=int(value))
            elif name == "softcap":
                layers = replace(layers, softcap=float(value))
            elif name in ("float16", "bfloat16"):
                layers = replace(layers, dtype=getattr(torch, name))
            elif name in KV_DTYPES:
                layers = replace(layers, stored=KV_DTYPES[name])
            else:
                known = f"float16, bfloat16, {', '.join(KV_DTYPES)}, window=N, softcap=X"
                raise ValueError(f"{word!r} of {text!r} is none of {known}")
        if layers.num_heads % layers.num_kv_heads or not FlashInferBackend.can_hold(layers.layout):
            raise ValueError(f"FlashInfer knows no layers {text!r}")
        return layers

    @property
    def layout(self) -> KVLayout:
        """Of a small pool for them."""
        return KVLayout(2, self.num_kv_heads, self.head_dim, _BLOCK_SIZE, self.dtype, self.stored)

    @property
    def kind(self) -> LayerKind:
        """What a step of kvrelay calls them."""
        return LayerKind(self.num_heads, self.head_dim**-0.5, self.window, self.softcap)

    def attend(self, step: StepAttention, num_tokens: int) -> None:
        """Has a layer of them attend in a step of so many tokens."""
        query = torch.zeros(num_tokens, self.num_heads, self.head_dim, dtype=self.dtype)
        key, value = torch.zeros(2, num_tokens, self.num_kv_heads, self.head_dim, dtype=self.dtype)
        step.attend(0, query, key, value, self.kind.params)


# What `benchmarks.gpu` and `tests/gpu` attend with.
DEFAULT = (
    "32,8,128",
    "4,2,64,window=24",
    "9,3,64",
    "8,8,64,float16",
    "32,8,128,window=50",
    "8,4,256,softcap=50",
    "8,4,256,window=70,softcap=50",
    "32,8,128,fp8_e4m3",
    "9,3,64,fp8_e5m2",
)


class _Nothing:
    """A compiled module whose functions take anything and compute nothing. What a plan returns is a list of numbers."""

    def __getattr__(self, name: str) -> Callable[..., list[int]]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: [0] * 16


def recipes(flashinfer: Any, wanted: Iterable[Layers], capability: tuple[int, int]) -> dict[str, Any]:
    """By name, FlashInfer's own `JitSpec` of each module that kvrelay asks for on GPUs of `capability`.

    Chunks and single tokens, as they are tried at the start; decoding steps for CUDA graphs.
    """
    found: dict[str, Any] = {}
    with _pretending(flashinfer, capability, found):
        for layers, invariant in itertools.product(wanted, (False, True)):
            rows = trial_rows(_BLOCK_SIZE, layers.kind)
            pool = allocate_pool(layers.layout, int(rows.block_tables.max()) + 1, _CPU)
            backend = FlashInferBackend(_CPU, flashinfer, batch_invariant=invariant)
            layers.attend(backend.plan(pool, rows), len(rows.token_rows))
            fixed = backend.fixed_steps(pool, 2, 1)(2)
            fixed.replan(PackedRows(np.ones(2, np.int32), np.array([0, 3], np.int32), np.array([[0], [1]], np.int32)))
            layers.attend(fixed, 2)
    return found


@contextlib.contextmanager
def _pretending(flashinfer: Any, capability: tuple[int, int], found: dict[str, Any]) -> Iterator[None]:
    """Lets FlashInfer take the CPU for a GPU, and keep what it would compile in `found`."""

    def keep(recipe: Any) -> _Nothing:
        found[recipe.name] = recipe
        return _Nothing()

    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return real_empty(*sizes, **options)  # there may be no driver to pin memory with

    real_empty = torch.empty
    core = flashinfer.jit.core
    names = [name for name in sys.modules if name.split(".")[0] == flashinfer.__name__]
    with contextlib.ExitStack() as undone:
        for module in (sys.modules[name] for name in names):
            if hasattr(module, "get_compute_capability"):
                _set(undone, module, "get_compute_capability", lambda device: capability)
        _set(undone, getattr(core, "JitSpecNvcc", None) or core.JitSpec, "build_and_load", keep)
        _set(undone, torch, "empty", empty)
        if torch.version.cuda is None:
            _set(undone, torch.version, "cuda", "13.0")  # what there is on the GPU's machine
        yield


def _set(undone: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undone.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def wanted_modules(wanted: Iterable[str], arch: str, work: Path) -> tuple[str, dict[str, Any]]:
    """FlashInfer's version, and by name what it would compile in `work` for these layers on `arch` (as `9.0a`).

    Raises:
        SystemExit: FlashInfer is not there.
        ValueError: it knows no such layers.
    """
    layers = [Layers.parse(text) for text in wanted]
    work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"FLASHINFER_CUDA_ARCH_LIST": arch, "FLASHINFER_WORKSPACE_BASE": str(work.resolve())}
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        raise SystemExit(f"FlashInfer is needed here as well, in the version that is there: {error}") from error
    major, minor = arch.rstrip("abcdef").split(".")
    return flashinfer.__version__, recipes(flashinfer, layers, (int(major), int(minor)))


def compile_into(folder: Path, arch: str, wanted: Iterable[str], work: Path) -> Path:
    """Compiles what `wanted` layers ask for on `arch`, in `work`, and packs it; returns the archive.

    What lies in `work` from before is built no further than it changed. FlashInfer reads `MAX_JOBS`.

    Raises:
        SystemExit: FlashInfer or `nvcc` are missing, the wheel in `folder` is of another FlashInfer, or a module cannot
            be compiled; with the compiler's words.
        ValueError: FlashInfer knows no such layers.
    """
    home = find_cuda_home()
    if home is None:
        raise SystemExit("there is no nvcc on the PATH, and CUDA_HOME is not set")
    os.environ["CUDA_HOME"] = str(home)
    version, modules = wanted_modules(wanted, arch, work)
    for wheel in folder.glob("flashinfer_python-*.whl"):
        if wheel.name.split("-")[1] != version:
            raise SystemExit(f"FlashInfer here is {version}, and there it will be that of {wheel}")
    _provide_driver_stub(work)
    _provide_headers()
    libraries = {}
    for name, recipe in sorted(modules.items(), key=lambda item: "sm90" in item[0]):  # those take by far the longest
        started = time.monotonic()
        try:
            recipe.build(verbose=False, need_lock=True)  # others may compile in `work` at the same time
        except Exception as error:
            raise SystemExit(f"{name} cannot be compiled:\n{str(error)[-6000:]}") from error
        libraries[name] = Path(recipe.jit_library_path)
        size = libraries[name].stat().st_size / 2**20
        print(f"{time.monotonic() - started:6.0f} s {size:6.1f} MiB  {name}", flush=True)
    return pack(folder, version, arch, libraries)


def find_cuda_home() -> Path | None:
    """CUDA's folder, of `CUDA_HOME` or of the nvcc on the PATH, which knows it though it be called by a script.

    FlashInfer takes the folder above that of the nvcc on the PATH, be it the script's: so CUDA_HOME should be set.
    """
    if os.environ.get("CUDA_HOME"):
        return Path(os.environ["CUDA_HOME"])
    if shutil.which("nvcc") is None:
        return None
    planned = subprocess.run(
        ["nvcc", "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=False
    )
    top = re.search(r"^#\$ TOP=(.+)$", planned.stderr, re.MULTILINE)
    return Path(top[1]).resolve() if top else None


def _provide_driver_stub(work: Path) -> None:
    """An empty `libcuda.so` for the linker, where no driver is installed. Only the name of it gets into a module."""
    stub = work.resolve() / "stubs" / "libcuda.so"
    stub.parent.mkdir(exist_ok=True)
    empty = stub.with_suffix(".c")
    empty.write_text("")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stub), str(empty)], check=True)
    _append("LIBRARY_PATH", stub.parent)


def _provide_headers() -> None:
    """Those of libraries that pip installed, cuRAND's above all: not every `nvcc` comes with them."""
    for folder in sys.path:
        for header in Path(folder).glob("nvidia/*/include/curand_kernel.h"):
            _append("CPLUS_INCLUDE_PATH", header.parent)  # after all that flags name


def _append(variable: str, folder: Path) -> None:
    os.environ[variable] = os.pathsep.join(filter(None, [os.environ.get(variable), str(folder)]))
