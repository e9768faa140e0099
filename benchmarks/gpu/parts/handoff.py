"""What of a handoff a client can feel, through the whole system on one device."""

from __future__ import annotations

import statistics

from benchmarks import handoff
from benchmarks.gpu.figures import figures
from benchmarks.gpu.part import Part
from benchmarks.transfer import has_nixl

ABOUT = (
    "`kvrelay up` with a prefill and a decode worker, two processes on the one device; one request at a time, of "
    "random tokens. Exposed: from the end of the prompt's last chunk to decode's first step with the request, by the "
    "workers' metrics files. After the last chunk: what was still to be sent then."
)


def run(part: Part) -> None:
    """A row a transport and prompt length."""
    scale = part.scale
    longest = max(scale.handoff_prompts) + 32
    flags = part.worker_flags(3 * longest, max_running=32)
    for transport in ("nixl", "zmq") if has_nixl() else ("zmq",):
        if not part.recorder.has_time(transport):
            return
        load = handoff.Load(part.model_dir(), scale.handoff_prompts)
        series = handoff.measure(transport, scale.repeats, flags, load)
        for length in scale.handoff_prompts:
            part.recorder.row(
                "Handoff",
                transport=transport,
                prompt=length,
                exposed_ms=figures(series.exposed_ms[length], 2),
                after_the_last_chunk_MiB=round(statistics.median(series.tail_kib[length]) / 1024, 2),
            )
