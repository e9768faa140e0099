"""Calls to an OpenAI endpoint: texts, chats, scores of choices, and the prefixes that will be needed."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import httpx

from kvrelay_programs.content import Content, SentTexts, chat_fields, num_common
from kvrelay_programs.errors import CannotScore, EndpointError
from kvrelay_programs.expressions import Select
from kvrelay_programs.program_loop import SessionEnds
from kvrelay_programs.results import ChoiceScore, Generated, Selected, Usage
from kvrelay_programs.scoring import ScoredTokens, best_choice, top_tokens_of

_NUM_EACH = 16
_MAX_CLIENTS = 64


class Connections:
    """Divides calls among clients of few connections. httpx looks at all connections of a client whenever a call begins
    or ends: with 128 calls at once in one client, that is more than half of the CPU time of a program's process."""

    def __init__(self, headers: Mapping[str, str], timeout_s: float) -> None:
        """`timeout_s` bounds the silence within a call."""
        self._headers = dict(headers)
        self._timeout = httpx.Timeout(timeout_s, connect=10)
        self._ssl = httpx.create_ssl_context()
        self._clients: list[httpx.AsyncClient] = []
        self._num_calls: list[int] = []

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client for one call: the first that has room, so that connections of earlier calls are used again."""
        place = self._place()
        self._num_calls[place] += 1
        try:
            yield self._clients[place]
        finally:
            self._num_calls[place] -= 1

    def _place(self) -> int:
        for place, number in enumerate(self._num_calls):
            if number < _NUM_EACH:
                return place
        if len(self._clients) == _MAX_CLIENTS:
            return min(range(_MAX_CLIENTS), key=self._num_calls.__getitem__)
        limits = httpx.Limits(max_connections=_NUM_EACH, max_keepalive_connections=_NUM_EACH)
        self._clients.append(
            httpx.AsyncClient(headers=self._headers, timeout=self._timeout, limits=limits, verify=self._ssl)
        )
        self._num_calls.append(0)
        return len(self._clients) - 1


DEFAULT_URL = "http://127.0.0.1:8000"
_NOT_OFFERED = frozenset((404, 405, 501))
_REFUSED = _NOT_OFFERED | {400, 422}
_NUM_TOP_TOKENS = {True: 20, False: 5}  # the most that OpenAI gives in a chat and in a completion
_HEALED_TOKENS = 2  # tokens before the end of a text that may change when a choice follows; more are asked for again


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a call is made. `time_left_s` is until the program's deadline."""

    session: str
    time_left_s: float | None = None
    usage: Usage = field(default_factory=Usage)


