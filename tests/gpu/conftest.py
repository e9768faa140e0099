"""The device that a test runs on: each runs on the CPU too, in every run, so that its own code is known to work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

NO_CUDA = "" if torch.cuda.is_available() else f"no CUDA device (torch {torch.__version__})"
NO_FLASHINFER = "" if find_spec("flashinfer") is not None else "FlashInfer is not installed"

KERNELS_TIMEOUT_S = 1200
"""Without precompiled kernels, FlashInfer compiles those of a head size when they are first asked for."""


@pytest.fixture(params=["cpu", "cuda"])
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
    else:
        torch.set_num_threads(1)  # threads that spin for each other stand still on a busy machine
    yield torch.device(name, 0) if name == "cuda" else torch.device(name)
    torch.set_num_threads(num_threads)
