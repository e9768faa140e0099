"""A process with a messenger that sends back whatever it gets. Says who it is on its first line."""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec

from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings


async def echo(port: int, settings: LinkSettings) -> None:
    def on_event(event: LinkEvent) -> None:
        if isinstance(event, Delivered):
            messenger.send(event.peer, event.body, request=event.header.request)

    messenger = Messenger("echo", on_event, port=port, settings=settings)
    messenger.start()
    print(json.dumps(msgspec.to_builtins(messenger.me)), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(echo(int(sys.argv[1]), LinkSettings(**json.loads(sys.argv[2]))))
