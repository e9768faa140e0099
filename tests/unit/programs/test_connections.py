"""Calls of a program are divided among HTTP clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

from kvrelay_programs.endpoint import Connections


async def used(connections: Connections, number: int, held: AsyncExitStack) -> Counter[int]:
    """How many of `number` calls each client has, by the order in which the clients came."""
    clients = [await held.enter_async_context(connections.client()) for _ in range(number)]
    order = {client: place for place, client in enumerate(dict.fromkeys(clients))}
    return Counter(order[client] for client in clients)


def test_a_client_has_few_calls_at_once() -> None:
    async def run() -> None:
        async with AsyncExitStack() as held:
            assert await used(Connections({}, 1), 100, held) == {0: 16, 1: 16, 2: 16, 3: 16, 4: 16, 5: 16, 6: 4}

    asyncio.run(run())


def test_a_client_whose_calls_ended_is_used_again() -> None:
    async def run() -> None:
        connections = Connections({}, 1)
        async with AsyncExitStack() as held:
            async with AsyncExitStack() as first:
                before = await first.enter_async_context(connections.client())
            assert await held.enter_async_context(connections.client()) is before

    asyncio.run(run())


def test_more_calls_than_clients_have_room_for_are_spread_evenly() -> None:
    async def run() -> None:
        async with AsyncExitStack() as held:
            found = await used(Connections({}, 1), 64 * 16 + 128, held)
            assert set(found.values()) == {18}

    asyncio.run(run())
