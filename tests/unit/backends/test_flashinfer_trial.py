"""FlashInfer is tried at the start: which kernels are taken, and what is left to torch."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.backends import choose_backend
from kvrelay.backends.backend import KV_DTYPES, LayerKind
from kvrelay.backends.choose_backend import WrongAttention, try_layers
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.torch_sdpa import TorchBackend
from tests.fakes import fake_flashinfer
from tests.unit.backends.cases import CPU, AttentionCase, dense_attention
from tests.unit.backends.flashinfer_cases import E5M2, KINDS, LAYOUT, TOLERANCE, install


def test_without_flashinfer_torch_attends_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), TorchBackend)
    assert "FlashInfer cannot be loaded: ModuleNotFoundError" in caplog.text


@pytest.mark.parametrize("stored", [None, *KV_DTYPES.values()])
def test_a_flashinfer_that_passes_the_trial_is_taken(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype | None
) -> None:
    install(monkeypatch)
    layout = dataclasses.replace(LAYOUT, stored=stored)
    assert isinstance(choose_backend.select_flashinfer(CPU, layout, KINDS), FlashInferBackend)


def test_a_flashinfer_without_kernels_for_8_bits_leaves_attention_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Older(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            if options["kv_data_type"] != options["q_data_type"]:
                raise RuntimeError("no kernel for 8-bit keys")
            super().plan(*args, **options)

    install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=Older)
    assert isinstance(
        choose_backend.select_flashinfer(CPU, dataclasses.replace(LAYOUT, stored=E5M2), KINDS), TorchBackend
    )
    assert "FlashInfer does not work: RuntimeError: no kernel for 8-bit keys" in caplog.text
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), FlashInferBackend)


def test_the_trials_workspace_and_wrappers_are_those_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made once, and before memory is profiled."""
    workspaces: list[torch.Tensor] = []  # of each wrapper

    def counted(base: type[Any]) -> type[Any]:
        class Counted(base):  # type: ignore[misc]
            def __init__(self, workspace: torch.Tensor, *arguments: Any, **options: Any) -> None:
                workspaces.append(workspace)
                super().__init__(workspace, *arguments, **options)

        return Counted

    names = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
    parts: dict[str, Any] = {name: counted(getattr(fake_flashinfer, name)) for name in names}
    install(monkeypatch, **parts)
    case = AttentionCase([(0, 20), (100, 1), (90, 1), (95, 1)], head_dim=64, dtype=torch.bfloat16)
    kind = LayerKind(case.num_kv_heads * case.group, case.params.scaling, None, None)
    backend = choose_backend.select_flashinfer(CPU, LAYOUT, {kind})
    assert len(workspaces) == 2, "for chunks, for single tokens"
    assert all(each is workspaces[0] for each in workspaces)
    case.run(backend)
    assert len(workspaces) == 2


class WithoutCompiler(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    """Its prefill kernels came built; those of decoding with a soft cap did not."""

    def plan(self, *args: Any, **options: Any) -> None:
        if options["logits_soft_cap"]:
            raise RuntimeError("Ninja build failed.\n" + "[1/3] nvcc\n" * 200 + "/bin/sh: 1: nvcc: not found")
        super().plan(*args, **options)


def test_kernels_that_cannot_be_built_leave_attention_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=WithoutCompiler)
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), TorchBackend)
    assert "FlashInfer does not work: RuntimeError: Ninja build failed." in caplog.text
    assert caplog.messages[-1].endswith("nvcc: not found")
    assert len(caplog.messages[-1]) < 800
    uncapped = {kind for kind in KINDS if kind.softcap is None}
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, uncapped), FlashInferBackend)


class WithoutNewerKernels(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """Those that FlashInfer takes by itself on the newest GPUs cannot be compiled."""

    def plan(self, *args: Any, **options: Any) -> None:
        if self.options.get("backend", "auto") == "auto":
            raise RuntimeError("Ninja build failed.\nfatal error: curand_kernel.h: No such file or directory")
        super().plan(*args, **options)


def test_where_the_newest_kernels_fail_those_of_older_gpus_compute_chunks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=WithoutNewerKernels)
    monkeypatch.setattr(choose_backend, "_has_kernels_of_its_own", lambda device: True)
    backend = choose_backend.select_flashinfer(CPU, LAYOUT, KINDS)
    assert isinstance(backend, FlashInferBackend)
    assert "kernels for older GPUs: newer ones fail: RuntimeError: Ninja build failed" in caplog.text
    assert "plain torch" not in caplog.text
    case = AttentionCase([(5, 20), (100, 1)], head_dim=64, dtype=torch.bfloat16)
    out, _ = case.run(backend)
    torch.testing.assert_close(out.double(), dense_attention(case), atol=TOLERANCE[case.dtype], rtol=0)


def test_on_gpus_without_newer_kernels_they_are_not_tried_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=WithoutNewerKernels)
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), TorchBackend)
    assert "older GPUs" not in caplog.text
    assert caplog.messages[-1].endswith("curand_kernel.h: No such file or directory")


def test_where_no_kernels_work_attention_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=WithoutCompiler)
    monkeypatch.setattr(choose_backend, "_has_kernels_of_its_own", lambda device: True)
    assert isinstance(choose_backend.select_flashinfer(CPU, LAYOUT, KINDS), TorchBackend)
    assert [("older GPUs" in text, "in plain torch" in text) for text in caplog.messages[-2:]] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("option", [{"window_left": -1}, {"logits_soft_cap": 1.0}, {"sm_scale": 1.0}], ids=str)
def test_kernels_that_compute_something_else_fail_the_trial(option: dict[str, Any]) -> None:
    class Deaf(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            super().plan(*args, **options | option)

    module = SimpleNamespace(**vars(fake_flashinfer) | {"BatchPrefillWithPagedKVCacheWrapper": Deaf})
    with pytest.raises(WrongAttention, match="is off by"):
        try_layers(FlashInferBackend(CPU, module), LAYOUT, KINDS, CPU)


def test_keys_written_elsewhere_fail_the_trial() -> None:
    def append(*args: Any) -> None:
        fake_flashinfer.append_paged_kv_cache(*args)
        args[4][0][0] += 1

    module = SimpleNamespace(**vars(fake_flashinfer) | {"append_paged_kv_cache": append})
    with pytest.raises(WrongAttention, match="written to other places"):
        try_layers(FlashInferBackend(CPU, module), LAYOUT, KINDS, CPU)
