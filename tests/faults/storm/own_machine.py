"""Runs a service as if it were alone on its machine: KV blocks over ZMQ travel by TCP, which can be cut.

`python -m tests.faults.storm.own_machine kvrelay_prefill --flags`
"""

from __future__ import annotations

import runpy
import sys

from kvrelay.handoff.transports import zmq_receiver


def main() -> None:
    zmq_receiver.machine_id = lambda: None
    module = sys.argv[1]
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