class Endpoint:
    """A server's base URL, with or without /v1. `model` is its first one if left out; the key is that of the
    environment variable `KVRELAY_API_KEY` if left out. `timeout_s` bounds the silence within a call.
    """

    least_prefetch_chars = 512

    def __init__(
        self,
        base_url: str | None = None,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600,
    ) -> None:
        url = (base_url or os.environ.get("KVRELAY_URL") or DEFAULT_URL).rstrip("/")
        self.base_url = url.removesuffix("/v1")
        self._model = model
        self._is_kvrelay = False
        self._asked = False
        self._scores_prompts = True  # until it refuses to
        key = api_key if api_key is not None else os.environ.get("KVRELAY_API_KEY")
        self._connections = Connections({"authorization": f"Bearer {key}"} if key else {}, timeout_s)
        self.sent = SentTexts()
        self._session_ends = SessionEnds(self._report_ended)
        self._asking = asyncio.Lock()

    async def generate(
        self, content: Content, fields: Mapping[str, Any], caller: Caller, on_text: Callable[[str], None] | None = None
    ) -> Generated:
        """Continues `content`. With `on_text`, the answer is streamed to it. Raises EndpointError."""
        body = {"model": await self._served_model(), **fields}
        if content.is_chat:
            path = "/v1/chat/completions"
            body |= chat_fields(content)
            if (num_alternatives := body.pop("logprobs", None)) is not None:
                body |= {"logprobs": True, "top_logprobs": num_alternatives}
        else:
            path = "/v1/completions"
            body["prompt"] = content.text
        if on_text is not None:
            return await self._streamed(path, body, caller, on_text)
        return _generated(await self._post(path, body, caller), content.is_chat)

    async def select(self, content: Content, step: Select, caller: Caller) -> Selected:
        """The likeliest choice behind `content`. Raises CannotScore if the endpoint does not score prompts."""
        await self._served_model()
        return await (self._in_one_request if self._is_kvrelay else self._by_prompts)(content, step, caller)

    async def _in_one_request(self, content: Content, step: Select, caller: Caller) -> Selected:
        body = {
            "model": await self._served_model(),
            **(chat_fields(content) if content.is_chat else {"prompt": content.text}),
            "choices": step.choices,
            "normalization": step.normalization,
            "unconditional_prompt": step.unconditional_prefix,
        }
        answer = await self._post("/v1/select", body, caller)
        scores = tuple(
            ChoiceScore(choice, found["logprob"], found["num_tokens"], found["score"])
            for choice, found in zip(step.choices, answer["scores"], strict=True)
        )
        return Selected(step.choices[answer["selected"]], scores)

    async def _by_prompts(self, content: Content, step: Select, caller: Caller) -> Selected:
        scored, unconditional = await self.score(content, step.choices, caller), None
        if step.normalization == "unconditional":
            unconditional = await self.score(Content(text=step.unconditional_prefix), step.choices, caller)
        by_tokens = step.normalization == "tokens"
        return best_choice(step.choices, scored, by_tokens=by_tokens, unconditional=unconditional)

    async def score(self, content: Content, endings: Sequence[str], caller: Caller) -> list[ScoredTokens]:
        """Log-probabilities of the tokens by which each ending differs from `content` alone, in one request.

        A text may have other tokens at its end once an ending follows. The scores of all endings therefore begin at
        the first token that differs for any of them. Raises CannotScore if the endpoint does not score prompts.
        """
        await self._served_model()
        if not self._scores_prompts:
            raise self._cannot_score()
        try:
            return await self._scored_endings(content, endings, caller)
        except CannotScore:
            self._scores_prompts = False
            raise
        except EndpointError as error:
            if error.status not in _REFUSED:
                raise
            # A bad request may be due to this prompt only.
            self._scores_prompts = error.status not in _NOT_OFFERED
            raise self._cannot_score() from error

    async def top_tokens(self, content: Content, ending: str, caller: Caller) -> dict[str, float]:
        """The likeliest tokens behind `content` and `ending`, with their log-probabilities."""
        behind = content.added(ending) if ending else content
        fields = {"max_tokens": 1, "temperature": 0, "logprobs": _NUM_TOP_TOKENS[content.is_chat]}
        return top_tokens_of(await self.generate(behind, fields, caller), is_chat=content.is_chat)

    async def _scored_endings(self, content: Content, endings: Sequence[str], caller: Caller) -> list[ScoredTokens]:
        alone, prompts = await self._prompts_of(content, endings, caller)
        first_asked = max(len(alone) - _HEALED_TOKENS, 1)
        while True:
            rows = await self._scores(prompts, first_asked, caller)
            first = max(min(num_common(alone, row.token_ids) for row in rows), 1)
            if first >= first_asked:
                return [row.behind(first) for row in rows]
            first_asked = first

    def is_worth_prefetching(self, content: Content) -> bool:
        """Whether `content` has enough text that this endpoint has not got lately. A worker lets calls wait whose
        prefix another call computes, so a short one is not worth a call of its own before them."""
        text = content.whole_text
        return len(text) - self.sent.num_known(text) >= self.least_prefetch_chars

    async def prefetch(self, content: Content, caller: Caller) -> None:
        """Has the endpoint compute and keep the prefix `content` for calls that follow. Raises EndpointError."""
        model = await self._served_model()
        if not self._is_kvrelay or content.is_empty or (content.is_chat and not content.closed_messages):
            return  # another server would generate for it
        if content.is_chat:
            fields = chat_fields(content)
            fields.setdefault("add_generation_prompt", False)
            await self._post("/v1/chat/completions", {"model": model, "max_tokens": 0, **fields}, caller)
        else:
            body = {"model": model, "prompt": content.text, "max_tokens": 0}
            await self._post("/v1/completions", body, caller)

    async def end_session(self, session: str) -> None:
        """Tells kvrelay, a moment later and together with other sessions, that no call of this one will come."""
        if self._is_kvrelay:
            self._session_ends.add(session)

    async def _report_ended(self, sessions: Sequence[str]) -> None:
        query = urlencode([("session", session) for session in sessions])
        async with self._answer("DELETE", f"/sessions?{query}", None, None):
            pass

    async def _prompts_of(
        self, content: Content, endings: Sequence[str], caller: Caller
    ) -> tuple[list[int], list[str] | list[list[int]]]:
        """The tokens of `content` alone, and a prompt with each ending."""
        if not content.is_chat:
            alone = await self._tokens({"prompt": content.text}, caller)
            return alone, [content.text + ending for ending in endings]
        asked = [self._tokens(chat_fields(content, ending), caller) for ending in ("", *endings)]
        alone, *prompts = await asyncio.gather(*asked)
        return alone, prompts

    async def _tokens(self, fields: Mapping[str, Any], caller: Caller) -> list[int]:
        body = {"model": await self._served_model(), **fields}
        tokens: list[int] = (await self._post("/tokenize", body, caller))["tokens"]
        return tokens

    async def _scores(self, prompts: list[str] | list[list[int]], first: int, caller: Caller) -> list[ScoredTokens]:
        body = {
            "model": await self._served_model(),
            "prompt": prompts,
            "max_tokens": 0,
            "prompt_logprobs": 0,
            "logprob_start_len": first,
            "return_token_ids": True,
        }
        answer = await self._post("/v1/completions", body, caller)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if any(choice.get("prompt_logprobs") is None or "prompt_token_ids" not in choice for choice in choices):
            raise self._cannot_score()
        return [_scored(choice["prompt_token_ids"], choice["prompt_logprobs"], first) for choice in choices]

    def _cannot_score(self) -> CannotScore:
        return CannotScore(f"{self.base_url} does not score prompts")

    async def _served_model(self) -> str:
        async with self._asking:
            if not self._asked:
                models = (await self._send("GET", "/v1/models", None, None))["data"]
                if not models and self._model is None:
                    raise EndpointError(f"{self.base_url} serves no model")
                self._is_kvrelay = any(each.get("owned_by") == "kvrelay" for each in models)
                self._model = self._model or models[0]["id"]
                self._asked = True
        assert self._model is not None
        return self._model

    async def _post(self, path: str, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        return await self._send("POST", path, body, caller)

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, caller: Caller | None
    ) -> dict[str, Any]:
        async with self._answer(method, path, body, caller) as response:
            content = await response.aread()
        try:
            answer: dict[str, Any] = json.loads(content)
        except ValueError as error:
            raise EndpointError(f"{self.base_url}{path} answered {content[:80]!r}, which is not JSON") from error
        if caller is not None and "usage" in answer:
            caller.usage.add(answer.get("usage"))
        return answer

    async def _streamed(
        self, path: str, body: dict[str, Any], caller: Caller, on_text: Callable[[str], None]
    ) -> Generated:
        texts: list[str] = []
        reasoning: list[str] = []
        finish_reason: str | None = None
        usage: dict[str, Any] | None = None
        logprobs: list[Any] = []
        is_complete = False
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._answer("POST", path, body, caller) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    is_complete = True
                    break
                event = json.loads(data)
                if "error" in event:
                    raise _error_of(event, None)
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", choice)
                    text = delta.get("content") or delta.get("text") or ""
                    reasoning.append(delta.get("reasoning_content") or "")
                    if text:
                        texts.append(text)
                        on_text(text)
                    if choice.get("logprobs") is not None:
                        logprobs.append(choice["logprobs"])
                    finish_reason = choice.get("finish_reason") or finish_reason
        if not is_complete:
            raise EndpointError(f"{self.base_url} broke its answer off")
        caller.usage.add(usage)
        return Generated("".join(texts), finish_reason, usage, logprobs or None, "".join(reasoning) or None)

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, caller: Caller | None
    ) -> AsyncIterator[httpx.Response]:
        """An answer with a status below 300. Raises EndpointError for any other and for a broken connection."""
        headers: dict[str, str] = {}
        if caller is not None:
            headers["x-kvrelay-session"] = caller.session
            if caller.time_left_s is not None:
                headers["x-request-timeout"] = f"{max(caller.time_left_s, 0.001):.3f}"
        try:
            async with (
                self._connections.client() as client,
                client.stream(method, f"{self.base_url}{path}", json=body, headers=headers) as response,
            ):
                if response.status_code >= 300:
                    raise _refusal(response.status_code, await response.aread())
                yield response
        except httpx.TimeoutException as error:
            raise EndpointError(f"{self.base_url} did not answer in time ({type(error).__name__})") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise EndpointError(f"no answer from {self.base_url}: {str(error) or type(error).__name__}") from error


