"""Requests of every kind, their undisturbed outcomes, and clients that hold what they get against them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fakes.random_constraints import check_constraint, constrain, is_constrained

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "kvrelay-demo"
DEADLINE_GRACE_S = 6.0
"""The HTTP layer gives up 5 s after the deadline, should dispatch ever forget it."""
HANGS_AFTER = 5
"""Deadlines; until then a late answer is told with its time, and a router that is gone or refuses is asked again."""
SAMPLES_SHARE = 0.15
_WORDS = ("the", "moon", "sea", "a little", "boat sang", "of winter", "to its old friend", "and then", "they went home")


@dataclass(slots=True)
class Outcome:
    """What a client got. `logprobs` are concatenated over a stream's chunks."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, Any] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Takes a choice of an answer, or a piece of one out of a stream."""
        index = choice["index"]
        message = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or message.get("content") or ""
        self.texts[index] = self.texts.get(index, "") + text
        self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        if choice.get("logprobs"):
            self.logprobs[index] = _join(self.logprobs.get(index), choice["logprobs"])
        if choice.get("finish_reason"):
            assert index not in self.finish_reasons, "a choice ended twice"
            self.finish_reasons[index] = choice["finish_reason"]


def _join(one: Any, other: Any) -> Any:
    if one is None:
        return other
    if isinstance(one, dict):
        return {key: _join(one.get(key), other.get(key)) for key in one | other}
    return [*(one or []), *(other or [])]


@dataclass(frozen=True, slots=True)
class Job:
    """A request. `leave_after_s`, `leave_after_chunks`: when its client goes away; None: it stays. `resets`: it goes
    with a reset instead of an orderly end."""

    number: int
    kind: int
    path: str
    body: dict[str, Any]
    leave_after_s: float | None = None
    leave_after_chunks: int | None = None
    resets: bool = False

    @property
    def stays(self) -> bool:
        return self.leave_after_s is None and self.leave_after_chunks is None

    @property
    def extensions(self) -> dict[str, Any]:
        """For httpx: what is done to the connection of this request."""
        return {"trace": _close_with_reset} if self.resets else {}


async def _close_with_reset(event: str, info: dict[str, Any]) -> None:
    if event == "connection.connect_tcp.complete":
        connection = info["return_value"].get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def make_kind(
    kind: int, seed: int, samples_share: float = SAMPLES_SHARE, *, with_beams: bool = True
) -> tuple[str, dict[str, Any]]:
    """One of the distinct requests: (path, body). `samples_share` of them, but for beams, ask for several samples."""
    rng = random.Random(f"{seed}/{kind}")
    if rng.random() < 0.08 and with_beams:
        return COMPLETIONS, beam_search(rng.getrandbits(32), rng)
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.choice([1, 2, rng.randint(5, 40), rng.randint(40, 150), rng.randint(200, 500)]),
        "temperature": rng.choice([0.0, 0.0, 0.8, 1.0]),
        "seed": rng.getrandbits(40),
        "ignore_eos": rng.random() < 0.6,
        "return_token_ids": True,
    }
    if rng.random() < samples_share:
        body["n"] = rng.choice([2, 3, 7])
    if rng.random() < 0.25:
        body["stop"] = rng.sample([" the", "and", "e", ".", "\n", "boat", "q"], 2)
    if rng.random() < 0.15:
        body |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
    if rng.random() < 0.5:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    wants_logprobs = rng.random() < 0.15
    if rng.random() < 0.25:
        if wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": 2}
        text = " ".join(rng.choices(_WORDS, k=rng.choice([5, 50, 150])))
        body["messages"] = [{"role": "system", "content": "Answer in a song."}, {"role": "user", "content": text}]
        return CHAT, body
    if wants_logprobs:
        body["logprobs"] = 2
    family = random.Random(f"family {rng.randrange(4)}").choices(range(4, 2048), k=400)  # prefixes to be shared
    shared = family[: rng.choice([0, 0, 48, 200, 400])]
    body["prompt"] = shared + rng.choices(range(4, 2048), k=rng.choice([3, 20, 90, 300]))
    return COMPLETIONS, body


