"""As many peers as a fleet may have, and more than a worker allows."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from kvrelay.fleet.worker_registry import MAX_SLOTS, Registry
from kvrelay.messaging.messenger import Messenger
from kvrelay.process import allow_open_files, die_with_parent
from kvrelay.protocol import codec
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings, PeerLost
from kvrelay.protocol.messages import Alive, Generate, Header, PeerRef, Prompt, TokenBatch, pack_tokens
from kvrelay.protocol.sampling import Sampling
from kvrelay.simulated.simulated_model import continuation, read_facts
from tests.component.dispatch.fake_workers import true_tokens
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.waiting import PATIENCE_S, until, wait_until

pytestmark = pytest.mark.component

FLEET_PROCESS = Path(__file__).with_name("fleet_process.py")
NUM_TOKENS = 4
PROMPT = list(range(5, 45))
COMMON_SOFT_LIMIT = 1024


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str, **options: Any) -> subprocess.Popen[str]:
        processes.append(subprocess.Popen(command, text=True, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def with_common_limit() -> Callable[[], None]:
    """The soft limit of open files that shells and service managers give to a process."""
    arm = die_with_parent()

    def prepare() -> None:
        arm()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (COMMON_SOFT_LIMIT, hard))

    return prepare


@pytest.mark.slow
def test_a_router_serves_through_every_worker_of_the_largest_fleet(
    redis_url: str, started: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    half = MAX_SLOTS // 2
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    fleets = [
        started(sys.executable, str(FLEET_PROCESS), redis_url, str(first), str(half), env=environment, **pipes)
        for first in (0, half)
    ]
    for fleet in fleets:
        assert fleet.stdout is not None and fleet.stdout.readline() == f"{half} workers joined\n"
    log_path = tmp_path / "router.log"
    router = [sys.executable, "-m", "kvrelay_router", f"--model={DEMO_MODEL}", "--served-model-name=fake", "--port=0"]
    router += [f"--redis-url={redis_url}", "--routing-policy=round_robin", "--local-prefill-tokens=0"]
    router += ["--peer-timeout-s=60", "--max-queued-requests=4096"]
    with log_path.open("w") as log:
        started(*router, stdout=log, stderr=log, preexec_fn=with_common_limit())
    wait_until(lambda: "serving fake at " in log_path.read_text())
    url = log_path.read_text().partition("serving fake at ")[2].split()[0]

    async def ask_all() -> tuple[list[Any], Counter[str]]:
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=url, timeout=2 * PATIENCE_S) as client:

            async def num_ready() -> int:
                workers = (await client.get("/fleet")).json()["workers"]
                return sum(worker["state"] == "ready" for worker in workers)

            while await num_ready() < MAX_SLOTS:
                await asyncio.sleep(0.2)
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(half)))
            headers = Counter(name for each in answers for name in _workers_of(each))
            return [each.json()["choices"][0]["token_ids"] for each in answers], headers

    answers, used = asyncio.run(ask_all())
    assert answers == [true_tokens(0, NUM_TOKENS)] * half
    assert len(used) == MAX_SLOTS and set(used.values()) == {1}
    assert not any(word in log_path.read_text() for word in ("Traceback", "cannot send", " is lost"))


def _workers_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [answer.headers["x-kvrelay-prefill"], answer.headers["x-kvrelay-decode"]]


async def right_answer(worker: PeerRef) -> None:
    """Another router gets the tokens that simulated devices compute for its prompt. While the worker has no room for
    it, its messages are dropped, which ends its link once there is room: as a router does, it then tries again."""
    sampling = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = Prompt(tokens=pack_tokens(PROMPT), sampling=sampling, timeout_s=600)
    tokens: list[int] = []
    num_attempts = 0

    def ask() -> None:
        nonlocal num_attempts
        num_attempts += 1
        messenger.send(worker, Generate(prompt=prompt), request="good", attempt=num_attempts)

    def take(event: LinkEvent) -> None:
        if isinstance(event, PeerLost):
            assert event.is_alive and not tokens, event
            ask()
        elif isinstance(event, Delivered) and isinstance(event.body, TokenBatch):
            tokens.extend(token for entry in event.body.entries for token in entry.token_ids)

    messenger = Messenger("router", take, settings=LinkSettings(peer_timeout_s=PATIENCE_S))
    messenger.start()
    try:
        ask()
        await until(lambda: len(tokens) >= 20)
    finally:
        messenger.close(0)
    assert tokens == continuation(PROMPT, sampling, read_facts(str(DEMO_MODEL)).vocabulary, 8192)


async def found(redis_url: str) -> PeerRef:
    registry = Registry(redis_url)
    try:
        while not (records := await registry.list_workers("m")):
            await asyncio.sleep(0.05)
        return PeerRef(records[0].worker_id, records[0].incarnation, records[0].address)
    finally:
        await registry.close()


def strangers(worker: PeerRef, count: int, closing: ExitStack) -> None:
    """Peers that greet the worker once each and can be reached, so that it opens a socket to each."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    closing.callback(context.destroy, linger=0)
    context.set(zmq.MAX_SOCKETS, count + 10)
    for number in range(count):
        inbox = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        header = Header(
            sender=f"stranger-{number}",
            incarnation="1",
            reply_to=f"tcp://127.0.0.1:{inbox.getsockname()[1]}",
            to_incarnation=worker.incarnation,
            link=1,
        )
        outbox = context.socket(zmq.PUSH)
        outbox.connect(worker.address)
        outbox.send_multipart(codec.encode(header, Alive()))


def decode_command(redis_url: str, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "kvrelay_decode", f"--model={DEMO_MODEL}", "--served-model-name=m", *flags]
    return [*command, f"--redis-url={redis_url}", "--backend=simulated", "--num-blocks=2000", "--peer-timeout-s=60"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--max-peers=100"]], ids=["room for all", "room for 100"])
def test_a_decode_worker_survives_1300_peers(
    redis_url: str, started: Callable[..., subprocess.Popen[str]], flags: list[str]
) -> None:
    allow_open_files(None)
    process = started(*decode_command(redis_url, *flags), preexec_fn=with_common_limit())

    async def run() -> None:
        worker = await asyncio.wait_for(found(redis_url), PATIENCE_S)
        with ExitStack() as closing:
            strangers(worker, 1300, closing)
            if not flags:
                await right_answer(worker)
        await right_answer(worker)  # strangers that are silent lose their links, so there is room for a router

    asyncio.run(run())
    assert process.poll() is None


def test_a_process_whose_hard_limit_is_too_low_says_so_and_ends(
    redis_url: str, started: Callable[..., subprocess.Popen[str]]
) -> None:
    arm = die_with_parent()

    def prepare() -> None:
        arm()
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))

    process = started(*decode_command(redis_url), stderr=subprocess.PIPE, preexec_fn=prepare)
    _, text = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "max_peers = 2048 needs 10496 open files" in text and "set max_peers to at most 148" in text
