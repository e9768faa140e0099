"""A worker that cannot fit its memory says what it needs, before it takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.engine import memory_need
from kvrelay.engine.make import make_runner
from kvrelay.engine.memory_need import MemoryNeed, MemoryTooSmall
from kvrelay.machine_memory import MemoryLimit, own_memory_bytes

MIB = 1 << 20
HOST = MemoryNeed(1000 * MIB, 300 * MIB, 400 * MIB, is_host=True)


def test_what_fits_is_not_refused() -> None:
    HOST.check(200 * MIB, 100 * MIB)
    MemoryNeed(1000 * MIB, 0, 900 * MIB, is_host=False).check(100 * MIB, 500 * MIB)


@pytest.mark.parametrize(
    ("need", "pool", "message"),
    [
        (
            HOST,
            300 * MIB,
            r"needs at least 1050 MiB \(300 MiB for the process, 400 MiB for weights, 300 MiB for the pool",
        ),
        (HOST, 300 * MIB, "50 MiB for the swap space.*lower kv_memory_bytes, num_blocks or swap_space$"),
        (MemoryNeed(500 * MIB, 300 * MIB, 400 * MIB, is_host=True), 0, "700 MiB .*by quantization or dtype$"),
        (MemoryNeed(1000 * MIB, 300 * MIB, 400 * MIB, True, 2), 0, "1400 MiB .* in each of 2 ranks"),
        (MemoryNeed(500 * MIB, 0, 600 * MIB, is_host=False), 0, "the memory of the GPU is 500 MiB"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(need: MemoryNeed, pool: int, message: str) -> None:
    with pytest.raises(MemoryTooSmall, match=message):
        need.check(pool, 50 * MIB if pool else 0)


def test_a_container_s_limit_is_named(model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    limit = own_memory_bytes() + 100 * MIB
    monkeypatch.setattr(memory_need, "machine_memory_bytes", lambda: limit)
    monkeypatch.setattr(memory_need, "memory_limits", lambda: [MemoryLimit(limit, 0)])
    model = str(model_dir("llama"))
    make_runner(model, dtype="float32", memory_bytes=MIB)
    with pytest.raises(MemoryTooSmall, match=r"the memory limit of this container is .* 200 MiB for the pool"):
        make_runner(model, dtype="float32", memory_bytes=200 * MIB)
