"""Prints the files that a request, a token and a block pass, of a real run: `kvrelay up` with the demo model.

    .venv/bin/python -m scripts.trace_files [--functions]

- request: in the router, from its arrival to the first message to a worker.
- token: from the commit of a step in the decode worker to the write of its event in the router. Of the stream's tokens
  the one with the median number of files; each sixteenth passes more, because it fills a block.
- block: from the commit of the step that computed it in the prefill worker to the commit of the handoff on decode.

Of a token and a block only what runs within the functions of `PATHS` counts, since the same threads plan other steps
meanwhile. What a process does by itself (timers, heartbeats) does not count: an activation (see
traced/sitecustomize.py) whose functions all ran while the stack was idle is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from kvrelay.config.common import demo_model_path
from tests.fakes.stack import Stack

Call = tuple[int, str, str, str]  # ns, file, function, the mark within which it ran

SEND = "kvrelay/messaging/messenger.py:Messenger.send"
COMMIT = "kvrelay/scheduling/scheduler.py:Scheduler.commit"
HANDED_OVER = "kvrelay_decode/incoming_handoffs.py:IncomingHandoffs._commit"
PATHS = {
    "token in decode": (COMMIT, "kvrelay_decode/service.py:DecodeRole._committed", SEND),
    "token in router": (
        "kvrelay_router/dispatch/inbox.py:Inbox.take",
        "kvrelay_router/dispatch/running_request.py:PushQueue._push",
    ),
    "block in prefill": (
        "kvrelay_prefill/service.py:PrefillRole._committed",
        "kvrelay_prefill/outgoing_handoffs.py:OutgoingHandoffs._on_transfer",
        "kvrelay/handoff/transports/sender_thread.py:SenderThread._carry_out",
        "kvrelay/handoff/transports/zmq_sender.py:ZmqSender._send",
        SEND,
    ),
    "block in decode": (
        "kvrelay/handoff/transports/receiver_thread.py:ReceiverThread._take",
        "kvrelay_decode/incoming_handoffs.py:IncomingHandoffs._on_transfer",
        "kvrelay_decode/incoming_handoffs.py:IncomingHandoffs.from_prefill",
        HANDED_OVER,
    ),
}
IDLE_S = 3.0
NUM_TOKENS = 64
FIRST_EVENT = 2  # of the stream that is looked at: before it, the answer begins


@dataclass(frozen=True, slots=True)
class Run:
    """Nanoseconds of the monotonic clock, which all processes of a machine share."""

    idle_from: int
    sent: int
    received: list[int]


class Process:
    """What one process did from the request on, but for what it does by itself."""

    def __init__(self, path: Path, run: Run) -> None:
        lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("]]"))
        activations: list[list[Call]] = [[(ns, *name) for ns, *name in calls] for calls in lines]
        idle = {call[1:] for calls in activations for call in calls if run.idle_from <= call[0] < run.sent}
        self._calls: list[Call] = [
            call
            for calls in activations
            if calls[0][0] >= run.sent and not idle.issuperset(call[1:] for call in calls)
            for call in calls
        ]

    def times_of(self, function: str) -> list[int]:
        found = sorted(call[0] for call in self._calls if f"{call[1]}:{call[2]}" == function)
        if not found:
            raise SystemExit(f"{function} was not called: has it another name now?")
        return found

    def time_of(self, function: str) -> int:
        """Of its first call."""
        return self.times_of(function)[0]

    def between(self, first: int, last: int, within: Iterable[str] = ()) -> list[Call]:
        return sorted(call for call in self._calls if first <= call[0] <= last and (not within or call[3] in within))


def traced_run(place: Path) -> Run:
    """One streamed completion with a prompt of one chunk, after a warm-up of the same kind."""
    paths = [str(Path(__file__).parent / "traced"), os.environ.get("PYTHONPATH", "")]
    environ = {
        "KVRELAY_TRACED_FILES": str(place),
        "KVRELAY_TRACED_MARKS": " ".join(mark for marks in PATHS.values() for mark in marks),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with Stack(demo_model_path(), place / "state", "--transfer", "zmq", environ=environ) as stack:
        ask(stack, 1)
        idle_from = time.monotonic_ns()
        time.sleep(IDLE_S)
        sent = time.monotonic_ns()
        return Run(idle_from, sent, ask(stack, 2))


def ask(stack: Stack, seed: int) -> list[int]:
    """When each event came."""
    text = f"What is an otter, a beaver, or number {seed}?"
    body = {
        "model": stack.model,
        "prompt": f"{text} " * 8,
        "max_tokens": NUM_TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    received = []
    with httpx.stream("POST", f"{stack.base_url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                received.append(time.monotonic_ns())
    return received


def trace(processes: dict[str, Process], run: Run) -> dict[str, list[Call]]:
    router, prefill, decode = (processes[name] for name in ("router", "prefill", "decode"))
    commits = [ns for ns in decode.times_of(COMMIT) if run.received[FIRST_EVENT] <= ns < run.received[-2]]
    tokens = [
        decode.between(*step, PATHS["token in decode"]) + router.between(*step, PATHS["token in router"])
        for step in pairwise(commits)
    ]
    block = prefill.time_of(COMMIT), decode.time_of(HANDED_OVER)
    for path, marks in PATHS.items():
        for mark in marks:
            processes[path.split()[-1]].time_of(mark)  # a mark that has another name now would count nothing
    return {
        "request": router.between(run.sent, router.time_of(SEND)),
        "token": sorted(tokens, key=lambda calls: len({call[1] for call in calls}))[len(tokens) // 2],
        "block": prefill.between(*block, PATHS["block in prefill"]) + decode.between(*block, PATHS["block in decode"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--functions", action="store_true", help="also the functions, in the order of their first calls"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run = traced_run(place)
        processes: dict[str, Process] = {}
        for path in sorted(place.glob("*.jsonl"), key=lambda path: path.stat().st_size):
            text = path.read_text(encoding="utf-8")
            processes |= {
                role: Process(path, run) for role in ("router", "prefill", "decode") if f'"kvrelay_{role}/' in text
            }
    for name, calls in trace(processes, run).items():
        files = dict.fromkeys(call[1] for call in calls)
        lines = [f"{name}: {len(files)} files"]
        for file in files:
            names = dict.fromkeys(call[2] for call in calls if call[1] == file)
            lines += [f"  {file}", *([f"    {', '.join(names)}"] if given.functions else [])]
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
