"""Scripted prefill and decode workers that speak the real protocol over real sockets, without a model.

A worker can be held at a named point of a request's way, to be killed, stopped or let go there:

prefill: `start` (nothing was done yet), `first token`, `handoff` (decode has granted).
decode:  `reserve`, `commit`, `token N` (before the N-th output token of a sequence).

The tokens depend on sequence and output index alone, so a repeated, missing or misplaced one shows.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Literal

from kvrelay.fleet import WorkerRecord
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings, PeerLost
from kvrelay.protocol.messages import (
    PROTOCOL_VERSION,
    AnyBody,
    Cancel,
    Committed,
    Failed,
    FirstToken,
    Generate,
    Granted,
    Handoff,
    LoadReport,
    NeedDecode,
    PeerRef,
    Prefill,
    Prompt,
    Reassign,
    Refused,
    Reserve,
    SequenceUsage,
    Status,
    StatusQuery,
    TokenBatch,
    TokenEntry,
    unpack_tokens,
)
from kvrelay.protocol.sampling import FinishReason, TokenLogprobs
from kvrelay.worker.requests import scores_of
from tests.fakes.waiting import PATIENCE_S

FAST = LinkSettings(alive_interval_s=0.1, peer_timeout_s=1.0)
PATIENT = replace(FAST, peer_timeout_s=PATIENCE_S)
"""For tests with a router in another process and no silent peer: a slow machine may keep one silent for a second."""
NUM_BLOCKS = 100
CACHED_TOKENS = 16

Key = tuple[str, int, int]


def true_token(sequence: int, index: int) -> int:
    return 500 * (sequence + 1) + index


def true_tokens(sequence: int, count: int) -> list[int]:
    return [true_token(sequence, index) for index in range(count)]


class Gate:
    """A point at which a worker waits."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()


