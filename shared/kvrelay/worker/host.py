"""A process of workers: one event loop with its signals, and a shell for each worker.

One worker a process is the rule. Simulated ones, which wait and do not compute, may be many: they start, run and drain
together, and where one ends by an error all do.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import Sequence
from contextvars import Context, copy_context

import zmq

from kvrelay.config.worker import WorkerConfig
from kvrelay.process import StartFailed, event_loop_factory
from kvrelay.telemetry.logs import log_with
from kvrelay.worker.shell import WorkerShell
from kvrelay.worker.startup import RoleFactory, RunnerFactory

LINGER_S = 0.2
"""Time for the last messages to leave, of all workers together."""


def run_workers(config: WorkerConfig, make_role: RoleFactory, make_runner: RunnerFactory) -> None:
    """The whole life of a worker process. Raises StartFailed, and whatever ends a worker."""
    shells = [WorkerShell(each, make_role, make_runner) for each in config.each_worker()]
    if len(shells) > 1:
        _allow_many_files()
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(shells))


async def _serve(shells: Sequence[WorkerShell]) -> None:
    """Runs until SIGTERM or SIGINT, then drains. A second signal ends it at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        for shell in shells:
            shell.on_signal()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    contexts = [_named(shell.config.worker_id) for shell in shells]
    try:
        for shell, context in zip(shells, contexts, strict=True):
            await asyncio.create_task(shell.startup(), context=context)
    except BaseException as error:
        for shell in shells:
            await shell.leave()
            shell.close(LINGER_S / len(shells))
        if isinstance(error, OSError | ValueError | zmq.ZMQError):
            raise StartFailed(str(error)) from error
        raise
    lives = [
        asyncio.create_task(_live(shell), context=context) for shell, context in zip(shells, contexts, strict=True)
    ]
    await asyncio.wait(lives, return_when=asyncio.FIRST_EXCEPTION)
    for life in lives:
        life.cancel()
    ends = await asyncio.gather(*lives, return_exceptions=True)
    for shell in shells:  # not before all have left: closing holds up the loop that the others need for it
        shell.close(LINGER_S / len(shells))
    for ended in ends:
        if isinstance(ended, Exception):
            raise ended


async def _live(shell: WorkerShell) -> None:
    try:
        await shell.main_loop()
    finally:
        await shell.leave()


def _named(worker_id: str) -> Context:
    """In it, logs name the worker and not the process."""
    context = copy_context()
    context.run(log_with, worker_id=worker_id)
    return context


def _allow_many_files() -> None:
    """Each worker has sockets to many others; the usual soft limit is for one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
