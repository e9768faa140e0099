"""The router's own Python for a request and for a token event, without sockets and without sleep.

The whole application (HTTP routes, tokenizer, routing, dispatch, detokenizer, server-sent events) runs in this process.
Workers' messages come as the bytes that they send, decoded; `send` of ASGI and the
writer of events drop what they get. CPU time of this thread,
of rounds of 64 requests with 4 and with 68 tokens; the lowest fifth of the rounds is shown, because whatever else runs
on the machine only adds. What a router process takes beside it (its event loop, HTTP parsing, ZMQ, the kernel, caches
that are cold after a sleep) is the difference to router_cost.py.

Usage: python -m benchmarks.router_path [--rounds 25]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from benchmarks.router_load import prompt_text
from kvrelay.config.demo import DEMO_MODEL_NAME, demo_model_path
from kvrelay.fleet import WorkerRecord
from kvrelay.messaging.messenger import Messenger
from kvrelay.process import event_loop_factory, settle_garbage
from kvrelay.protocol import codec
from kvrelay.protocol.link import Delivered, LinkEvent
from kvrelay.protocol.messages import (
    PROTOCOL_VERSION,
    FirstToken,
    Header,
    LoadReport,
    PeerRef,
    Prefill,
    Status,
    TokenBatch,
    TokenEntry,
)
from kvrelay.protocol.sampling import FinishReason
from kvrelay_router.asgi.app import create_app
from kvrelay_router.dispatch.active_requests import DispatchSettings
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.http.event_writer import EVENT_WRITER
from kvrelay_router.openai.settings import ApiSettings
from kvrelay_router.pending_memory import BodyBytes, PendingMemory
from kvrelay_router.text.service import TextService

NUM_REQUESTS = 64
FEW_TOKENS, MANY_TOKENS = 4, 68
WORKERS = [("prefill", f"p{number}") for number in range(2)] + [("decode", f"d{number}") for number in range(4)]


class RequestFailed(Exception):
    """There is nothing to measure; the text is the answer."""


class Recorder(Messenger):
    """Encodes what is sent, as the real one does, and keeps it; no peer ever hears of it."""

    def __init__(self, on_event: Callable[[LinkEvent], None]) -> None:
        super().__init__("router", on_event)
        self.prefills: list[tuple[PeerRef, PeerRef, str, int, int]] = []  # prefill, decode, request, attempt, sequence

    def start(self) -> None: ...

    def silent_s(self, peer: PeerRef) -> float:
        """Everybody was heard just now."""
        return 0.0

    def send(self, peer: PeerRef, body: Any, **about: Any) -> None:
        codec.encode_body(body)
        if isinstance(body, Prefill):
            assert body.decode is not None
            self.prefills.append((peer, body.decode, about["request"], about["attempt"], about["sequence"]))


class Path:
    """The application over a recorded messenger."""

    def __init__(self) -> None:
        text = TextService.load(str(demo_model_path()))
        self.recorders: list[Recorder] = []
        settings = DispatchSettings(max_requests=4 * NUM_REQUESTS, local_prefill_tokens=0)
        self.dispatcher = RouterDispatcher(self._open, self._list_workers, settings)
        self._register()
        api = ApiSettings(model_names=(DEMO_MODEL_NAME,), max_requests=4 * NUM_REQUESTS)
        self.app: ASGIApp = create_app(api, self.dispatcher, text)
        self.num_events = 0
        self._draw = random.Random(3)
        self._beginnings = [prompt_text(1000, self._draw) for _ in range(16)]  # of prompts, as in router_load.py

    def _open(self, on_event: Callable[[LinkEvent], None]) -> Messenger:
        self.recorders.append(Recorder(on_event))
        return self.recorders[0]

    async def _list_workers(self) -> list[WorkerRecord]:
        return []

    def _register(self) -> None:
        now = time.monotonic()
        records = [_record(name, role) for role, name in WORKERS]
        self.dispatcher.view.registered(records, now)
        load = LoadReport(step_cost=(1e-3, 1e-5, 0.0))
        for each in records:
            status = Status(query=1, draining=False, queues={}, blocks={"free": 1 << 16}, totals={}, load=load)
            self.dispatcher.view.answered(PeerRef(each.worker_id, each.incarnation, each.address), status, now)

    async def round(self, num_tokens: int) -> tuple[float, float, int]:
        """CPU seconds until all prompts are sent, and from then to the end; events in the second part.

        Raises RequestFailed as soon as a request is answered by an error.
        """
        recorder = self.recorders[0]
        recorder.prefills.clear()
        bodies = [self._body(num_tokens) for _ in range(NUM_REQUESTS)]
        began = time.thread_time()
        tasks = [asyncio.create_task(self._request(body)) for body in bodies]
        ended: list[asyncio.Task[None]] = []
        for task in tasks:
            task.add_done_callback(ended.append)
        while len(recorder.prefills) < NUM_REQUESTS:
            if ended:
                ended[0].result()
                raise RequestFailed("a request ended before its prompt was sent")
            await asyncio.sleep(0)
        submitted_s = time.thread_time() - began
        messages = self._messages(recorder, num_tokens)
        self.num_events = 0
        began = time.thread_time()
        for peer, header, frame in messages:
            self.dispatcher._on_event(Delivered(peer, header, codec.decode_body([b"", frame])))
            if not header.request:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return submitted_s, time.thread_time() - began, self.num_events

    def _body(self, num_tokens: int) -> bytes:
        asked = {"model": DEMO_MODEL_NAME, "stream": True, "max_tokens": num_tokens, "temperature": 0}
        prompt = f"{self._draw.choice(self._beginnings)} {prompt_text(1000, self._draw)}"
        return json.dumps(asked | {"prompt": prompt}).encode()

    def _messages(self, recorder: Recorder, num_tokens: int) -> list[tuple[PeerRef, Header, bytes]]:
        """First tokens, then a batch a step and decode worker."""
        messages = []
        by_decode: dict[PeerRef, list[tuple[str, int, int]]] = {}
        for prefill, decode, request, attempt, sequence in recorder.prefills:
            header = _header(request, attempt, sequence)
            messages.append((prefill, header, codec.encode_body(FirstToken(index=0, token_id=700))))
            by_decode.setdefault(decode, []).append((request, attempt, sequence))
        for index in range(num_tokens):
            finish = FinishReason.LENGTH if index + 1 == num_tokens else None
            for decode, keys in by_decode.items():
                entries = [
                    TokenEntry(request=r, attempt=a, sequence=s, index=index, token_ids=[300 + index], finish=finish)
                    for r, a, s in keys
                ]
                messages.append((decode, _header("", 0, 0), codec.encode_body(TokenBatch(entries=entries))))
        return messages

    async def _request(self, body: bytes) -> None:
        told, never = False, asyncio.Event()

        async def receive() -> Message:
            nonlocal told
            if told:
                await never.wait()
            told = True
            return {"type": "http.request", "body": body, "more_body": False}

        writer = Writer(self, body)
        status, last = 0, b""

        async def send(message: Message) -> None:
            nonlocal status, last
            writer.has_begun = True
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                last = message["body"]
                self.num_events += message.get("more_body", False)

        await self.app(_scope(body, writer), receive, send)
        if status != HTTPStatus.OK or last.startswith(b'data: {"error"'):
            raise RequestFailed(f"{status}: {last.decode()}")


class Writer:
    """As a connection's `EventWriter`; counts and drops."""

    def __init__(self, path: Path, body: bytes) -> None:
        self.body = BodyBytes(PendingMemory())
        self._path, self._body = path, body
        self.has_begun = False
        self.carries_events = False

    def whole_body(self) -> bytes:
        return self._body

    def is_ready(self) -> bool:
        return self.has_begun

    def watch(self, on_gone: Callable[[], None]) -> None: ...

    def unwatch(self) -> None: ...

    def in_one_write(self) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, events: bytes) -> None:
        """One part, which the connection would frame."""
        self._path.num_events += len(b"%x\r\n%b\r\n" % (len(events), events)) > 0


