"""What the device does at best, measured: copies, matrix products, and copies between host and device."""

from __future__ import annotations

import torch

from benchmarks.gpu.figures import figures
from benchmarks.gpu.part import Part, interleaved

ABOUT = (
    "Copies within the device count what is read and what is written; copies to and from pinned host memory count "
    "once. The matrix product is square, of random numbers. GB are 10^9 bytes."
)
_CALLS = 10


def run(part: Part) -> None:
    """A row each; `read_floors` finds them by name."""
    device, scale = part.device, part.scale
    source = torch.randint(0, 256, (scale.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(scale.copy_bytes // 4, dtype=torch.uint8, pin_memory=device.type == "cuda")
    left, right = (torch.randn(scale.matmul_size, scale.matmul_size, device=device).to(part.dtype) for _ in range(2))
    product = torch.empty_like(left)
    seconds = interleaved(
        {
            "copy": lambda: part.seconds(lambda: target.copy_(source), _CALLS),
            "matmul": lambda: part.seconds(lambda: torch.mm(left, right, out=product), _CALLS),
            "to host": lambda: part.seconds(lambda: host.copy_(source[: len(host)], non_blocking=True), _CALLS),
            "to device": lambda: part.seconds(lambda: target[: len(host)].copy_(host, non_blocking=True), _CALLS),
        },
        scale.repeats,
    )
    sizes = {"copy": 2 * len(source), "to host": len(host), "to device": len(host)}
    for name, size in sizes.items():
        part.recorder.row("Floors", what=name, rate=figures([size / s / 1e9 for s in seconds[name]], 1), unit="GB/s")
    operations = 2 * scale.matmul_size**3
    rates = [operations / s / 1e12 for s in seconds["matmul"]]
    part.recorder.row("Floors", what="matmul", rate=figures(rates, 1), unit="TFLOP/s")
