"""Endpoints that make programs' calls as raw API calls, or keep them; and what a cache could have done for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.kv_trees import BLOCK_SIZE, ROOT, Clock, serve
from kvrelay.kv.hashing import BlockHash, hash_blocks
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay_programs import Endpoint
from kvrelay_programs.beginnings import num_common
from kvrelay_programs.content import Content
from kvrelay_programs.endpoint import Caller
from kvrelay_programs.scoring import ScoredTokens


@dataclass(frozen=True, slots=True)
class Call:
    """One prompt of a request. Without `add_generation_prompt`, `messages` are continued or end as they stand.
    `first_scored`: position of the first token whose log-probability was asked for. `number`: its place in the request.
    `output` has the answer's text.
    """

    text: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    token_ids: Sequence[int] = ()
    is_continued: bool = False
    has_generation_prompt: bool = True
    first_scored: int | None = None
    number: int = 0
    output: str = ""


class KeptCalls(Endpoint):
    """Keeps each request in the order in which they are sent, with its answer. `salt` is the `cache_salt` of all, so
    that runs with the same texts on one server do not find each other's blocks.
    """

    def __init__(self, base_url: str, model: str) -> None:
        super().__init__(base_url, model=model)
        self.salt = ""
        self._sent: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = []

    async def _post(self, path: str, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if path != "/tokenize":
            body = {**body, "cache_salt": self.salt} if self.salt else body
            self._sent.append((path, body, answer))
        answer |= await super()._post(path, body, caller)
        return answer

    def take_calls(self) -> list[Call]:
        """The calls since the last time."""
        sent, self._sent = self._sent, []
        return [call for path, body, answer in sent for call in _calls_of(path, body, answer)]


class RawCalls(KeptCalls):
    """What a script of raw API calls does: no session and no hints, and a request for each choice of a select."""

    async def prefetch(self, content: Content, caller: Caller) -> None:
        pass

    async def end_session(self, session: str) -> None:
        pass

    async def _post(self, path: str, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        return await super()._post(path, body, Caller("", caller.time_left_s, caller.usage))

    async def _scores(self, prompts: list[str] | list[list[int]], first: int, caller: Caller) -> list[ScoredTokens]:
        each = [super(RawCalls, self)._scores(prompts[at : at + 1], 1, caller) for at in range(len(prompts))]
        return [row for rows in await asyncio.gather(*each) for row in rows]


def _calls_of(path: str, body: Mapping[str, Any], answer: Mapping[str, Any]) -> list[Call]:
    choices = {int(choice["index"]): choice for choice in answer.get("choices", ())}
    if path == "/v1/chat/completions":
        output = (choices[0]["message"]["content"] or "") if choices else ""
        has_generation_prompt = body.get("add_generation_prompt", True)
        is_continued = body.get("continue_final_message", False)
        return [
            Call(
                messages=body["messages"],
                is_continued=is_continued,
                has_generation_prompt=has_generation_prompt,
                output=output,
            )
        ]
    first = body.get("logprob_start_len") if "prompt_logprobs" in body else None
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    return [
        Call(
            text=prompt if isinstance(prompt, str) else "",
            token_ids=() if isinstance(prompt, str) else prompt,
            first_scored=first,
            number=number,
            output="" if first is not None or number not in choices else choices[number]["text"],
        )
        for number, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True, slots=True)
class TokenizedCall:
    """`hashes` are of the blocks of prompt and answer, without the last token, whose KV is not computed.
    `num_reusable`: the most tokens of the prompt that a cache can have. `num_shared`: those of them that an earlier
    prompt of the same request has, too, if all are only scored: they need not fill blocks."""

    num_prompt: int
    num_reusable: int
    hashes: Sequence[BlockHash]
    num_shared: int = 0


def tokenized(calls: Sequence[Call], tokenizer: Any) -> list[TokenizedCall]:
    """Tokens of prompts and answers, as this tokenizer of `transformers` gives them."""
    found: list[TokenizedCall] = []
    scored: list[list[int]] = []  # the prompts of the newest request
    for call in calls:
        prompt, each = _tokenized(call, tokenizer)
        if not call.number:
            scored = []
        if call.first_scored is not None:
            scored.append(prompt)
        if len(scored) > 1:
            each = replace(each, num_shared=_num_shared(scored, call.first_scored or 0))
        found.append(each)
    return found


def _num_shared(prompts: Sequence[list[int]], first_scored: int) -> int:
    others = [num_common(prompts[0], prompt) for prompt in prompts[1:]]
    common = min(*others, min(map(len, prompts)) - 1)
    return max(0, min(common, max(first_scored, common) - 1))


def _tokenized(call: Call, tokenizer: Any) -> tuple[list[int], TokenizedCall]:
    prompt = list(call.token_ids)
    text = call.text
    if call.messages:
        text = tokenizer.apply_chat_template(
            list(call.messages),
            tokenize=False,
            add_generation_prompt=call.has_generation_prompt,
            continue_final_message=call.is_continued,
        )
    if not prompt:
        prompt = tokenizer.encode(text, add_special_tokens=not call.messages)
    whole = tokenizer.encode(text + call.output, add_special_tokens=not call.messages) if call.output else prompt
    most = len(prompt) - 1 if call.first_scored is None else min(len(prompt), call.first_scored) - 1
    hashes = hash_blocks(ROOT, whole[: max(len(whole) - 1, len(prompt))], BLOCK_SIZE)
    return prompt, TokenizedCall(len(prompt), max(most, 0) // BLOCK_SIZE * BLOCK_SIZE, hashes)


def best_possible_hits(calls: Sequence[TokenizedCall]) -> int:
    """Prompt tokens that one cache without end would have for these calls, in their order, if each prompt and answer
    were in it from the moment of the request on."""
    known: set[BlockHash] = set()
    num_hits = 0
    for call in calls:
        held = next((at for at, each in enumerate(call.hashes) if each not in known), len(call.hashes))
        num_hits += max(min(held * BLOCK_SIZE, call.num_reusable), call.num_shared)
        known.update(call.hashes)
    return num_hits


def tree_seconds(calls: Sequence[TokenizedCall], num_blocks: int) -> float:
    """CPU time that pool and prefix tree of a worker take for these calls, one after the other."""
    pool, clock = BlockPool(num_blocks, BLOCK_SIZE), Clock()
    cache = PrefixCache(pool, record_events=True)
    for call in calls:
        serve(pool, cache, list(call.hashes), clock)
        cache.drain_events()
    pool.check_integrity()
    return sum(clock.seconds.values())
