"""Finds out whether the process behind an address has ended. A stopped or slow process still accepts connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PROBE_TIMEOUT_S = 2.0


class ProcessProbes:
    """Asks the systems of peers whether they still run: at most one probe per address is in flight."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def probe(self, address: str, on_ended: Callable[[], None]) -> None:
        """Calls `on_ended` if the system at `tcp://HOST:PORT` refuses a connection. Other failures prove nothing."""
        if address not in self._tasks:
            task = asyncio.get_running_loop().create_task(_probe(address, on_ended), name="process-probe")
            self._tasks[address] = task
            task.add_done_callback(lambda _: self._tasks.pop(address, None))

    def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()


async def _probe(address: str, on_ended: Callable[[], None]) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        on_ended()
    except (OSError, TimeoutError, ValueError):
        return
    else:
        writer.close()
