"""Instructions that the router's code executes for a request and for a token event, counted by valgrind.

The same rounds as router_path.py, which drives the whole application in one process. Counts do not depend on other work
on the machine, so two checkouts can be compared within about a percent. A request's count is that of its part of a
round with few tokens; an event's is the difference of rounds with few and with many tokens. What starts up, warms up or
prepares a round is not counted. valgrind makes code some 50 times slower, so work would be cut into slices that is not
cut otherwise: here slices do not end. Needs valgrind (callgrind and its headers) and a C compiler.

Usage: python -m benchmarks.router_instructions [CHECKOUT ...] [--rounds 3] [--chat] [--keep FOLDER]
       CHECKOUT: worktrees to count, by default this one. With `--time`, no valgrind: checkouts take turns, and the
       least CPU time of the same rounds is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

SWITCH = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(const char *name) { CALLGRIND_STOP_INSTRUMENTATION; CALLGRIND_DUMP_STATS_AT(name); }
"""
DUMP = re.compile(r"Trigger: Client Request: (\w+).*?^totals: (\d+)", re.DOTALL | re.MULTILINE)
WARM_ROUNDS = 3
NEVER_S = 1e9


def switch_library(folder: Path) -> Path:
    """Compiles the functions that switch counting on and off."""
    source, library = folder / "switch.c", folder / "switch.so"
    source.write_text(SWITCH)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


def child(arguments: argparse.Namespace, checkout: Path, switch: Path | None, folder: Path) -> list[dict[str, float]]:
    """Runs the rounds in a process of the checkout; what it prints."""
    from benchmarks.router_cost import python_path  # the child's checkout may lack it

    command = [sys.executable, __file__, "--child", str(switch or ""), "--rounds", str(arguments.rounds)]
    command += ["--chat"] * arguments.chat
    if switch is not None:
        out = f"--callgrind-out-file={folder}/out"
        command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", out, *command]
    environ = {**os.environ, "PYTHONPATH": python_path(checkout), "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "0"}
    done = subprocess.run(command, env=environ, cwd=folder, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def count(arguments: argparse.Namespace, checkout: Path) -> tuple[float, float]:
    """Thousands of instructions of a request, instructions of an event."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.keep or temporary) / checkout.name
        folder.mkdir(parents=True, exist_ok=True)
        rounds = child(arguments, checkout, switch_library(folder), folder)
        counted: dict[str, int] = {}
        for dump in folder.glob("out.*"):
            if found := DUMP.search(dump.read_text()):
                counted[found[1]] = counted.get(found[1], 0) + int(found[2])
    total = {part: counted[part] for part in ("few_submit", "few_answer", "many_answer")}
    few, many = (sum(each[kind] for each in rounds) for kind in ("few", "many"))
    event = (total["many_answer"] - total["few_answer"]) / (many - few)
    requests = sum(each["requests"] for each in rounds)
    return (total["few_submit"] + total["few_answer"] - few * event) / requests / 1e3, event


def least_times(arguments: argparse.Namespace) -> Iterator[str]:
    """The least CPU microseconds of rounds, checkouts in turns."""
    seen: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in arguments.checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.turns):
            for checkout, rounds in seen.items():
                rounds += child(arguments, checkout, None, Path(folder))
    for checkout, rounds in seen.items():
        least = {part: min(each[part] for each in rounds) for part in ("few_submit", "few_answer", "many_answer")}
        few, many = rounds[0]["few"], rounds[0]["many"]
        event = (least["many_answer"] - least["few_answer"]) / (many - few)
        request = (least["few_submit"] + least["few_answer"] - few * event) / rounds[0]["requests"]
        yield f"{checkout}: request {request * 1e6:.0f} us, event {event * 1e6:.2f} us"


class Clock:
    """Stands for `time` in router_path.py: its rounds ask for the thread's time where a part begins and ends."""

    monotonic = time.monotonic

    def __init__(self, switch: Any) -> None:
        self.parts: tuple[str, str] | None = None  # of the round; None: not counted
        self._switch = switch
        self._num_calls = 0

    def thread_time(self) -> float:
        part, is_end = divmod(self._num_calls % 4, 2)
        self._num_calls += 1
        if self.parts is not None and self._switch is not None:
            if is_end:
                self._switch.stop(self.parts[part].encode())
            else:
                self._switch.start()
        return time.thread_time()


async def run_rounds(num_rounds: int, is_chat: bool, switch: Any) -> None:
    router_path: Any = import_module("benchmarks.router_path")  # that of the checkout that is measured
    with suppress(ModuleNotFoundError):  # older checkouts have no slices
        import_module("kvrelay_router.loop_share").SLICE_S = NEVER_S  # type: ignore[attr-defined]
    if is_chat:
        _ask_for_chats(router_path)
    clock = Clock(switch)
    router_path.time = clock
    path = router_path.Path()
    router_path.settle_garbage()
    for _ in range(WARM_ROUNDS):
        await path.round(router_path.FEW_TOKENS)
    await path.round(router_path.MANY_TOKENS)
    for _ in range(num_rounds):
        clock.parts = ("few_submit", "few_answer")
        few_submit_s, few_s, few = await path.round(router_path.FEW_TOKENS)
        clock.parts = ("many_submit", "many_answer")
        _, many_s, many = await path.round(router_path.MANY_TOKENS)
        seen = {"few": few, "many": many, "requests": router_path.NUM_REQUESTS}
        print(json.dumps(seen | {"few_submit": few_submit_s, "few_answer": few_s, "many_answer": many_s}))


def _ask_for_chats(router_path: Any) -> None:
    of_completion: Callable[..., bytes] = router_path.Path._body
    scope_of_completion: Callable[..., dict[str, Any]] = router_path._scope

    def body(self: Any, num_tokens: int) -> bytes:
        asked = json.loads(of_completion(self, num_tokens))
        messages = [{"role": "user", "content": asked.pop("prompt")}]
        return json.dumps(asked | {"messages": messages}).encode()

    def scope(*given: Any) -> dict[str, Any]:
        path = "/v1/chat/completions"
        return scope_of_completion(*given) | {"path": path, "raw_path": path.encode()}

    router_path.Path._body, router_path._scope = body, scope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--time", action="store_true", help="CPU time instead of instructions")
    parser.add_argument("--turns", type=int, default=5, help="processes of each checkout, with --time")
    parser.add_argument("--keep", default="", help="a folder for callgrind's files")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        switch = ctypes.CDLL(arguments.child) if arguments.child else None
        from kvrelay.process import event_loop_factory

        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(run_rounds(arguments.rounds, arguments.chat, switch))
        return
    arguments.checkouts = [checkout.resolve() for checkout in arguments.checkouts]
    if arguments.time:
        print("\n".join(least_times(arguments)))
        return
    for checkout in arguments.checkouts:
        request, event = count(arguments, checkout)
        print(f"{checkout}: request {request:,.0f} thousand instructions, event {event:,.0f}", flush=True)


if __name__ == "__main__":
    main()
