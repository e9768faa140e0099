"""Runs the workers of a process: one event loop with its signal handlers, and one shell per worker.

Real workers run one per process. Simulated workers only wait and may be many per process. They start, run and drain
together, and if one ends with an error, all end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from contextvars import Context, copy_context

import zmq

from kvrelay.config.worker import WorkerConfig
from kvrelay.logs import log_with
from kvrelay.process import (
    StartFailed,
    TooFewOpenFiles,
    allow_open_files,
    allow_peers,
    event_loop_factory,
    leave_at_once,
)
from kvrelay.ranks.local_ranks import PARENT_VARIABLE
from kvrelay.ranks.lockstep_group import LocalGroup, LockstepRunner
from kvrelay.worker.shell import WorkerShell
from kvrelay.worker.startup import RoleFactory, RunnerFactory

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Seconds for the last messages of all workers to leave."""


def run_workers(config: WorkerConfig, make_role: RoleFactory, make_runner: RunnerFactory) -> None:
    """Runs a worker process from start to end. Raises StartFailed, and any error that ends a worker."""
    if config.backend == "simulated" and config.data_parallel_size > 1:
        make_runner = _in_lockstep(make_runner, config.data_parallel_size)
    shells = [WorkerShell(each, make_role, make_runner) for each in config.each_worker()]
    if len(shells) > 1:
        allow_open_files(None)  # each has sockets to many others, but hardly to `max_peers` of them
    else:
        _allow_peers(config.max_peers)
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(shells))


def _in_lockstep(make_runner: RunnerFactory, size: int) -> RunnerFactory:
    """Makes runners whose workers, all of this process, are the `size` ranks of one group."""
    ranks = LocalGroup(size).ranks
    return lambda config: LockstepRunner(make_runner(config), ranks[config.data_parallel_rank])


async def _serve(shells: Sequence[WorkerShell]) -> None:
    """Runs until SIGTERM or SIGINT, then drains. A second signal exits at once, as does one during the start: nothing
    knows of the worker yet, and threads that load a model or compile kernels cannot be stopped."""
    loop = asyncio.get_running_loop()
    is_starting = True

    def on_signal() -> None:
        if is_starting:
            log.info("stopped before the start was complete")
            leave_at_once()
        for shell in shells:
            shell.on_signal()

    # Ctrl-C in a terminal reaches all processes of a group with data-parallel attention: rank 0 has the others drain.
    is_child = PARENT_VARIABLE in os.environ
    for number in (signal.SIGTERM,) if is_child else (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    contexts = [_named(shell.config.worker_id) for shell in shells]
    try:
        for shell, context in zip(shells, contexts, strict=True):
            await asyncio.create_task(shell.startup(), context=context)
        is_starting = False
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
    for shell in shells:  # only now: closing blocks the loop, which the other shells need to leave
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
    """Makes log lines name the worker instead of the process."""
    context = copy_context()
    context.run(log_with, worker_id=worker_id)
    return context


def _allow_peers(max_peers: int) -> None:
    try:
        allow_peers(max_peers, transfers_blocks=True)
    except TooFewOpenFiles as error:
        raise StartFailed(str(error)) from error
