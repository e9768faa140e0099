"""A worker evicts first what only ended sessions have used."""

from __future__ import annotations

import pytest

from kvrelay.protocol.link import Delivered, LinkEvent
from kvrelay.protocol.messages import PeerRef, Status, StatusQuery
from kvrelay.protocol.sampling import Sampling
from tests.component.workers.rig import prompt_of, run
from tests.fakes.hash_runner import HashRunner
from tests.fakes.waiting import until
from tests.fakes.workers import LocalWorker, StubRouter

pytestmark = pytest.mark.component
GREEDY = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
BLOCK = 16
SHARED = prompt_of(2 * BLOCK, seed=1)


class AskingRouter(StubRouter):
    """Counts the answers to its queries."""

    def __init__(self) -> None:
        self.num_answers = 0
        super().__init__()

    async def end(self, worker: PeerRef, session: str) -> None:
        before = self.num_answers
        self.messenger.send(worker, StatusQuery(query=1, ended_sessions=[session]))
        await until(lambda: self.num_answers > before)

    def _on_event(self, event: LinkEvent) -> None:
        if isinstance(event, Delivered) and isinstance(event.body, Status):
            self.num_answers += 1
        else:
            super()._on_event(event)


@pytest.mark.parametrize("ended", ["", "a", "b"])
def test_an_ended_session_makes_room_for_the_others(redis_url: str, ended: str) -> None:
    async def test() -> None:
        worker, router = LocalWorker(redis_url, "decode", HashRunner(num_blocks=16)), AskingRouter()
        await worker.start()
        try:

            async def cached(name: str, tokens: list[int], session: str) -> int:
                got = router.generate(worker.me, name, tokens, GREEDY, session=session)
                await got.finished()
                assert got.usage is not None
                return got.usage.cached_blocks

            # 2 blocks of both, and 4 of each: 10 of 16.
            prompts = {session: SHARED + prompt_of(4 * BLOCK, seed=ord(session)) for session in "ab"}
            assert await cached("1", prompts["a"], "a") == 0
            assert await cached("2", prompts["b"], "b") == 2
            if ended:
                await router.end(worker.me, ended)
            await cached("3", prompt_of(9 * BLOCK, seed=5), "")  # evicts some of one
            kept = "a" if ended == "b" else "b"
            assert await cached("4", prompts[kept], kept) == 5  # all but the last, of which a token is computed
            assert await cached("5", prompts["a" if kept == "b" else "b"], "") < 5
        finally:
            await worker.stop()
            router.close()

    run(test)
