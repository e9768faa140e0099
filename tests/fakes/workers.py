"""Prefill and decode workers of the real services with the hash model, in this process, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.config.worker import WorkerConfig
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.handoff.transports.select import make_receivers, make_senders
from kvrelay.kv.pool import BlockState
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings
from kvrelay.protocol.messages import (
    AnyBody,
    Failed,
    FirstToken,
    Generate,
    NeedDecode,
    PeerRef,
    Prefill,
    Prompt,
    SequenceUsage,
    TokenBatch,
    pack_tokens,
)
from kvrelay.protocol.sampling import FinishReason, Sampling, ScoredText
from kvrelay.worker.context import Role, WorkerContext
from kvrelay.worker.shell import WorkerShell
from kvrelay.worker.startup import RoleFactory, StartedWorker
from kvrelay_decode.service import DecodeRole
from kvrelay_prefill.service import PrefillRole
from tests.fakes.hash_runner import HashRunner
from tests.fakes.waiting import PATIENCE_S

IDLE_STATES = {BlockState.FREE.value, BlockState.CACHED.value, "total"}
HURRY_S = 0.02
"""From the first signal to the second."""


def has_sent_all(messenger: Messenger) -> bool:
    """Returns whether all peers have taken all messages, as their life signs say."""
    return all(link.taken_bytes == link.sent_bytes for link in messenger._links._links.values())


def prefill_role(context: WorkerContext, config: WorkerConfig) -> Role:
    senders = make_senders(config.transfer, context.pool_memory, host=config.host)
    return PrefillRole(context, senders)


def decode_role(context: WorkerContext, config: WorkerConfig) -> Role:
    receivers = make_receivers(config.transfer, context.pool_memory, host=config.host, port=0, advertise_host=None)
    return DecodeRole(context, receivers)


class LocalWorker:
    """A worker shell on this event loop."""

    def __init__(self, redis_url: str, role: str, runner: HashRunner, **settings: object) -> None:
        values = {"peer_timeout_s": 2.0, "drain_timeout_s": 5.0, "transfer": "zmq"} | settings
        values |= {"model": "hash-model", "served_model_name": "hash-model", "redis_url": redis_url, "role": role}
        self.config = WorkerConfig.model_validate(values)

        def make_runner(_: WorkerConfig) -> ModelRunner:
            return runner

        self._make_runner = make_runner
        self.use(prefill_role if role == "prefill" else decode_role)
        self.runner = runner
        self._task: asyncio.Task[None] | None = None

    def use(self, make_role: RoleFactory) -> None:
        """Before `start`: a role that is made in another way."""
        self.shell = WorkerShell(self.config, make_role, self._make_runner)

    async def start(self) -> PeerRef:
        try:
            await self.shell.startup()
            self._task = asyncio.create_task(self.shell.main_loop())
            await asyncio.wait_for(self.started.membership.joined.wait(), PATIENCE_S)
        except BaseException:
            self.die()
            raise
        return self.me

    @property
    def started(self) -> StartedWorker:
        return self.shell.started

    @property
    def context(self) -> WorkerContext:
        return self.started.context

    @property
    def me(self) -> PeerRef:
        return self.context.messenger.me

    @property
    def blocks(self) -> dict[str, int]:
        return {state.value: count for state, count in self.context.pool.counts().items()}

    def is_clean(self) -> bool:
        """No request, no block that anybody holds, and nothing in the swap space."""
        busy = {state: count for state, count in self.blocks.items() if state not in IDLE_STATES and count}
        if self.context.scheduler.lifecycle.offload.use.num_used_slots:
            return False
        return not busy and self.started.role.num_open == 0 and not self.context.scheduler.has_work

    def die(self) -> None:
        """As a crash looks to the others: silence. Also in the middle of a start or a stop; may be called twice."""
        self.runner.go_on()
        started = self.shell._started
        if started is None:
            self.shell.close()
            return
        # Not by cancellation alone: redis swallows one that comes at the wrong moment. A dead worker would then renew
        # its lease for ever, and the event loop could not be closed.
        started.membership.stop()
        if self.shell._pages._server is not None:
            self.shell._pages._server.close()
        for task in self.shell._tasks:
            task.cancel()
        if self._task is not None:
            self._task.cancel()
        started.context.messenger.close(0)
        if started.cache_events is not None:
            started.cache_events._publisher.abandon()
        started.role.close()
        if started.context.events is not None:
            started.context.events.close()

    async def stop(self, *, hurried: bool = False) -> None:
        """As SIGTERM does. `hurried`: a second signal soon cuts the drain short."""
        assert self._task is not None
        self.runner.go_on()
        self.shell.on_signal()
        try:
            if hurried:
                await asyncio.sleep(HURRY_S)
                self.shell.on_signal()
            await asyncio.gather(self._task, return_exceptions=True)
            await self.shell.leave()
            self.shell.close()
        except BaseException:  # the test ends in the middle of it
            self.die()
            raise


@dataclass
class Received:
    """What the router heard about one sequence, tokens by output index."""

    tokens: dict[int, int] = field(default_factory=dict)
    first_from_prefill: bool = False  # before or after decode's word of it: nothing orders the two
    finish: FinishReason | None = None
    failed: str | None = None
    failure: FailureKind | None = None
    refused: bool = False  # with `failed`: it was not begun
    usage: SequenceUsage | None = None
    beams: list[ScoredText] = field(default_factory=list)
    cached_tokens: int | None = None
    need_decode: list[NeedDecode] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def output(self) -> list[int]:
        assert sorted(self.tokens) == list(range(len(self.tokens)))
        return [self.tokens[index] for index in range(len(self.tokens))]

    async def until(self, condition: Callable[[Received], bool], timeout_s: float = PATIENCE_S) -> Received:
        async def wait() -> None:
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()

        await asyncio.wait_for(wait(), timeout_s)
        return self

    async def finished(self, timeout_s: float = PATIENCE_S) -> Received:
        return await self.until(lambda r: r.finish is not None or r.failed is not None, timeout_s)


class StubRouter:
    """Speaks the router's side of the protocol and keeps what it hears; checks that no token is contradicted."""

    def __init__(self, name: str = "router") -> None:
        self.messenger = Messenger(name, self._on_event, settings=LinkSettings(0.1, 2.0))
        self.messenger.start()
        self.received: dict[tuple[str, int, int], Received] = {}
        self.lost: list[PeerRef] = []

    def prefill(
        self,
        worker: PeerRef,
        decode: PeerRef | None,
        request: str,
        tokens: list[int],
        sampling: Sampling,
        attempt: int = 1,
        num_output: int = 0,
        cache_salt: str = "",
        sample: tuple[int, int] = (0, 1),
    ) -> Received:
        """`sample`: its index, and the number of samples that the request wants."""
        prompt = Prompt(
            tokens=pack_tokens(tokens),
            sampling=sampling,
            num_output=num_output,
            cache_salt=cache_salt,
            num_samples=sample[1],
            timeout_s=60,
        )
        return self._start(worker, Prefill(prompt=prompt, decode=decode), request, attempt, sample[0])

    def generate(
        self,
        worker: PeerRef,
        request: str,
        tokens: list[int],
        sampling: Sampling,
        attempt: int = 1,
        sample: tuple[int, int] = (0, 1),
        tenant: str = "",
        session: str = "",
    ) -> Received:
        prompt = Prompt(
            tokens=pack_tokens(tokens),
            sampling=sampling,
            num_samples=sample[1],
            timeout_s=60,
            tenant=tenant,
            session=session,
        )
        return self._start(worker, Generate(prompt=prompt), request, attempt, sample[0])

    def send(self, worker: PeerRef, request: str, body: AnyBody, attempt: int = 1, sequence: int = 0) -> None:
        self.messenger.send(worker, body, request=request, attempt=attempt, sequence=sequence)

    def close(self) -> None:
        self.messenger.close(0)

    def _start(self, worker: PeerRef, body: AnyBody, request: str, attempt: int, sequence: int = 0) -> Received:
        received = self.received[request, attempt, sequence] = Received()
        self.messenger.send(worker, body, request=request, attempt=attempt, sequence=sequence)
        return received

    def _on_event(self, event: LinkEvent) -> None:
        if not isinstance(event, Delivered):
            self.lost.append(event.peer)
            return
        header, body = event.header, event.body
        if isinstance(body, TokenBatch):
            for entry in body.entries:
                received = self.received[entry.request, entry.attempt, entry.sequence]
                self._take(received, entry.index, entry.token_ids)
                received.finish = entry.finish or received.finish
                received.usage = entry.usage or received.usage
                received.beams = entry.texts or received.beams
                received.changed.set()
            return
        received = self.received[header.request, header.attempt, header.sequence]
        match body:
            case FirstToken():
                received.first_from_prefill = True
                self._take(received, body.index, [body.token_id] if body.token_id is not None else [])
                received.finish = body.finish or received.finish
                received.beams = body.texts or received.beams
                received.cached_tokens = body.cached_tokens
            case Failed():
                received.failed, received.failure, received.refused = body.cause, body.failure, body.refused
            case NeedDecode():
                received.need_decode.append(body)
        received.changed.set()

    @staticmethod
    def _take(received: Received, first: int, token_ids: list[int]) -> None:
        for index, token_id in enumerate(token_ids, first):
            assert received.tokens.setdefault(index, token_id) == token_id, "a token was contradicted"
