"""One end of a transfer as a process of its own: orders come as JSON lines on stdin, what happens goes to stdout.

python -m tests.component.transfer.end_process TRANSPORT send|receive NUM_BLOCKS BLOCK_BYTES SEED
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

from msgspec.structs import astuple

from kvrelay.handoff.transports.base import BlockPush, ReceiverEvent, SenderEvent
from kvrelay.handoff.transports.wire import Bytes
from tests.component.transfer.rig import ReceivingEnd, Rig, SendingEnd
from tests.component.transfer.transports import TRANSPORTS, source_pool, target_pool


def say(kind: str, *what: object) -> None:
    """One line to the parent."""
    print(json.dumps([kind, *what]), flush=True)


def report(event: SenderEvent | ReceiverEvent) -> None:
    """An event of the end, named by its type."""
    say(type(event).__name__, *astuple(event))


def digest(pool: Bytes, slots: list[int]) -> str:
    """What stands in these slots, for a comparison across processes."""
    return hashlib.blake2b(pool[slots].tobytes()).hexdigest()


def obey(end: SendingEnd | ReceivingEnd, order: list[Any]) -> None:
    """`["push", reservation, endpoint, copies]`, `["admit", reservation, first, slots]` or `["digest", slots]`."""
    match (end, order):
        case (SendingEnd(), ["push", reservation, endpoint, copies]):
            end.push(reservation, endpoint, [BlockPush(*copy) for copy in copies])
        case (ReceivingEnd(), ["admit", reservation, first_block, slots]):
            end.receiver.admit(reservation, first_block, slots)
            say("admitted")
        case (ReceivingEnd(), ["digest", slots]):
            say("digest", digest(end.pool, slots))
        case _:
            raise ValueError(order)


async def main(transport: str, role: str, num_blocks: str, block_bytes: str, seed: str) -> None:
    rig = Rig(TRANSPORTS[transport])
    shape = int(num_blocks), int(block_bytes)
    end = rig.sender(source_pool(*shape, int(seed))) if role == "send" else rig.receiver(target_pool(*shape))
    end.log.tell = report
    say("ready", end.endpoint if isinstance(end, ReceivingEnd) else {})
    while line := await asyncio.to_thread(sys.stdin.readline):
        obey(end, json.loads(line))
    rig.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
