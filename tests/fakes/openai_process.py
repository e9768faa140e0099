"""A fake OpenAI server in a process of its own: python -m tests.fakes.openai_process PORT good|refusing|stalling.

good: five pieces. refusing: status 500. stalling: the first `NUM_LIVELY` requests are answered, no later one ends.
"""

from __future__ import annotations

import asyncio
import sys

from tests.fakes.openai_server import USAGE, Exchange, OpenAiServer

NUM_LIVELY = 6
NUM_PIECES = 5  # as USAGE counts


async def serve(port: int, manner: str) -> None:
    num_requests = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal num_requests
        num_requests += 1
        if manner == "refusing":
            await exchange.head("500 Internal Server Error", "application/json")
            await exchange.raw(b'{"error": {"message": "out of order"}}')
            await exchange.end(done=False)
            return
        if manner == "stalling" and num_requests > NUM_LIVELY:
            await asyncio.Event().wait()
        await exchange.head()
        for number in range(NUM_PIECES):
            await exchange.piece("a", "length" if number == NUM_PIECES - 1 else None)
        await exchange.event({"choices": [], "usage": USAGE})
        await exchange.end()

    async with await asyncio.start_server(OpenAiServer(answer).serve, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
