"""A real worker whose model fails at certain tokens: `python -m tests.fakes.failing_worker prefill|decode FLAGS`.

The failures happen inside the forward, in the embedding, so that all of the engine around it is the real one. They
begin when the file in KVRELAY_TEST_ARMED exists: the model is tried and measured before. Run it with
`--no-fused-layers`. The product has no such switch.
"""

from __future__ import annotations

import os
import signal
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from kvrelay.step.batch import DeviceLost
from kvrelay.worker import step_loop
from kvrelay.worker.worker_main import worker_main
from kvrelay_decode.__main__ import make_role as make_decode_role
from kvrelay_prefill.__main__ import make_role as make_prefill_role

MORE_THAN_THERE_IS_BYTES = 1 << 50


class FailingToken(IntEnum):
    """Tokens of the demo model, each with what happens to a forward that reads it."""

    BAD_LOGITS = 2040  # its embedding is NaN
    OUT_OF_MEMORY = 2041  # it takes more memory than any machine has
    DEVICE_LOST = 2042  # the device accepts no more work
    HANG = 2043  # it waits until the pipe in KVRELAY_TEST_GATE is opened for writing
    CRASH = 2044  # it waits like HANG, then the process ends as if killed


def fail(module: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
    """A forward hook of all modules."""
    if not isinstance(module, torch.nn.Embedding) or not Path(os.environ["KVRELAY_TEST_ARMED"]).exists():
        return
    token_ids: torch.Tensor = arguments[0]
    for token in set(token_ids.flatten().tolist()).intersection(FailingToken):
        match FailingToken(token):
            case FailingToken.BAD_LOGITS:
                output[token_ids == token] = torch.nan
            case FailingToken.OUT_OF_MEMORY:
                torch.empty(MORE_THAN_THERE_IS_BYTES, dtype=torch.uint8)
            case FailingToken.DEVICE_LOST:
                raise DeviceLost("the test's device is gone")
            case FailingToken.HANG:
                wait_at_gate()
            case FailingToken.CRASH:
                wait_at_gate()
                os.kill(os.getpid(), signal.SIGKILL)


def wait_at_gate() -> None:
    """Until the pipe was opened for writing and closed again."""
    with open(os.environ["KVRELAY_TEST_GATE"], "rb") as gate:
        gate.read()


if __name__ == "__main__":
    register_module_forward_hook(fail)
    step_loop.HANGS_AFTER_S = float(os.environ.get("KVRELAY_TEST_HANGS_AFTER_S", step_loop.HANGS_AFTER_S))
    name = sys.argv.pop(1)
    if name == "prefill":
        raise SystemExit(worker_main("prefill", make_prefill_role))
    raise SystemExit(worker_main("decode", make_decode_role))
