"""What runs for a client ends when the client goes, and only then."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from kvrelay_router.http.body import ClientGone, ClientWatch


class Connection:
    """`receive` of a connection whose client may go."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def watching(connection: Connection, inside: list[str]) -> asyncio.Task[None]:
    """Runs for ever; `inside` says how far it came."""

    async def run() -> None:
        with ClientWatch(connection.receive):
            inside.append("began")
            try:
                await asyncio.Event().wait()
            finally:
                inside.append("ended")

    return asyncio.create_task(run())


@pytest.mark.parametrize("before", [False, True])
async def test_a_client_that_goes_ends_what_runs_for_it(before: bool) -> None:
    connection, inside = Connection(), list[str]()
    if before:
        connection.gone.set()
    task = watching(connection, inside)
    await asyncio.sleep(0)
    connection.gone.set()
    with pytest.raises(ClientGone):
        await task
    assert inside == ["began", "ended"] and task.cancelling() == 0


@pytest.mark.parametrize("stopped", [False, True])
async def test_what_is_over_is_not_cancelled(stopped: bool) -> None:
    connection = Connection()
    with ClientWatch(connection.receive) as watch:
        await asyncio.sleep(0)
        if stopped:
            watch.stop()
            connection.gone.set()
            await asyncio.sleep(0.001)
    connection.gone.set()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0.001)  # a cancellation would come here


@pytest.mark.parametrize("goes", [False, True])
async def test_another_cancellation_stays_one(goes: bool) -> None:
    connection, inside = Connection(), list[str]()
    task = watching(connection, inside)
    await asyncio.sleep(0)
    if goes:
        connection.gone.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inside == ["began", "ended"]