class FakeWorker:
    """What prefill and decode have in common."""

    role: Literal["prefill", "decode"]

    def __init__(
        self,
        worker_id: str,
        *,
        fingerprint: str = "f",
        numerics: str = "",
        max_model_len: int = 512,
        settings: LinkSettings = FAST,
    ) -> None:
        self.worker_id = worker_id
        self.fingerprint = fingerprint
        self.numerics = numerics
        self.max_model_len = max_model_len
        self.model = "fake"
        self.tokenizer = ""
        self.draining = False
        self.tells_status = True
        self.step_cost: tuple[float, float, float] | None = None  # that it reports
        self.refusal = ""  # the answer to every Reserve
        self.failure: Failed | None = None  # the answer to every request
        self.received: list[tuple[Key, AnyBody]] = []
        self.tasks: dict[Key, asyncio.Task[None]] = {}
        self.buried: set[Key] = set()
        self.gates: dict[str, Gate] = {}
        self.replies: dict[Key, asyncio.Queue[AnyBody | PeerLost]] = defaultdict(asyncio.Queue)
        self.messenger = Messenger(worker_id, self._on_event, fingerprint=fingerprint, settings=settings)
        self.lost: list[PeerLost] = []
        self.dead = False

    @property
    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            role=self.role,
            incarnation=self.messenger.me.incarnation,
            address=self.messenger.me.address,
            model=self.model,
            tokenizer=self.tokenizer,
            fingerprint=self.fingerprint,
            numerics=self.numerics,
            protocol_version=PROTOCOL_VERSION,
            block_size=16,
            num_blocks=NUM_BLOCKS,
            max_model_len=self.max_model_len,
            vocab_size=4096,
            draining=self.draining,
        )

    def start(self) -> None:
        self.messenger.start()

    def kill(self) -> None:
        """The process is gone, as far as anybody can see."""
        if not self.dead:
            self.dead = True
            for task in self.tasks.values():
                task.cancel()
            self.tasks.clear()
            self.messenger.close(linger_s=0)

    def hold(self, point: str) -> Gate:
        self.gates[point] = gate = Gate()
        return gate

    def got(self, kind: type) -> list[tuple[Key, AnyBody]]:
        return [(key, body) for key, body in self.received if isinstance(body, kind)]

    async def passing(self, point: str) -> None:
        gate = self.gates.get(point)
        if gate is not None:
            gate.reached.set()
            await gate.open.wait()

    def send(self, peer: PeerRef, key: Key, body: AnyBody) -> None:
        self.messenger.send(peer, body, request=key[0], attempt=key[1], sequence=key[2])

    def run(self, key: Key, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks[key] = task
        task.add_done_callback(lambda _: self.tasks.pop(key, None))

    def on_message(self, key: Key, peer: PeerRef, body: AnyBody) -> None:
        raise NotImplementedError

    def _on_event(self, event: LinkEvent) -> None:
        if self.dead:
            return
        if isinstance(event, PeerLost):
            self.lost.append(event)
            for replies in self.replies.values():
                replies.put_nowait(event)
            return
        assert isinstance(event, Delivered), event
        header, body, peer = event.header, event.body, event.peer
        key = (header.request, header.attempt, header.sequence)
        if isinstance(body, StatusQuery):
            if self.tells_status:
                self.messenger.send(peer, self._status(body.query))
            return
        self.received.append((key, body))
        if isinstance(body, Cancel):
            self.buried.add(key)
            if (task := self.tasks.pop(key, None)) is not None:
                task.cancel()
        elif key not in self.buried or isinstance(body, Reassign):
            self.on_message(key, peer, body)

    def _status(self, query: int) -> Status:
        queues = {"queued_tokens": 0, "waiting": 0, "running": len(self.tasks)}
        blocks = {"free": NUM_BLOCKS, "cached": 0, "total": NUM_BLOCKS}
        load = LoadReport(step_cost=self.step_cost)
        return Status(query=query, draining=self.draining, queues=queues, blocks=blocks, totals={}, load=load)


class FakePrefill(FakeWorker):
    """Computes nothing, hands over everything."""

    role = "prefill"

    def on_message(self, key: Key, peer: PeerRef, body: AnyBody) -> None:
        match body:
            case Prefill() if self.failure is not None:
                self.send(peer, key, self.failure)
            case Prefill():
                self.run(key, self._prefill(key, peer, body))
            case Reassign() if key not in self.tasks:
                self.send(
                    peer,
                    key,
                    Failed(failure=FailureKind.WORKER_LOST, cause="the request is no longer held here", retriable=True),
                )
            case _:
                self.replies[key].put_nowait(body)

    async def _prefill(self, key: Key, router: PeerRef, body: Prefill) -> None:
        await self.passing("start")
        prompt = body.prompt
        first = self._first_token(key, prompt)
        if (scores := scores_of(prompt)) is not None:
            tokens = unpack_tokens(prompt.tokens).tolist()[: prompt.num_tokens - prompt.num_output]
            scored = tokens[prompt.sampling.logprob_start_len :]
            for part in scores.add([TokenLogprobs(each, -1.0, [], []) for each in scored]):
                self.send(router, key, part)
        await self.passing("first token")
        self.send(router, key, first)
        decode = body.decode
        while first.finish is None:
            if decode is None:
                self.send(
                    router,
                    key,
                    Failed(failure=FailureKind.NO_DECODE_WORKER, cause="no decode worker is left", retriable=True),
                )
                return
            assert first.token_id is not None
            granted = await self._reserve(key, router, decode, prompt)
            if isinstance(granted, Reassign):
                decode = granted.decode
                continue
            if granted is None:
                excluded = [decode.peer_id]
                self.send(router, key, NeedDecode(reason="refused", excluded=excluded))
                decode = await self._reassigned(key)
                continue
            await self.passing("handoff")
            num_tokens = len(prompt.tokens) // 4
            self.send(
                decode,
                key,
                Handoff(
                    reservation=granted.reservation,
                    index=first.index,
                    token_id=first.token_id,
                    num_tokens=num_tokens,
                    num_blocks=len(granted.slots),
                    cached_tokens=min(first.cached_tokens, num_tokens),
                ),
            )
            reply = await self._reply(key, Committed, decode)
            if isinstance(reply, Committed):
                return
            if isinstance(reply, Reassign):
                decode = reply.decode

    def _first_token(self, key: Key, prompt: Prompt) -> FirstToken:
        is_last = prompt.num_output + 1 >= prompt.sampling.max_tokens
        return FirstToken(
            index=prompt.num_output,
            token_id=true_token(key[2], prompt.num_output) if prompt.sampling.max_tokens else None,
            cached_tokens=CACHED_TOKENS,
            finish=FinishReason.LENGTH if is_last else None,
        )

    async def _reserve(self, key: Key, router: PeerRef, decode: PeerRef, prompt: Prompt) -> Granted | Reassign | None:
        self.send(decode, key, Reserve(prompt=prompt, router=router, transports=["none"]))
        reply = await self._reply(key, Granted, decode)
        assert reply is None or isinstance(reply, Granted | Reassign)
        return reply

    async def _reply(self, key: Key, kind: type, decode: PeerRef) -> AnyBody | None:
        """An answer of this kind, a Reassign to another worker, or None where there will be none."""
        while True:
            reply = await self.replies[key].get()
            if isinstance(reply, PeerLost):
                if (reply.peer.peer_id, reply.peer.incarnation) == (decode.peer_id, decode.incarnation):
                    return None
            elif isinstance(reply, Refused):
                return None
            elif isinstance(reply, kind) or (isinstance(reply, Reassign) and reply.decode != decode):
                return reply

    async def _reassigned(self, key: Key) -> PeerRef | None:
        while True:
            reply = await self.replies[key].get()
            if isinstance(reply, Reassign):
                return reply.decode


class FakeDecode(FakeWorker):
    """Takes requests over and counts on."""

    role = "decode"

    def on_message(self, key: Key, peer: PeerRef, body: AnyBody) -> None:
        match body:
            case Generate() if self.failure is not None:
                self.send(peer, key, self.failure)
            case Generate(prompt=prompt):
                usage = SequenceUsage(prompt_blocks=1, computed_blocks=1)
                self.run(key, self._stream(key, peer, prompt, usage))
            case Reserve() if self.refusal:
                self.send(peer, key, Refused(reason=self.refusal))
            case Reserve():
                self.run(key, self._take_over(key, peer, body))
            case _:
                self.replies[key].put_nowait(body)

    async def _take_over(self, key: Key, prefill: PeerRef, body: Reserve) -> None:
        await self.passing("reserve")
        reservation = "/".join(map(str, key))
        self.send(
            prefill,
            key,
            Granted(reservation=reservation, first_block=0, slots=[0], transport="none", endpoints=[{}]),
        )
        while not isinstance(await self.replies[key].get(), Handoff):
            pass
        await self.passing("commit")
        self.send(prefill, key, Committed(reservation=reservation))
        usage = SequenceUsage(prompt_blocks=1, received_blocks=1)
        await self._stream(key, body.router, body.prompt, usage)

    async def _stream(self, key: Key, router: PeerRef, prompt: Prompt, usage: SequenceUsage) -> None:
        sampling = prompt.sampling
        for index in range(prompt.num_output, max(sampling.max_tokens, prompt.num_output + 1)):
            await self.passing(f"token {index}")
            is_first = index == prompt.num_output
            entry = TokenEntry(
                request=key[0],
                attempt=key[1],
                sequence=key[2],
                index=index,
                token_ids=[true_token(key[2], index)] if sampling.max_tokens else [],
                cached_tokens=CACHED_TOKENS if is_first else None,
                finish=FinishReason.LENGTH if index + 1 >= sampling.max_tokens else None,
                usage=usage if is_first else None,
            )
            self.messenger.send(router, TokenBatch(entries=[entry]))
            await asyncio.sleep(0)