def _record(name: str, role: Any) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name,
        role=role,
        incarnation="1",
        address=f"tcp://{name}",
        model=DEMO_MODEL_NAME,
        fingerprint="benchmark",
        protocol_version=PROTOCOL_VERSION,
        block_size=16,
        num_blocks=1 << 16,
        max_model_len=1 << 16,
        vocab_size=2048,
        max_running=4096,
    )


def _header(request: str, attempt: int, sequence: int) -> Header:
    return Header(
        sender="w", incarnation="1", reply_to="", to_incarnation="1", link=1, request=request, attempt=attempt,
        sequence=sequence,
    )  # fmt: skip


def _scope(body: bytes, writer: Writer) -> Scope:
    path = "/v1/completions"
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}
    scope["state"] = {EVENT_WRITER: writer}
    scope["headers"] = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())]
    return scope


async def measure(num_rounds: int) -> None:
    path = Path()
    settle_garbage()
    for _ in range(3):
        await path.round(FEW_TOKENS)
    requests, events = [], []
    for _ in range(num_rounds):
        few_submit_s, few_s, few = await path.round(FEW_TOKENS)
        _, many_s, many = await path.round(MANY_TOKENS)
        event_s = (many_s - few_s) / (many - few)
        events.append(event_s * 1e6)
        requests.append((few_submit_s + few_s - few * event_s) / NUM_REQUESTS * 1e6)
    fifth = num_rounds // 5
    print(f"request {sorted(requests)[fifth]:.0f} us, event {sorted(events)[fifth]:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
