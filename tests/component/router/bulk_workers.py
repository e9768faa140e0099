"""A router over a real dispatcher, and a decode worker in another thread that sends as much at once as a worker may."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvrelay.fleet import WorkerRecord
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import LinkSettings
from kvrelay.protocol.messages import AnyBody, Generate, PeerRef, Prompt, SequenceUsage, TokenBatch, TokenEntry
from kvrelay.protocol.sampling import FinishReason, ScoredText, TokenLogprobs
from kvrelay.text.service import TextService
from kvrelay.worker.requests import scores_of
from kvrelay_router.asgi.app import create_app
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import DispatchSettings
from kvrelay_router.http.http_server import bind, serve
from kvrelay_router.openai.api_service import ApiSettings
from tests.component.dispatch.fake_workers import FakeDecode, Key
from tests.fakes.waiting import PATIENCE_S, until

MODEL = "test-model"
MAX_MODEL_LEN = 1 << 20
FIRST_ID, NUM_IDS = 5, 300
PATIENT = LinkSettings(peer_timeout_s=PATIENCE_S)
"""Both share an interpreter, in which one may hold the other up for long on a busy machine."""


def score(token_id: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, list(range(10, 10 + num_top)), [-1.0 - rank for rank in range(num_top)])


class BulkDecode(FakeDecode):
    """Answers each request in one message, and all that arrived together in the same one, like one long step."""

    def __init__(self) -> None:
        super().__init__("d0", max_model_len=MAX_MODEL_LEN, settings=PATIENT)
        self._answers: list[TokenEntry] = []

    @property
    def record(self) -> WorkerRecord:
        return msgspec.structs.replace(super().record, num_blocks=1 << 20, max_running=1024)

    def on_message(self, key: Key, peer: PeerRef, body: AnyBody) -> None:
        assert isinstance(body, Generate), body
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._send_all, peer)
        self._send_scores(key, peer, body.prompt)
        self._answers.append(self._answer(key, body.prompt))

    def _send_scores(self, key: Key, router: PeerRef, prompt: Prompt) -> None:
        if (scores := scores_of(prompt)) is None:
            return
        num_scores = prompt.sampling.num_prompt_scores(prompt.num_tokens)
        for message in scores.add([score(7, prompt.sampling.prompt_logprobs or 0)] * num_scores):
            self.send(router, key, message)

    def _answer(self, key: Key, prompt: Prompt) -> TokenEntry:
        sampling = prompt.sampling
        token_ids = [FIRST_ID + number % NUM_IDS for number in range(sampling.max_tokens)]
        beams: list[ScoredText] = []
        if sampling.beams is not None:
            beams = [ScoredText(token_ids, -1.0, -1.0, FinishReason.LENGTH)] * sampling.beams.num_returned
        return TokenEntry(
            request=key[0],
            attempt=key[1],
            sequence=key[2],
            index=0,
            token_ids=[] if beams else token_ids,
            logprobs=[] if sampling.logprobs is None else [score(each, sampling.logprobs) for each in token_ids],
            cached_tokens=0,
            finish=FinishReason.LENGTH,
            usage=SequenceUsage(prompt_blocks=1, computed_blocks=1),
            texts=beams,
        )

    def _send_all(self, router: PeerRef) -> None:
        entries, self._answers = self._answers, []
        self.messenger.send(router, TokenBatch(entries=entries))


class WorkerThread:
    """Runs a worker on an event loop of its own, whose CPU time is not that of the router's."""

    def __init__(self, make: Callable[[], BulkDecode]) -> None:
        self._make = make
        self._started, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="bulk-worker")
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self.worker, self._ended = self._make(), asyncio.Event()
        self.worker.start()
        self.record = self.worker.record
        self._started.set()
        await self._ended.wait()
        self.worker.kill()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()


@asynccontextmanager
async def bulk_router(text: TextService, **settings: Any) -> AsyncIterator[int]:
    """Yields the port of a router with one such worker."""
    thread = WorkerThread(BulkDecode)

    async def list_workers() -> list[WorkerRecord]:
        return [thread.record]

    dispatcher = RouterDispatcher(
        lambda on_event: Messenger("router", on_event, settings=PATIENT),
        list_workers,
        DispatchSettings(max_requests=4096),
    )
    dispatcher.start()
    try:
        await until(dispatcher.ready)
        api = ApiSettings(model_names=(MODEL,), max_body_bytes=8 << 20, **settings)
        server = await serve(create_app(api, dispatcher, text), bind("127.0.0.1", 0), graceful_timeout_s=2.0)
        try:
            yield server.port
        finally:
            await server.stop()
    finally:
        await dispatcher.close()
        thread.close()