def beam_search(seed: int, options: random.Random) -> dict[str, Any]:
    rng = random.Random(f"beams {seed}")
    prompt = rng.choices(range(4, 2048), k=rng.choice([5, 40, 150]))
    width, max_tokens = rng.choice([2, 3]), rng.choice([12, 30])
    return {
        "model": MODEL,
        "prompt": prompt,
        "use_beam_search": True,
        "best_of": width,
        "n": options.randint(1, width),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def make_jobs(
    number: int, seed: int, num_kinds: int, samples_share: float = SAMPLES_SHARE, constrained_share: float = 0.0
) -> list[Job]:
    return list(itertools.islice(draw_jobs(seed, num_kinds, samples_share, constrained_share), number))


def draw_jobs(
    seed: int, num_kinds: int, samples_share: float = SAMPLES_SHARE, constrained_share: float = 0.0
) -> Iterator[Job]:
    """Endless, and the same for the same seed; every kind comes once before they come at random. Some share the prefix
    cache with all others, most have one of their own, so that blocks have to travel. Constrained ones are no beams."""
    rng, endings = random.Random(f"jobs {seed}"), random.Random(f"endings {seed}")
    constraints = random.Random(f"constraints {seed}")
    kinds = []
    for kind in range(num_kinds):
        constrained = constraints.random() < constrained_share
        path, body = make_kind(kind, seed, samples_share, with_beams=not constrained)
        if constrained:
            constrain(body, constraints)
        kinds.append((path, body))
    for each in itertools.count():
        kind = each if each < num_kinds else rng.randrange(num_kinds)
        path, body = kinds[kind]
        salt = {} if rng.random() < 0.3 else {"cache_salt": f"{seed}-{each}"}
        leave_after_s = leave_after_chunks = None
        if rng.random() < 0.12:
            if body.get("stream"):
                leave_after_chunks = rng.randint(0, 15)
            else:
                leave_after_s = rng.random() * 2
        yield Job(each, kind, path, body | salt, leave_after_s, leave_after_chunks, endings.random() < 0.5)


class Mismatch(AssertionError):
    """An output is not that of the undisturbed run."""


@dataclass(slots=True)
class Load:
    """Runs jobs against routers and counts how they end. `stood_still_s` says for how long a router was stopped since a
    moment: it cannot keep a deadline meanwhile."""

    urls: list[str]
    request_timeout_s: float
    stood_still_s: Callable[[str, float], float] = lambda url, since: 0.0
    counts: Counter[str] = field(default_factory=Counter)
    constrained: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    async def references(self, jobs: list[Job], concurrency: int) -> dict[int, Outcome]:
        """One undisturbed run for each kind of request. Raises Mismatch for samples unlike one drawn alone."""
        room = asyncio.Semaphore(concurrency)
        found: dict[int, Outcome] = {}
        firsts = {job.kind: job for job in reversed(jobs)}
        async with httpx.AsyncClient(timeout=self.request_timeout_s) as client:

            async def one(job: Job) -> None:
                async with room:
                    found[job.kind] = await self._undisturbed(client, job, {})
                    self._check_constraint(job, found[job.kind])
                    if "n" in job.body and not job.body.get("use_beam_search"):
                        _check_samples(job, found[job.kind], await self._undisturbed(client, job, {"n": 1}))

            async with asyncio.TaskGroup() as group:
                for job in firsts.values():
                    group.create_task(one(job))
        return found

    def _check_constraint(self, job: Job, outcome: Outcome) -> None:
        """A constrained output that was not cut is valid."""
        if not is_constrained(job.body):
            return
        self.constrained["requests"] += 1
        for index, text in outcome.texts.items():
            if outcome.finish_reasons[index] == "stop":
                check_constraint(job.body, text)
                self.constrained["complete"] += 1
            else:
                assert outcome.finish_reasons[index] == "length", job
                self.constrained["cut"] += 1

    async def run(self, job: Job, expected: Outcome) -> None:
        """Raises Mismatch, and AssertionError for an answer that is late or no answer at all."""
        urls = self.urls[job.number % len(self.urls) :] + self.urls[: job.number % len(self.urls)]
        patience_ends = time.monotonic() + HANGS_AFTER * self.request_timeout_s
        for url in itertools.cycle(urls):
            began = time.monotonic()
            assert began < patience_ends, f"job {job.number}: no router answered"
            try:
                # A client of its own: a connection that a dead router left in a pool would be another test.
                async with httpx.AsyncClient(timeout=None) as client:
                    outcome = await self._ask(client, url, job, expected)
            except httpx.TransportError:
                self.counts["asked again, the router was gone"] += 1
                await asyncio.sleep(0.2)
                continue
            except NotNow as refusal:
                self.counts[f"asked again after {refusal.status}"] += 1
                await asyncio.sleep(refusal.retry_after_s)
                continue
            except ErrorAnswer as error:
                self.counts["error answers"] += 1
                self.errors.append(f"job {job.number}: {error}")
                outcome = None
            took_s = time.monotonic() - began
            self.slowest_s = max(self.slowest_s, took_s)
            allowed_s = self.request_timeout_s + DEADLINE_GRACE_S + self.stood_still_s(url, began)
            assert took_s <= allowed_s, f"job {job.number} took {took_s:.1f} s, its deadline is {allowed_s:.1f} s"
            if outcome is not None:
                self.counts["equal"] += 1
                self._check_constraint(job, outcome)
            return

    async def _undisturbed(self, client: httpx.AsyncClient, job: Job, changed: dict[str, Any]) -> Outcome:
        body = job.body | {"cache_salt": f"reference {job.kind} {changed}"} | changed
        if "speculation" in body:
            body["speculation"] = "off"  # drafts must not change the tokens either
        outcome = await self._ask(client, self.urls[0], Job(job.number, job.kind, job.path, body), None)
        assert outcome is not None
        return outcome

    # -- one exchange -------------------------------------------------------------------------------------------------

    async def _ask(self, client: httpx.AsyncClient, url: str, job: Job, expected: Outcome | None) -> Outcome | None:
        """None: the client left. Raises TimeoutError if nothing came for far longer than the deadline."""
        exchange = self._stream(client, url, job, expected) if job.body.get("stream") else self._whole(client, url, job)
        asking = asyncio.ensure_future(exchange)
        # Not asyncio.timeout: a cancellation may come out of the client as such, and would end the caller unnoticed.
        try:
            await asyncio.wait([asking], timeout=job.leave_after_s or HANGS_AFTER * self.request_timeout_s)
        finally:
            has_left = asking.cancel()
            await asyncio.wait([asking])
        if has_left and job.leave_after_s is None:
            raise TimeoutError(f"job {job.number} hangs")
        outcome = None if has_left else asking.result()
        if outcome is None:
            self.counts["left"] += 1
        elif expected is not None:
            check_equal(job, outcome, expected)
        return outcome

    async def _whole(self, client: httpx.AsyncClient, url: str, job: Job) -> Outcome:
        answer = await client.post(url + job.path, json=job.body, extensions=job.extensions)
        _check_status(answer.status_code, answer.headers, answer.content)
        content = answer.json()
        outcome = Outcome(usage=content["usage"])
        for choice in content["choices"]:
            outcome.add(choice)
        return outcome

    async def _stream(self, client: httpx.AsyncClient, url: str, job: Job, expected: Outcome | None) -> Outcome | None:
        outcome = Outcome()
        num_chunks, is_done = 0, False
        async with client.stream("POST", url + job.path, json=job.body, extensions=job.extensions) as answer:
            if answer.status_code != 200:
                _check_status(answer.status_code, answer.headers, await answer.aread())
            async for line in answer.aiter_lines():
                if not line or line.startswith(":"):  # a comment says that the answer is being worked on
                    continue
                assert not is_done, "something came after [DONE]"
                if line == "data: [DONE]":
                    is_done = True
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ErrorAnswer(f"in the stream: {chunk['error']}")
                for choice in chunk["choices"]:
                    outcome.add(choice)
                outcome.usage = chunk.get("usage") or outcome.usage
                if expected is not None:
                    check_prefix(job, outcome, expected)
                num_chunks += 1
                if job.leave_after_chunks is not None and num_chunks > job.leave_after_chunks:
                    return None
        assert is_done, f"job {job.number}: a stream ended without [DONE]"
        return outcome


class NotNow(Exception):
    """429 or 503 with Retry-After: come again."""

    def __init__(self, status: int, retry_after_s: float) -> None:
        super().__init__(status)
        self.status = status
        self.retry_after_s = retry_after_s


class ErrorAnswer(Exception):
    """The request ended without its output, and the client was told so."""


def _check_status(status: int, headers: httpx.Headers, content: bytes) -> None:
    if status in (429, 503):
        raise NotNow(status, float(headers["retry-after"]))
    if status in (502, 504):
        raise ErrorAnswer(f"{status}: {content.decode()}")
    assert status == 200, f"{status}: {content.decode()}"


def _check_samples(job: Job, outcome: Outcome, alone: Outcome) -> None:
    """The first of several samples is what is drawn where there is one only; greedy, all of them are."""
    for index in outcome.texts if not job.body["temperature"] else (0,):
        one = (outcome.texts[index], outcome.token_ids[index], outcome.finish_reasons[index])
        if one != (alone.texts[0], alone.token_ids[0], alone.finish_reasons[0]):
            raise Mismatch(f"job {job.number}/{index} ({job.body}): {one}, alone {alone}")


def check_prefix(job: Job, outcome: Outcome, expected: Outcome) -> None:
    """What came so far is the beginning of what must come. Raises Mismatch."""
    for index, text in outcome.texts.items():
        if not expected.texts[index].startswith(text):
            raise Mismatch(f"job {job.number}/{index}: {text!r} does not begin {expected.texts[index]!r}")


def check_equal(job: Job, outcome: Outcome, expected: Outcome) -> None:
    """Raises Mismatch."""
    for name in ("texts", "token_ids", "finish_reasons", "logprobs"):
        got, wanted = getattr(outcome, name), getattr(expected, name)
        if got != wanted:
            raise Mismatch(f"job {job.number} ({job.body}): {name} are {got}, not {wanted}")
    if _counts_of(outcome.usage) != _counts_of(expected.usage):
        raise Mismatch(f"job {job.number}: usage is {outcome.usage}, not {expected.usage}")


def _counts_of(usage: dict[str, Any] | None) -> list[int] | None:
    """Without the cached tokens, which depend on where a request runs."""
    return None if usage is None else [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
