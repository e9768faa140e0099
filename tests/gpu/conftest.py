"""The device that a test runs on: each runs on the CPU too, in every run, so that its own code is known to work.

Those of `ON_PRETENDED` also run on a CUDA device that is pretended, for the order of what is launched and the host's
waits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

from kvrelay.backends import flashinfer_graphs, flashinfer_kernels
from tests.fakes import pretended_flashinfer
from tests.fakes.pretended_cuda import NO_PRETENCE, pretend_cuda

NO_CUDA = "" if torch.cuda.is_available() else f"no CUDA device (torch {torch.__version__})"
NO_FLASHINFER = "" if find_spec("flashinfer") is not None else "FlashInfer is not installed"

KERNELS_TIMEOUT_S = 1200
"""Without precompiled kernels, FlashInfer compiles those of a head size when they are first asked for."""


ON_PRETENDED = ("test_graphs", "test_transfers", "test_launch_ahead", "test_seeds")
"""Others are about kernels, about memory of a real size, or start processes, which would have to pretend as well."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        pretended = metafunc.module.__name__.rpartition(".")[2] in ON_PRETENDED and not NO_PRETENCE
        metafunc.parametrize("device", ["cpu", *(["pretended"] if pretended else []), "cuda"], indirect=True)


def skip_without_flashinfer(device: torch.device) -> None:
    """On a GPU that is not pretended."""
    if device.type == "cuda" and NO_FLASHINFER and sys.modules.get("flashinfer") is not pretended_flashinfer:
        pytest.skip(NO_FLASHINFER)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """`cuda` is marked `gpu`, see the conftest of all tests."""
    name: str = request.param
    num_threads = torch.get_num_threads()
    if name == "cuda":
        if NO_CUDA:
            pytest.skip(NO_CUDA)
        # Kernels that run one by one would hide a missing wait; TF32 would round float32 to 10 bits.
        assert os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "0", "unset CUDA_LAUNCH_BLOCKING"
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        yield torch.device(name, 0)
        return
    torch.set_num_threads(1)  # threads that spin for each other stand still on a busy machine
    if name == "pretended":
        with _pretended():
            yield torch.device("cuda", 0)
    else:
        yield torch.device(name)
    torch.set_num_threads(num_threads)


@contextmanager
def _pretended() -> Iterator[None]:
    """With FlashInfer, for which workspaces of a real size would be written to for nothing."""
    with pytest.MonkeyPatch.context() as patched, pretend_cuda():
        patched.setitem(sys.modules, "flashinfer", pretended_flashinfer)
        patched.setattr(flashinfer_kernels, "workspace_bytes", lambda *_: 1 << 20)
        patched.setattr(flashinfer_graphs, "fixed_workspace_bytes", lambda *_: 1 << 20)
        yield