def _refusal(status: int, content: bytes) -> EndpointError:
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "error" in answer:
        return _error_of(answer, status)
    return EndpointError(f"status {status}: {content[:200].decode(errors='replace')}", status=status)


def _error_of(answer: Mapping[str, Any], status: int | None) -> EndpointError:
    error = answer["error"]
    if not isinstance(error, dict):
        return EndpointError(str(error), status=status)
    message = str(error.get("message", error))
    code = error.get("code")
    prefix = "" if status is None else f"status {status}: "
    return EndpointError(prefix + message, status=status, code=None if code is None else str(code))


def _generated(answer: Mapping[str, Any], is_chat: bool) -> Generated:
    choice = answer["choices"][0]
    message = choice["message"] if is_chat else choice
    text = message["content" if is_chat else "text"] or ""
    return Generated(
        text,
        choice.get("finish_reason"),
        answer.get("usage"),
        choice.get("logprobs"),
        message.get("reasoning_content"),
    )


def _scored(
    token_ids: list[int], entries: Sequence[Mapping[str, Mapping[str, Any]] | None], first: int
) -> ScoredTokens:
    """Of each token from `first` on its own log-probability; NaN where the endpoint gave none."""
    if len(entries) != len(token_ids):
        raise EndpointError(f"{len(entries)} log-probabilities for a prompt of {len(token_ids)} tokens")
    logprobs = [
        math.nan if entry is None else float(entry[str(token)]["logprob"])
        for token, entry in zip(token_ids[first:], entries[first:], strict=True)
    ]
    return ScoredTokens(token_ids, logprobs)
