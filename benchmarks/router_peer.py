"""Workers for benchmarks of the router: the real protocol over real sockets, with nothing behind it.

A prompt is "computed" when it arrives, its first token goes to the router at once, and the decode worker that was named
adds a token a step to each of its sequences, in one message a step and router, as real ones do. A prompt handed over
goes from object to object: what workers say among themselves costs the router nothing.

Usage: KVRELAY_REDIS_URL=... python -m benchmarks.router_peer --prefill 2 --decode 4 --step-ms 5 --model NAME
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import dataclass
from typing import Literal

from kvrelay.fleet import Registry, WorkerRecord
from kvrelay.messaging.messenger import Messenger
from kvrelay.process import event_loop_factory
from kvrelay.protocol.link import Delivered, LinkEvent
from kvrelay.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    FirstToken,
    Generate,
    LoadReport,
    PeerRef,
    Prefill,
    Prompt,
    Status,
    StatusQuery,
    TokenBatch,
    TokenEntry,
)
from kvrelay.protocol.sampling import FinishReason

NUM_BLOCKS = 1 << 16
BLOCK_SIZE = 16
TOKENS = range(300, 1800)
"""Ids that the demo model's tokenizer has words or parts of words for."""
LEASE_S = 600.0
"""The registry takes a longer lease for one from before its clock was set back."""

Key = tuple[str, int, int]


@dataclass(slots=True)
class Stream:
    key: Key
    router: PeerRef
    index: int
    max_tokens: int


class Worker:
    def __init__(self, fleet: dict[str, Worker], worker_id: str, role: Literal["prefill", "decode"]) -> None:
        self.worker_id, self.role = worker_id, role
        self.streams: dict[Key, Stream] = {}
        self.messenger = Messenger(worker_id, self._on_event, fingerprint="benchmark")
        self._fleet = fleet
        fleet[worker_id] = self

    def record(self, model: str) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            role=self.role,
            incarnation=self.messenger.me.incarnation,
            address=self.messenger.me.address,
            model=model,
            fingerprint="benchmark",
            protocol_version=PROTOCOL_VERSION,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=1 << 16,
            vocab_size=2048,
            max_running=4096,
        )

    def step(self) -> None:
        """A token for every sequence, in one message to each router."""
        batches: dict[PeerRef, list[TokenEntry]] = {}
        for stream in list(self.streams.values()):
            is_last = stream.index + 1 >= stream.max_tokens
            entry = TokenEntry(
                request=stream.key[0],
                attempt=stream.key[1],
                sequence=stream.key[2],
                index=stream.index,
                token_ids=[_token(stream.index)],
                finish=FinishReason.LENGTH if is_last else None,
            )
            batches.setdefault(stream.router, []).append(entry)
            stream.index += 1
            if is_last:
                del self.streams[stream.key]
        for router, entries in batches.items():
            self.messenger.send(router, TokenBatch(entries=entries))

    def take_over(self, key: Key, router: PeerRef, prompt: Prompt) -> None:
        """The commit: as with a real worker, its first batch repeats the first token."""
        self.streams[key] = Stream(key, router, prompt.num_output, prompt.sampling.max_tokens)

    def _on_event(self, event: LinkEvent) -> None:
        if not isinstance(event, Delivered):
            return
        header, body, router = event.header, event.body, event.peer
        key = (header.request, header.attempt, header.sequence)
        match body:
            case StatusQuery(query=query):
                self.messenger.send(router, self._status(query))
            case Prefill(prompt=prompt, decode=decode):
                is_last = prompt.num_output + 1 >= prompt.sampling.max_tokens
                first = FirstToken(
                    index=prompt.num_output,
                    token_id=_token(prompt.num_output),
                    finish=FinishReason.LENGTH if is_last else None,
                )
                self.messenger.send(router, first, request=key[0], attempt=key[1], sequence=key[2])
                if decode is not None and not is_last:
                    self._fleet[decode.peer_id].take_over(key, router, prompt)
            case Generate(prompt=prompt):
                self.take_over(key, router, prompt)
            case Cancel():
                self.streams.pop(key, None)

    def _status(self, query: int) -> Status:
        blocks = {"free": NUM_BLOCKS - len(self.streams), "cached": 0, "total": NUM_BLOCKS}
        load = LoadReport(num_sequences=len(self.streams), own_sequences=len(self.streams), step_cost=(1e-3, 1e-5, 0.0))
        return Status(query=query, draining=False, queues={}, blocks=blocks, totals={}, load=load)


def _token(index: int) -> int:
    return TOKENS[index * 37 % len(TOKENS)]


async def serve(arguments: argparse.Namespace) -> None:
    """Registers all workers and steps them until the process is ended."""
    fleet: dict[str, Worker] = {}
    for number in range(arguments.prefill):
        Worker(fleet, f"prefill-{number}", "prefill")
    for number in range(arguments.decode):
        Worker(fleet, f"decode-{number}", "decode")
    registry = Registry(os.environ["KVRELAY_REDIS_URL"], os.environ.get("KVRELAY_REDIS_PREFIX", "kvrelay"))
    records = []
    for worker in fleet.values():
        worker.messenger.start()
        records.append(await registry.join(worker.record(arguments.model), LEASE_S))
    print("ready", flush=True)
    renewing = asyncio.create_task(renew(registry, records))
    decodes = [worker for worker in fleet.values() if worker.role == "decode"]
    loop = asyncio.get_running_loop()
    step_s = arguments.step_ms / 1e3
    due = loop.time()
    while True:
        for worker in decodes:  # spread over the step, as workers of one's own would be
            due += step_s / len(decodes)
            await asyncio.sleep(due - loop.time())
            if loop.time() - due > step_s:
                due = loop.time()  # late: steps are left out, not made up for
            worker.step()
        if renewing.done():
            renewing.result()


async def renew(registry: Registry, records: list[WorkerRecord]) -> None:
    while True:
        await asyncio.sleep(LEASE_S / 3)
        for record in records:
            await registry.renew(record, LEASE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(serve(arguments))


if __name__ == "__main__":
    main()
