"""What one router sends counts at the others before they ask again, and a worker evicts first what only ended sessions
have used."""

from __future__ import annotations

import pytest

from kvrelay.protocol.link import Delivered, LinkEvent
from kvrelay.protocol.messages import PeerRef, Status, StatusQuery
from kvrelay.protocol.sampling import Sampling
from kvrelay_router.fleet.load import OutstandingLoad
from kvrelay_router.fleet.view import FleetView
from kvrelay_router.routing.estimates import Candidate
from tests.component.workers.rig import fleet, prompt_of
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import until
from tests.fakes.workers import LocalWorker, StubRouter

pytestmark = pytest.mark.component
GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
ASKED = 7


class ListeningRouter(StubRouter):
    """Keeps the reports that come."""

    def __init__(self, name: str = "router") -> None:
        self.statuses: list[Status] = []
        super().__init__(name)

    def ask(self, worker: PeerRef) -> None:
        self.messenger.send(worker, StatusQuery(query=ASKED))

    def _on_event(self, event: LinkEvent) -> None:
        if isinstance(event, Delivered) and isinstance(event.body, Status):
            self.statuses.append(event.body)
        else:
            super()._on_event(event)


def seen_by(router: ListeningRouter, worker: LocalWorker) -> Candidate:
    """The worker after the last report, for a router that has nothing there."""
    view = FleetView(OutstandingLoad())
    view.registered([worker.started.record], 0.0)
    view.answered(worker.me, router.statuses[-1], 0.0)
    (candidate,) = view.candidates(0.0).prefill
    return candidate


async def test_a_router_hears_what_another_one_sent_without_asking(redis_url: str) -> None:
    runner = HashRunner()
    async with fleet(redis_url, [runner], [HashRunner()], token_budget=32, max_running=32) as f:
        one, other = ListeningRouter("one"), ListeningRouter("other")
        try:
            worker = f.prefill[0]
            for router in (one, other):
                router.ask(worker.me)
            await until(lambda: one.statuses and other.statuses)
            assert seen_by(other, worker).num_sequences == seen_by(other, worker).queued_tokens == 0
            runner.hold_after(0)
            prompts = [prompt_of(60, seed) for seed in range(4)]
            got = [one.prefill(worker.me, f.decode[0].me, f"r{i}", each, GREEDY) for i, each in enumerate(prompts)]
            await until(lambda: seen_by(other, worker).num_sequences == 4)
            assert seen_by(other, worker).queued_tokens > 100, "all but what the step in flight computes"
            assert {status.query for status in other.statuses[1:]} == {0}, "it asked once"
            assert {status.query for status in one.statuses} == {ASKED}, "its own it knows of"
            runner.go_on()
            for each, prompt in zip(got, prompts, strict=True):
                assert (await each.finished()).output == expected_tokens(prompt, GREEDY, 512)
            await f.until_clean()
        finally:
            runner.go_on()
            one.close()
            other.close()


# -- sessions ---------------------------------------------------------------------------------------------------------

BLOCK = 16
ONE_TOKEN = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
SHARED = prompt_of(2 * BLOCK, seed=1)


async def end_session(router: ListeningRouter, worker: PeerRef, session: str) -> None:
    num_before = len(router.statuses)
    router.messenger.send(worker, StatusQuery(query=ASKED, ended_sessions=[session]))
    await until(lambda: len(router.statuses) > num_before)


@pytest.mark.parametrize("ended", ["", "a", "b"])
async def test_an_ended_session_makes_room_for_the_others(redis_url: str, ended: str) -> None:
    worker, router = LocalWorker(redis_url, "decode", HashRunner(num_blocks=16)), ListeningRouter()
    await worker.start()
    try:

        async def cached(name: str, tokens: list[int], session: str) -> int:
            got = router.generate(worker.me, name, tokens, ONE_TOKEN, session=session)
            await got.finished()
            assert got.usage is not None
            return got.usage.cached_blocks

        # 2 blocks of both, and 4 of each: 10 of 16.
        prompts = {session: SHARED + prompt_of(4 * BLOCK, seed=ord(session)) for session in "ab"}
        assert await cached("1", prompts["a"], "a") == 0
        assert await cached("2", prompts["b"], "b") == 2
        if ended:
            await end_session(router, worker.me, ended)
        await cached("3", prompt_of(9 * BLOCK, seed=5), "")  # evicts some of one
        kept = "a" if ended == "b" else "b"
        assert await cached("4", prompts[kept], kept) == 5  # all but the last, of which a token is computed
        assert await cached("5", prompts["a" if kept == "b" else "b"], "") < 5
    finally:
        await worker.stop()
        router.close()
